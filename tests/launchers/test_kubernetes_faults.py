"""What states of pods say."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers.kubernetes_faults import pod_fault, unseen_fault


def pod(**status: Any) -> dict[str, Any]:
    """A pod on a node."""
    return {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": status}


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        ({"phase": "Pending"}, None),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 1}}}]}, None),
        ({"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}, None),
        ({"reason": "Evicted"}, "Kubernetes has taken pod p from n: Evicted"),
        (
            {
                "conditions": [
                    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
                ]
            },
            "Kubernetes has taken pod p from n: PreemptionByScheduler",
        ),
        (
            {"containerStatuses": [{"state": {"waiting": {"reason": "InvalidImageName"}}}]},
            "pod p cannot start on n: InvalidImageName",
        ),
    ],
)
def test_only_what_the_cluster_did_is_a_fault(status: dict[str, Any], fault: str | None) -> None:
    assert pod_fault(pod(**status)) == fault


def test_a_pod_without_the_folder_is_named() -> None:
    unseen = pod(containerStatuses=[{"state": {"terminated": {"exitCode": 78}}}])
    assert (
        unseen_fault([pod(), unseen], Path("/run")) == "pod p does not see /run: correct kubernetes.volumes"
    )
    assert unseen_fault([pod()], Path("/run")) is None
