"""Which jobs a schedule file fits: their process topology, and what DP means for their gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from quartet_plugin.deepspeed import api, seams
from quartet_plugin.deepspeed.entry import DeepSpeedSession, _planned_constructor
from quartet_plugin.deepspeed.planning import AgreedPlan, decide
from quartet_plugin.errors import PlanError
from quartet_plugin.protocol.ds_config import Settings
from quartet_plugin.rank.entry_options import EntryCommand, EntryOptions
from quartet_plugin.rank.rendezvous import RankEnv
from tests.deepspeed.support import schedule, schedule_file

CONFIG: dict[str, Any] = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
FOUR_RANKS = RankEnv(launch_rank=0, world_size=4, local_rank=0, local_world_size=4, group_rank=0, host="here")
TENSOR_PARALLEL = "topology: model 2; plans and schedule files have pipe and data alone"


def layers() -> list[Any]:
    return [torch.nn.Embedding(4, 4), *(torch.nn.Linear(4, 4) for _ in range(4)), torch.nn.LayerNorm(4)]


def topology_of(*, model: int) -> Any:
    return PipeModelDataParallelTopology(num_pp=2, num_mp=model, num_dp=2 // model)


def settings_of(folder: Path, *, devices: int = 2) -> Settings:
    entries = {2: (3, 3), 4: (2, 1, 1, 2)}[devices]
    return Settings(schedule=Path(schedule_file(folder, schedule("gpipe", devices, 4, entries))))


def agreed(settings: Settings, *, topology: Any = None, **config: Any) -> AgreedPlan:
    """What a script of two stages on four processes agrees on."""
    return decide(
        settings,
        specs=layers(),
        config={**CONFIG, **config},
        script_stages=2,
        topology=topology,
        rank_env=FOUR_RANKS,
    )


def test_a_topology_with_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    """Its model axis was dropped, and every process of a tensor-parallel group trained as a copy."""
    made = settings_of(tmp_path)
    assert agreed(made, topology=topology_of(model=1)).pipeline.num_devices == 2
    with pytest.raises(PlanError, match=TENSOR_PARALLEL):
        agreed(made, topology=topology_of(model=2))


def test_the_constructor_under_the_entry_refuses_such_a_topology(tmp_path: Path) -> None:
    command = EntryCommand(target="train.py", is_module=False, arguments=(), options=EntryOptions())
    session = DeepSpeedSession(command=command, rank_env=FOUR_RANKS)
    session.config, session.settings = CONFIG, settings_of(tmp_path)

    def constructor(self: Any, layers: Any, num_stages: Any = None, topology: Any = None) -> None:
        raise AssertionError("built with another topology")

    construct = _planned_constructor(session, constructor)
    with pytest.raises(PlanError, match=TENSOR_PARALLEL):
        construct(object(), layers(), topology=topology_of(model=2))


def test_a_built_module_of_such_a_topology_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "check", lambda: None)
    model = PipelineModule.__new__(PipelineModule)
    model.__dict__.update(_layer_specs=layers(), num_stages=2, _topo=topology_of(model=2))
    config = {**CONFIG, "quartet": {"schedule": str(settings_of(tmp_path).schedule)}}
    with pytest.raises(PlanError, match=TENSOR_PARALLEL):
        api.initialize_planned(lambda **_: None, {"model": model, "config": config})


def test_a_schedule_for_another_number_of_copies_is_refused_where_gradients_are_summed(
    tmp_path: Path,
) -> None:
    four_stages = settings_of(tmp_path, devices=4)
    batch = {"train_batch_size": 4}
    assert agreed(four_stages, **batch).pipeline.num_devices == 4
    assert agreed(settings_of(tmp_path), gradient_allreduce_op="sum").pipeline.num_devices == 2
    with pytest.raises(PlanError, match=r"gradient_allreduce_op: sum; 1 copies .* size 2, or set mean"):
        agreed(four_stages, **batch, gradient_allreduce_op="sum")
