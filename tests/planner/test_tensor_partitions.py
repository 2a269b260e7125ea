"""Plans of described jobs whose tensor partition is free: legal ones, exact pruning, files and notations."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.memory import peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.plan import read_plan
from quartet_plugin.planner.bounds import bounds_of
from quartet_plugin.planner.described_space import space_of
from quartet_plugin.planner.job import PlanRequest, parse_job
from quartet_plugin.planner.layout_table import layout_table_of
from quartet_plugin.planner.ranking import rank
from tests.planner.planning import runs_of

DATA: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "seq_length": 4096,
        "vocab_size": 51200,
    },
    "cluster": {"device": "H100-SXM-80GB", "num_nodes": 1, "devices_per_node": 8},
    "batch": {"global_batch_size": 8},
}


def job_of(*, search: dict[str, Any], **changes: Any) -> PlanRequest:
    model = {**DATA["model"], **changes.pop("model", {})}
    return parse_job({**DATA, "model": model, "search": search, **changes}, where="job")


def labels_of(job: PlanRequest) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    table = layout_table_of(job, job.shape)
    for row in range(len(table)):
        layout = table.layout(row)
        label = "stock" if layout.tensor_partition is None else layout.tensor_partition.label
        found.setdefault(layout.tensor_parallel, set()).add(label)
    return found


def test_auto_has_every_pair_of_forms() -> None:
    found = labels_of(job_of(search={"tensor_partition": "auto", "micro_batch_size": 1}))
    assert found[1] == {"stock"}
    assert found[2] == {"stock", "rings", "attention stock, mlp rings", "attention rings, mlp stock"}
    assert {len(found[4]), len(found[8])} == {9}
    assert {"grid", "attention rings, mlp grid"} <= found[4]
    assert {"grid outer 2", "attention grid outer 2, mlp stock"} <= found[8]


def test_a_list_has_what_it_says() -> None:
    assert labels_of(job_of(search={})) == {1: {"stock"}, 2: {"stock"}, 4: {"stock"}, 8: {"stock"}}
    assert labels_of(job_of(search={"tensor_partition": "grid"})) == {1: {"stock"}, 4: {"grid"}}
    listed = labels_of(job_of(search={"tensor_partition": ["stock", "rings"], "tensor_parallel": 4}))
    assert listed == {4: {"stock", "rings"}}


@pytest.mark.parametrize(
    "model", [{"num_experts": 8}, {"precision": "fp8"}, {"num_attention_heads": 2, "kv_channels": 128}]
)
def test_models_without_another_partition(model: dict[str, Any]) -> None:
    found = labels_of(
        job_of(search={"tensor_partition": ["stock", "grid"], "micro_batch_size": 1}, model=model)
    )
    assert set().union(*found.values()) == {"stock"}
    with pytest.raises(InfeasibleError):
        rank(job_of(search={"tensor_partition": "grid", "tensor_parallel": 4}, model=model))


@pytest.mark.parametrize("device", ["H100-SXM-80GB", "L4"])
def test_pruning_keeps_the_optimum(device: str) -> None:
    cluster = {**DATA["cluster"], "device": device, "devices_per_node": 8, "memory_bytes": 20 * 2**30}
    search = {
        "tensor_partition": "auto",
        "micro_batch_size": [1, 4],
        "pipeline_parallel": [1, 2],
        "schedule": "stock",
        "distributed_optimizer": True,
    }
    job = job_of(search=search, cluster=cluster)
    every, quick = rank(job, top=5, exhaustive=True), rank(job, top=5)
    assert [best.layout for best in quick.best] == [best.layout for best in every.best]
    assert quick.num_pruned > 0
    table = layout_table_of(job, job.shape)
    bounds = bounds_of(job, job.shape, table, constants=fitted())
    for row in range(0, len(table), 17):
        split = bounds.split(job, job.shape, table, row)
        for run in runs_of(job, table, row, split):
            assert bounds.time_s[row] <= predict(run, fitted()).iter_time_s, run.layout
            assert bounds.memory_bytes[row] <= peak_memory(run).total_bytes, run.layout


@pytest.mark.parametrize("switches", [[True, False], "auto"])
def test_a_partition_goes_with_sequence_parallelism_where_that_is_searched(switches: Any) -> None:
    search = {"tensor_partition": ["stock", "rings"], "sequence_parallel": switches}
    job = job_of(search={**search, "micro_batch_size": 1, "schedule": "stock"})
    table, space = layout_table_of(job, job.shape), space_of(job)
    planned = [table.layout(row) for row in range(len(table))]
    assert len(set(planned)) == len(planned)
    assert set(planned) == set(space.layouts[job.shape])
    assert {(layout.tensor_partition is None, layout.sequence_parallel) for layout in planned} == {
        (True, True),
        (True, False),
        (False, True),
    }
    assert rank(job, top=5).best == rank(job, top=5, exhaustive=True).best


def test_a_plan_with_a_partition_is_written_shown_explained_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    search = {
        "tensor_partition": {"attention": "rings", "mlp": "grid"},
        "tensor_parallel": 4,
        "pipeline_parallel": 2,
    }
    Path("job.yaml").write_text(yaml.safe_dump({**DATA, "search": search}), encoding="utf-8")
    assert main(["plan", "job.yaml", "--named-only", "-o", "plan.json"]) == 0
    assert "partition attention rings, mlp grid" in capsys.readouterr().out
    plan = read_plan(Path("plan.json"))
    assert plan.layout.tensor_partition is not None
    assert plan.layout.sequence_parallel
    for command in (["show", "plan.json"], ["explain", "plan.json"]):
        assert main(command) == 0
        assert "partition attention rings, mlp grid" in capsys.readouterr().out
    for notation in ("--sbp", "--gspmd"):
        assert main(["export", "plan.json", notation, "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        names = [linear["partition"] for linear in content["linears"]]
        assert names == ["ring-column4", "ring-row4", "home2x2-in", "home2x2-out"]
    for flags in (["--dtensor"], ["--colossal"], []):
        assert main(["export", "plan.json", *flags]) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    stock = replace(plan, layout=replace(plan.layout, tensor_partition=None))
    assert stock.digest != plan.digest
