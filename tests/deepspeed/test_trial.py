"""DeepSpeed commands as trials, under both launchers: the same files, outcomes and plans as for Megatron."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.trace import trace
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.server_command import ServerCommand
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.model import plan as plans
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.training_job import parse_training_job
from quartet_plugin.protocol.rank_files import RankFileReader, read_actions
from quartet_plugin.space.plan_space import baseline_plan
from quartet_plugin.trial.request import Outcome, Progress, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial
from quartet_plugin.tuner.trial_backend import nodes_of
from tests.cli.tuning import living
from tests.deepspeed.support import (
    ROOT,
    STARTERS,
    command_of,
    layout,
    plan,
    prepare_launchers,
    schedule,
    shape,
)
from tests.faults.conftest import DEADLINE_S, SHORT, past_the_limits_when

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "csv_monitor": {"enabled": True, "output_path": "csv"},
    "quartet": {"plan": "auto"},
}
EXAMPLE = ROOT / "examples" / "pretrain_deepspeed.py"
FAULTY = ROOT / "tests" / "deepspeed" / "faulty_pretrain.py"

# The deepspeed launcher starts its ranks anew for each trial: how its trials end is tried nightly.
BY_TORCHRUN = pytest.mark.parametrize(
    "request_for",
    [pytest.param(STARTERS[0], marks=pytest.mark.nightly), pytest.param(STARTERS[1], marks=pytest.mark.slow)],
    indirect=True,
    ids=["deepspeed", "torchrun"],
)

Request = Callable[..., TrialRequest]
Run = Callable[..., TrialResult]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs trials, with the ranks of torchrun forked; the deepspeed launcher starts its own."""
    with WarmLauncher(command_of=of_the_example) as launcher:
        yield partial(run_trial, launcher=launcher)


def of_the_example(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> ServerCommand | str:
    """The example's server, for both scripts: FAULTY imports the example, and nothing else to share."""
    found = command_of(argv, env=env, cwd=cwd)
    return found if isinstance(found, str) else replace(found, target=str(EXAMPLE))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which all commands are started, so that one server forks their ranks."""
    return tmp_path_factory.mktemp("place")


@pytest.fixture(params=STARTERS, ids=["deepspeed", "torchrun"])
def request_for(
    request: pytest.FixtureRequest, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Request:
    """Trials of a script with arguments, started as users do; each in a folder of its own."""
    prepare_launchers(place, monkeypatch)

    def make(
        script: Path, *words: str, name: str = "0", config: dict[str, Any] | None = None, **more: Any
    ) -> TrialRequest:
        (place / f"ds-{name}.json").write_text(json.dumps({**CONFIG, **(config or {})}), encoding="utf-8")
        sizes = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 260"
        flags = f"--data-path {place}/text --pipeline-stages 2 --save saved {sizes}".split()
        command = [
            *request.param.split(),
            str(script),
            *words,
            *flags,
            "--deepspeed_config",
            f"ds-{name}.json",
        ]
        values = {
            "warmup": 1,
            "measure": 3,
            "device": "cpu",
            "deadline_s": 200,
            "cwd": place,
            # However noisy, no trial is measured once more: a cold start takes half a minute.
            "max_spread": 1e9,
            **more,
        }
        return TrialRequest(
            folder=tmp_path / "trials" / name, command=parse_command(command, environment={}), **values
        )

    return make


def measured(request: TrialRequest, run: Run) -> TrialResult:
    result = run(request)
    assert result.start == ("warm" if request.command.starter == "torchrun" else "cold"), result.cold_reason
    assert result.outcome is Outcome.OK, (result.reason, result.last_lines)
    assert len(result.iteration_s) == len(result.loss) == len(result.grad_norm) == 3
    return result


def baseline_of(request: TrialRequest, run: Run, place: Path) -> tuple[TrialResult, Plan]:
    """The trial of the command itself, and its plan."""
    result = measured(request, run)
    assert result.job is not None
    job = parse_training_job(result.job)
    assert job.framework == "deepspeed"
    assert (job.layout.pipeline_parallel, job.layout.distributed_optimizer) == (2, True)
    assert (job.shape.num_layers, job.shape.hidden_size) == (4, 32)
    assert (job.shape.seq_length, job.shape.vocab_size) == (16, 260)
    assert "csv_monitor" in job.neutralised
    assert not (place / "csv").exists()
    assert not (place / "saved").exists()
    assert not list(result.folder.glob("rank-*.actions.json")), "DeepSpeed's own schedule records none"
    files = RankFileReader(result.folder, attempt_id=result.attempt_id).scan()
    return result, baseline_plan(job, nodes=nodes_of(files.reports.values()), run="test", seed=0)


def split_backwards(own: Plan, *, mapping: plans.Mapping) -> Plan:
    """A plan with two stages a device and split backwards, for the same job."""
    made = plan(
        (1, 1, 1, 1),
        planned=layout(2, world=2, chunks=2, is_sharded=True),
        own=layout(2, world=2, is_sharded=True),
        batch=8,
        schedule=schedule("zb-v", 2, 4, (2, 1, 1, 2)),
    )
    return replace(made, made_for=own.made_for, shape=own.shape, mapping=mapping)


def reversed_order(own: Plan) -> plans.Mapping:
    """The ranks of the two devices swapped."""
    return plans.Mapping(slots=tuple(reversed(own.mapping.slots)))


def assert_actions(result: TrialResult, trace_file: Path) -> None:
    """Every action of a plan with split backwards was timed, and makes a trace."""
    sheets = read_actions(result.folder)
    assert [len(sheet.actions) for sheet in sheets] == [2 * 3 * 4] * 2, "F, I and W of two stages"
    for sheet in sheets:
        times = zip(sheet.start_s, sheet.end_s, strict=True)
        assert all(0 <= start < end for start, end in times)
        assert list(sheet.start_s) == sorted(sheet.start_s)
    assert trace(result.folder, trace_file)[0].startswith("makespan: measured ")


@pytest.mark.parametrize("request_for", STARTERS[1:], indirect=True, ids=["torchrun"])
def test_the_baseline_and_plans(request_for: Request, run: Run, place: Path, tmp_path: Path) -> None:
    request = request_for(EXAMPLE)
    result, own = baseline_of(request, run, place)
    uneven = replace(own, split=Split(transformer_layers_per_stage=(3, 1)), mapping=reversed_order(own))
    tried = measured(replace(request, folder=tmp_path / "trials" / "1", plan=uneven), run)
    assert tried.loss == pytest.approx(result.loss, rel=1e-3)
    custom = split_backwards(own, mapping=own.mapping)
    ours = measured(replace(request, folder=tmp_path / "trials" / "2", plan=custom), run)
    assert ours.loss == pytest.approx(result.loss, rel=1e-3)
    assert_actions(ours, tmp_path / "trace.json")
    assert not living(place)


# Each trial is a cold start, so that a single plan has other stages, schedule and order of ranks.
@pytest.mark.slow
@pytest.mark.parametrize("request_for", STARTERS[:1], indirect=True, ids=["deepspeed"])
def test_the_baseline_and_a_plan_under_the_launcher_of_deepspeed(
    request_for: Request, run: Run, place: Path, tmp_path: Path
) -> None:
    request = request_for(EXAMPLE)
    result, own = baseline_of(request, run, place)
    custom = split_backwards(own, mapping=reversed_order(own))
    ours = measured(replace(request, folder=tmp_path / "trials" / "1", plan=custom), run)
    assert ours.loss == pytest.approx(result.loss, rel=1e-3)
    assert_actions(ours, tmp_path / "trace.json")
    assert not living(place)


@pytest.mark.slow
@pytest.mark.parametrize("request_for", STARTERS[1:], indirect=True, ids=["torchrun"])
def test_losses_are_those_of_a_cold_start(request_for: Request, run: Run) -> None:
    warm, cold = measured(request_for(EXAMPLE), run), run_trial(request_for(EXAMPLE, name="cold"))
    assert cold.start == "cold"
    assert (warm.loss, warm.grad_norm, warm.job) == (cold.loss, cold.grad_norm, cold.job)


@BY_TORCHRUN
def test_a_script_that_calls_our_initialize_is_measured_alike(
    request_for: Request, run: Run, place: Path
) -> None:
    own = layout(2, world=2, is_sharded=True)
    uneven = plan((3, 1), planned=own, own=own, batch=8)
    small = replace(shape(4), vocab_size=260)
    uneven = replace(uneven, shape=small, made_for=replace(uneven.made_for, shape=small))
    result = measured(request_for(FAULTY, "--fault", "drop-in", plan=uneven), run)
    assert result.plan_key == uneven.key
    assert not (place / "saved").exists()


@BY_TORCHRUN
def test_out_of_memory_and_a_refusal(request_for: Request, run: Run, place: Path) -> None:
    full = run(request_for(FAULTY, "--fault", "oom", name="oom"))
    assert full.outcome is Outcome.INFEASIBLE
    assert "out of memory on rank 1" in full.reason
    assert full.memory_excess_bytes == 2 * 2**30
    refused = run(request_for(EXAMPLE, name="zero", config={"zero_optimization": {"stage": 2}}))
    assert refused.outcome is Outcome.INFEASIBLE
    assert "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism" in refused.reason
    assert not living(place)


@BY_TORCHRUN
def test_a_plan_that_does_not_fit_is_our_fault(request_for: Request, run: Run, place: Path) -> None:
    own = layout(4, world=4)
    other = plan((1, 1, 1, 1), planned=own, own=own, batch=8)
    result = run(request_for(EXAMPLE, plan=replace(other, shape=shape(4))))
    assert result.outcome is Outcome.HARNESS
    assert "world_size 2 (plan: 4)" in result.reason
    assert not living(place)


@BY_TORCHRUN
def test_a_hang_and_a_stop(request_for: Request, run: Run, place: Path, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    limits = {"timeouts": replace(SHORT, init_s=250.0), "deadline_s": DEADLINE_S, "max_attempts": 1}
    hung = run(
        request_for(FAULTY, "--fault", "hang", "--mark", str(hangs), name="hang", **limits),
        **past_the_limits_when(tmp_path / "trials", lambda _: hangs.exists()),
    )
    assert hung.outcome is Outcome.INFRA
    assert "rank" in hung.reason
    assert hung.phase in ("warmup", "measure")
    is_stopped = False

    def on_progress(progress: Progress) -> None:
        nonlocal is_stopped
        is_stopped |= progress.phase == "measure" and progress.iteration >= 2

    request = request_for(FAULTY, "--fault", "slow", "--train-iters", "1000", name="stop", measure=900)
    stopped = run(request, on_progress=on_progress, stop=lambda: is_stopped)
    assert stopped.outcome is Outcome.CANCELLED, stopped.reason
    assert is_stopped
    assert not living(place)
