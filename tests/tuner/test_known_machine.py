"""A run that is told its machine: what that changes, what is refused, and that it is kept."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet_plugin.calibration.constants_fit import Calibration, write_calibration
from quartet_plugin.calibration.full_size import enlarged_machine
from quartet_plugin.calibration.machine_prior import LINKS, KnownMachine, machine_model_of
from quartet_plugin.cost.cluster import with_hop
from quartet_plugin.cost.coefficients import INDEX, Coefficient, MachineModel
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.iteration.cache import IterationModelCache
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.cluster import parse_cluster
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.tuner.config import MachineConfig
from quartet_plugin.tuner.proposer import keep_machine, kept_machine, machine_of
from quartet_plugin.tuner.run_folder import RunFolder
from tests.space.jobs import make_job, make_layout, make_nodes
from tests.tuner.fakes import FakeMachine, tune
from tests.tuner.fakes import begin_with_journal as begin

NODES = make_nodes(2)


def probed(**changes: Any) -> dict[str, Any]:
    link = {"bandwidth_bytes_per_s": 3e9, "latency_s": 4e-5}
    return {
        "schema_version": 1,
        "nodes": [{"name": "here", "devices": ["core", "core"]}],
        "devices": {
            "core": {
                "peak_flops": {"fp32": 9e10},
                "memory_bytes": 2**33,
                "memory_bandwidth_bytes_per_s": 2e10,
            }
        },
        "links": {"measured": True, "scale_up": link},
        **changes,
    }


def calibration() -> Calibration:
    constants = with_hop(fitted(), 7e-5)
    return Calibration(
        constants=constants,  # type: ignore[arg-type]
        terms=(),
        covariance=np.zeros((0, 0)),
        iteration_error=0.02,
        num_iterations=9,
        num_parts=40,
    )


def machine(**changes: Any) -> KnownMachine:
    return KnownMachine(cluster=parse_cluster(probed(**changes), where="test"))


def test_a_probed_cluster_takes_the_place_of_what_is_assumed() -> None:
    assumed = machine_model_of(NODES, precision="fp32")
    told = machine_model_of(NODES, precision="fp32", machine=machine())
    assert told.intra_node.device.peak_flops["fp32"] == 9e10
    assert told.intra_node.scale_up_bytes_per_s * told.constants.scale_up == pytest.approx(3e9)
    assert told.constants.hop_s == pytest.approx(4 * 4e-5)
    for factor in (Coefficient.TRANSFER, Coefficient.NETWORK, Coefficient.LATENCY, Coefficient.SPEED):
        assert told.spreads[INDEX[factor]] < assumed.spreads[INDEX[factor]]
    assert told.spreads[INDEX[Coefficient.HEAD]] == assumed.spreads[INDEX[Coefficient.HEAD]]
    assert told.num_coefficients == assumed.num_coefficients


def test_links_that_were_only_stated_stay_uncertain() -> None:
    links = {**probed()["links"], "measured": False}
    told = machine_model_of(NODES, precision="fp32", machine=machine(links=links))
    assumed = machine_model_of(NODES, precision="fp32")
    assert told.spreads[INDEX[Coefficient.TRANSFER]] == assumed.spreads[INDEX[Coefficient.TRANSFER]]


def test_a_probe_leaves_the_spread_of_links_between_namespaces() -> None:
    nodes = (replace(NODES[0], network_namespaces=((0,), (1,))),)
    probed, assumed = (
        machine_model_of(nodes, precision="fp32", machine=known) for known in (machine(), None)
    )
    for name in LINKS:
        assert probed.spreads[INDEX[name]] == assumed.spreads[INDEX[name]]


def test_a_card_is_no_module_of_the_library() -> None:
    """An H100 PCIe has other links, another memory and lower rates than an H100 SXM."""
    for name, is_known in (("NVIDIA H100 80GB HBM3", True), ("NVIDIA H100 PCIe", False)):
        nodes = tuple(replace(node, node_class=f"{name} x2") for node in NODES)
        assert machine_model_of(nodes, precision="bf16").is_known == is_known


def test_unequal_devices_may_have_unequal_paces() -> None:
    nodes = tuple(replace(one, node_class="H100-SXM x2") for one in NODES)
    equal = [{"name": "here", "devices": ["core", "core"]}]
    mixed = [{"name": "here", "devices": ["core", "core"], "slowdown": [1.0, 1.5]}]
    found = [machine_model_of(nodes, precision="fp32", machine=machine(nodes=one)) for one in (equal, mixed)]
    assert found[0].spreads[-1] < found[1].spreads[-1]


def test_a_calibration_narrows_every_factor() -> None:
    assumed = machine_model_of(NODES, precision="fp32")
    told = machine_model_of(NODES, precision="fp32", machine=KnownMachine(calibration=calibration()))
    assert told.constants.hop_s == pytest.approx(7e-5)
    assert (told.spreads[: len(INDEX)] < assumed.spreads[: len(INDEX)]).all()


def test_nodes_of_one_fabric_are_joined_by_fast_links() -> None:
    nodes = make_nodes(1, 1)
    plan = baseline_plan(make_job(layout=make_layout()), nodes=nodes, run="r", seed=0)
    slow = {"bandwidth_bytes_per_s": 1e6, "latency_s": 4e-5}

    def model(*fabrics: str) -> MachineModel:
        described = [
            {"name": f"node-{index}", "devices": ["core"], "fabric": fabric}
            for index, fabric in enumerate(fabrics)
        ]
        known = machine(nodes=described, links={**probed()["links"], "network": slow})
        return machine_model_of(nodes, precision="fp32", machine=known)

    def seconds(machine_model: MachineModel) -> float:
        point = np.zeros(machine_model.num_coefficients)
        return float(IterationModelCache(machine_model).of(plan).evaluate(point)[0])

    joined, apart = model("f:0", "f:0"), model("f:0", "f:1")
    assert joined.domain_of_slot.tolist() == [0, 0]
    assert apart.domain_of_slot.tolist() == [0, 1]
    # A boundary tensor of a megabyte takes a second on the network, and no time on fast links.
    assert seconds(joined) < seconds(apart) / 2
    assert enlarged_machine(joined, factor=2).domain_of_slot.tolist() == [0, 0, 1, 1]
    assert enlarged_machine(apart, factor=2).domain_of_slot.tolist() == [0, 1, 2, 3]


def test_another_clusters_file_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"machine\.cluster: nodes of \[2\] devices; the run has nodes of \[4\]"
    ):
        machine_model_of(make_nodes(4), precision="fp32", machine=machine())


def test_the_run_keeps_what_it_was_told(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path / "r")
    folder.path.mkdir()
    (tmp_path / "cluster.json").write_text(json.dumps(probed()))
    write_calibration(calibration(), path=tmp_path / "calibration.json", source="test")
    config = MachineConfig(cluster="cluster.json", calibration="calibration.json")
    keep_machine(config, cwd=tmp_path, folder=folder)
    (tmp_path / "cluster.json").unlink()
    kept = kept_machine(folder)
    assert kept.cluster == parse_cluster(probed(), where="test")
    assert kept.calibration is not None
    assert kept.calibration.constants.hop_s == pytest.approx(7e-5)
    # Begun again without them, after a begin that came to nothing.
    keep_machine(MachineConfig(), cwd=tmp_path, folder=folder)
    assert kept_machine(folder).cluster is None
    assert kept_machine(folder).calibration is None


def test_a_bad_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(probed(nodes=[])))
    with pytest.raises(ConfigError, match="nodes"):
        machine_of(MachineConfig(cluster="cluster.json"), cwd=tmp_path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        machine_of(MachineConfig(calibration="none.json"), cwd=tmp_path)


def test_a_study_stands_on_it(tmp_path: Path) -> None:
    """It runs on the cluster of its file, and ends in one line on another."""
    run = begin(tmp_path / "r", study={"trials": 3})
    (tmp_path / "cluster.json").write_text(json.dumps(probed()))
    keep_machine(MachineConfig(cluster="cluster.json"), cwd=tmp_path, folder=run.folder)
    result = tune(run, FakeMachine())
    assert len(result.trials) == 4
    (tmp_path / "cluster.json").write_text(json.dumps(probed(nodes=[{"name": "here", "devices": ["core"]}])))
    other = begin(tmp_path / "other", study={"trials": 3})
    keep_machine(MachineConfig(cluster="cluster.json"), cwd=tmp_path, folder=other.folder)
    with pytest.raises(ConfigError, match=r"machine\.cluster"):
        tune(other, FakeMachine())
