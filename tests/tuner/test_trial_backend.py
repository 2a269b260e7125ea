"""The nodes that a trial's ranks ran on, and the results that count."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.protocol import rank_files
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.rank_files import RankReport
from quartet_plugin.trial.attempt import read_result
from quartet_plugin.trial.compared_start import read_compared_steps
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.tuner.attempts import read_launch
from quartet_plugin.tuner.trial_backend import LocalBackend, nodes_of
from tests.model.plans import PLAN
from tests.trial.factory import report
from tests.tuner.fakes import COMMAND
from tests.tuner.run_folders import WritingMachine


def reports(*hosts: str, per_node: int = 2) -> list[RankReport]:
    """The reports of the ranks of these nodes, in the launcher's order."""
    places = [(host, local) for host in hosts for local in range(per_node)]
    return [report(rank, host=host, local_rank=local) for rank, (host, local) in enumerate(places)]


def test_a_host_name_is_a_node_in_the_launchers_order() -> None:
    assert nodes_of(reversed(reports("b", "a"))) == (
        NodeInfo(host="b", node_class="cpu x2", num_slots=2),
        NodeInfo(host="a", node_class="cpu x2", num_slots=2),
    )


def test_nodes_that_share_a_host_name_are_refused_with_a_fix() -> None:
    """Two containers of one image; nothing says which of them has a slot of a plan."""
    with pytest.raises(ConfigError) as raised:
        nodes_of(reports("trainer", "trainer"))
    message = str(raised.value)
    assert message.startswith(
        "host trainer: local ranks 0, 0, 1, 1; must be 0 to 3, each once, because nodes"
    )
    assert "give every node or container its own (docker run --hostname NAME)" in message
    with pytest.raises(ConfigError, match=r"local ranks 0, 0, 1, 1, 2, 2, 3, 3, \.\.\.; must be 0 to 127"):
        nodes_of(reports("trainer", "trainer", per_node=64))


@pytest.mark.parametrize(
    ("namespaces", "expected"),
    [
        ((7, 7, 9, 9), ((0, 1), (2, 3))),
        ((9, 7, 9, 7), ((0, 2), (1, 3))),
        ((7, 7, 7, 7), None),
        ((7, 7, 9, None), None),
        ((None, None, None, None), None),
    ],
    ids=["halves", "in turns", "shared", "not all say it", "none says it"],
)
def test_ranks_of_one_host_may_be_in_several_networks(
    namespaces: tuple[int | None, ...], expected: tuple[tuple[int, ...], ...] | None
) -> None:
    ranks = [
        replace(each, network_namespace=namespace)
        for each, namespace in zip(reports("a", per_node=4), namespaces, strict=True)
    ]
    (node,) = nodes_of(reversed(ranks))
    assert node == NodeInfo(host="a", node_class="cpu x4", num_slots=4, network_namespaces=expected)
    # The namespaces of two hosts have nothing to do with each other.
    hosts = [
        replace(each, network_namespace=index) for index, each in enumerate(reports("b", "a", per_node=1))
    ]
    assert [node.network_namespaces for node in nodes_of(hosts)] == [None, None]


def launched(folder: Path, *, outcome: Outcome = Outcome.OK) -> TrialResult:
    """One launch of a plan, with the files that it leaves."""
    request = TrialRequest(folder=folder, command=parse_command(COMMAND, environment={}), plan=PLAN)
    machine = WritingMachine(outcome=lambda plan: outcome)
    return machine.run(request, on_progress=lambda progress: None, should_stop=lambda: False)


def test_each_ranks_report_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1,024 ranks each further reading is a wait before the first proposal."""
    opened: list[str] = []

    def counted(kind: type[Any], path: Path, **options: Any) -> Any:
        opened.append(path.name)
        return read_shared(kind, path, **options)

    monkeypatch.setattr(rank_files, "read_shared", counted)
    launched(tmp_path)
    backend = LocalBackend()
    result = backend.recorded(tmp_path, plan_key=PLAN.key)
    assert result is not None
    num_slots = sum(node.num_slots for node in backend.nodes(result))
    backend.node_speeds(result)
    backend.modules(result)
    read_compared_steps(result)
    assert len(read_launch(tmp_path, faults=[]).reports) == num_slots > 1
    assert sorted(opened) == [f"rank-{rank}.json" for rank in range(num_slots)]
    # A rank that has written again is read again, and no other one.
    path = result.folder / "rank-1.json"
    write_json_atomic(path, {**json.loads(path.read_text()), "pid": 7})
    assert result.rank_files().reports[1].pid == 7
    assert opened[num_slots:] == ["rank-1.json"]


def test_a_superseded_measurement_stays_on_the_disk_and_does_not_count(tmp_path: Path) -> None:
    backend, faults = LocalBackend(), list[str]()
    measured = launched(tmp_path)
    assert backend.recorded(tmp_path, plan_key=PLAN.key) is not None
    assert backend.supersede(tmp_path)
    assert not backend.supersede(tmp_path)
    assert backend.recorded(tmp_path, plan_key=PLAN.key) is None
    shown = read_launch(tmp_path, faults=faults)
    assert (shown.result, shown.began_at, faults) == (None, None, [])
    kept = read_result(tmp_path / "attempt-1")
    assert kept is not None
    assert (kept.is_superseded, kept.iteration_s) == (True, measured.iteration_s)
    launched(tmp_path)
    again = backend.recorded(tmp_path, plan_key=PLAN.key)
    assert again is not None
    assert again.folder.name == "attempt-2"
    assert read_launch(tmp_path, faults=faults).attempt == 2


def test_a_plan_that_does_not_fit_is_not_superseded(tmp_path: Path) -> None:
    backend = LocalBackend()
    launched(tmp_path, outcome=Outcome.INFEASIBLE)
    assert not backend.supersede(tmp_path)
    assert backend.recorded(tmp_path, plan_key=PLAN.key) is not None
