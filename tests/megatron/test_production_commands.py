"""Production commands: Megatron itself accepts every plan that the space offers for them.

No GPU is needed: Megatron's own parser and checks run with the answers of a Hopper GPU and of Transformer
Engine 2.9 (`hopper`), in the environment of the command.
"""

import argparse
import contextlib
import functools
import itertools
import os
import random
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.megatron.apply import check_fit, rewrite
from quartet_plugin.megatron.describe import describe_job
from quartet_plugin.megatron.device_connections import set_connections
from quartet_plugin.megatron.runtime.refusals import needs_full_backwards
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.planner.command_job import CommandJob, job_of_command
from quartet_plugin.planner.ranking import rank
from quartet_plugin.space import schedules
from quartet_plugin.space.config import DEFAULT_NAMES, STOCK_NAMES
from quartet_plugin.space.features import Axis
from quartet_plugin.space.knobs.context_parallel import CONTEXT_PARALLEL
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.offload_modules import SETS
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS
from quartet_plugin.space.layouts import runs_custom_schedules, stock_choice
from quartet_plugin.space.param_sources import RandomParams
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.runtime_refusals import refusal
from quartet_plugin.tuner.config import parse_config
from tests.megatron.native import native_flags
from tests.space.jobs import make_nodes

PLANS_A_COMMAND = 24
FREE: dict[str, Any] = dict.fromkeys(
    (
        "sequence_parallel",
        "recompute",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "moe_grouped_gemm",
        "cuda_graph_modules",
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "use_megatron_fsdp",
    ),
    "auto",
)
# They are searched only by name.
FREE["offload_modules"] = ["stock", *SETS]
TRANSFORMER_ENGINE = "2.9.0"


@dataclass(frozen=True, slots=True)
class ProductionCommand:
    """A command's words, processes and environment."""

    name: str
    words: tuple[str, ...]
    num_devices: int
    environment: dict[str, str]


def _commands() -> list[ProductionCommand]:
    data = yaml.safe_load(Path(__file__).with_name("production_commands.yaml").read_text())

    def words_of(row: dict[str, Any]) -> tuple[str, ...]:
        texts = [data["common"], *(data[part] for part in row["parts"]), row["flags"]]
        words = [word for text in texts for word in shlex.split(text)]
        return tuple(word for word in words if word not in row.get("without", ()))

    return [
        ProductionCommand(row["name"], words_of(row), row["devices"], row.get("environment", {}))
        for row in data["commands"]
    ]


COMMANDS = _commands()


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    parser: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser


@contextlib.contextmanager
def hopper(command: ProductionCommand) -> Iterator[None]:
    """What Megatron's checks ask of the machine, as a Hopper GPU with Transformer Engine answers it."""
    import torch
    from megatron.core import utils
    from megatron.training import arguments
    from packaging.version import Version

    parser = _parser()
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    ranks = {"RANK": "0", "WORLD_SIZE": str(command.num_devices)}
    with (
        mock.patch.dict(os.environ, {**kept, **ranks, **command.environment}, clear=True),
        mock.patch.object(arguments, "get_device_arch_version", return_value=9),
        mock.patch.object(arguments, "add_megatron_arguments", return_value=parser),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(utils, "get_te_version", return_value=Version(TRANSFORMER_ENGINE)),
        mock.patch("quartet_plugin.megatron.te_layers._installed", return_value=TRANSFORMER_ENGINE),
    ):
        yield


def validated(words: Sequence[str]) -> Namespace:
    """The arguments as Megatron makes them; raises what Megatron raises."""
    from megatron.training import arguments

    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
        contextlib.redirect_stdout(None),
    ):
        args: Namespace = arguments.parse_args()
        arguments.validate_args(args)
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    return args


def configured(words: Sequence[str]) -> Namespace:
    """The arguments; raises what Megatron raises for the configuration of the layers, too.

    Most commands have fusions that it refuses without Transformer Engine.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    args = validated(words)
    with contextlib.redirect_stdout(None):
        core_transformer_config_from_args(args)
    return args


def job_of(command: ProductionCommand) -> TrainingJob:
    """What rank 0 reports of the command."""
    as_written = native_flags().values(command.words)
    return parse_training_job(describe_job(validated(command.words), as_written=as_written, neutralised=[]))


def space_of(command: ProductionCommand, job: TrainingJob, search: dict[str, Any]) -> Space:
    """The space of a command on nodes of eight devices."""
    return build_space(
        job,
        nodes=make_nodes(*[min(8, command.num_devices)] * max(1, command.num_devices // 8)),
        search=parse_config({"search": search}, where="q.yaml").search,
        run="r",
        seed=0,
    )


class Sweep(RandomParams):
    """Every choice of degrees in turn, stock's schedules where there are some, and chance for the rest."""

    def __init__(self, turn: int) -> None:
        super().__init__(random.Random(turn))
        self._turn = turn

    def category(self, name: str, choices: Sequence[str]) -> str:
        if name.startswith("layout"):
            return choices[self._turn % len(choices)]
        if name.startswith("schedule["):
            stock = [choice for choice in choices if choice in STOCK_NAMES]
            return stock[0] if stock else choices[0]
        return super().category(name, choices)


def plans_of(space: Space, *, num: int) -> list[Plan]:
    """Different plans, with as many different degrees as there are."""
    plans = [space.decode(Sweep(turn), trial=turn + 1) for turn in range(num)]
    return list({plan.key: plan for plan in plans}.values())


@pytest.fixture(autouse=True)
def orders_without_a_search(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An order of work has no flags, so that none is searched for."""
    monkeypatch.setattr(schedules, "_SEARCH_WORK", 0)
    monkeypatch.setattr(schedules, "_CLIMB_WORK", 0)
    yield
    schedules.custom_order.cache_clear()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_megatron_accepts_every_plan_that_the_space_offers(command: ProductionCommand) -> None:
    flags = native_flags()
    with hopper(command):
        job = job_of(command)
        assert (job.normalization == "RMSNorm") == ("RMSNorm" in command.words)
        searches: list[dict[str, Any]] = [{}, FREE]
        spaces = [space_of(command, job, search) for search in searches]
        plans = list(itertools.chain.from_iterable(plans_of(s, num=PLANS_A_COMMAND // 2) for s in spaces))
        user = flags.values(command.words)
        overlaps = "--overlap-moe-expert-parallel-comm" in command.words
        accepted = configured if overlaps else validated
        accepted(command.words)
        for plan in plans:
            with mock.patch.dict(os.environ):
                check_fit(plan, user, version=job.framework_version, world_size=command.num_devices)
                words, _ = rewrite(plan, flags=flags, words=command.words)
                set_connections(user, flags.values(words), environment=os.environ, architecture=lambda: 9)
                try:
                    accepted(words)
                except (AssertionError, ValueError, SystemExit) as error:
                    pytest.fail(f"{plan.layout.label} {plan.split.label} {plan.schedule.label}: {error!r}")
            # The runtime looks at the flags before Megatron derives others from them.
            _assert_runtime_agrees(spaces[0], plan.layout, flags.values(words))


def _assert_runtime_agrees(space: Space, layout: Layout, args: Namespace) -> None:
    """The schedules that the space offers for a layout are those that the runtime runs as they are."""
    rules = space.rules()
    if layout.pipeline_parallel == 1 or Axis.SCHEDULE in rules.locked or rules.can_change_objective(layout):
        return
    shape = space.job.shape
    # A plan may have a setting beside which no custom schedule is chosen.
    runs = runs_custom_schedules(layout, shape=shape, rules=rules)
    offered = set(space.schedules_of(layout, shape=shape)) & set(DEFAULT_NAMES) if runs else set()
    reason = refusal(args) or needs_full_backwards(args)
    # A layout whose stages no custom schedule has, such as eight a device, is offered none.
    assert not (offered and reason), f"{layout.label}: {sorted(offered)}, but {reason}"
    assert offered or reason or layout.virtual_stages not in (1, 2), layout.label


PLANNED = (
    "llama3-8b, data parallel",
    "llama3-8b, FP8, CP 2",
    "llama3-8b, Megatron-FSDP",
    "llama3-8b, PP 4 in 8 chunks a device, p2p not overlapped",
    "llama3-70b, TP 8, PP 4, 5 chunks",
    "llama3-70b, full recomputation",
    "mixtral 8x7b, EP 8, PP 4",
    "nemotron-h 56b, TP 2",
    "nemotron-h 8b, PP 2 in 2 chunks a device by the pattern",
    "nemotron 3 nano, EP 8",
)


def job_to_plan(command: ProductionCommand) -> CommandJob:
    """What `quartet plan` reads of a command."""
    nodes = max(1, command.num_devices // 8)
    start = shlex.split(f"torchrun --nnodes {nodes} --nproc-per-node 8 pretrain_gpt.py")
    return job_of_command(parse_command([*start, *command.words]), sections={"cluster": "H100"})


@pytest.mark.parametrize(
    "name",
    [
        *PLANNED,
        "llama3-70b, FP8, TP 4, PP 4, TP overlap",
        "llama3-70b, Megatron-FSDP, TP 2, TP overlap",
        "mixtral 8x22b, TP 2, EP 8, PP 8",
        "deepseek-v3, EP 64, PP 8, multi-token prediction",
        "qwen3-30b-a3b, EP 16, overlap of experts, flex",
    ],
)
def test_plans_of_a_command_have_what_its_trials_may_have(name: str) -> None:
    command = next(one for one in COMMANDS if one.name == name)
    read = job_to_plan(command)
    native_flags()  # Megatron's parser is read as it is, before a GPU is made up.
    with hopper(command):
        space = space_of(command, job_of(command), {})
    assert read.locked == {axis: why for axis, why in space.locked.items() if axis is not Axis.SCALING}
    assert read.request.batching_features == (space.baseline.made_for.batching_features or ())
    for ranked in rank(read.request, top=5).best:
        context = KnobContext(layout=ranked.layout, shape=space.job.shape, rules=space.rules())
        # Plans change CP; trials change it on the CPU device alone (docs/support.md).
        for knob in (knob for knob in LAYOUT_KNOBS if knob is not CONTEXT_PARALLEL):
            value = knob.in_layout(ranked.layout)
            if knob.axis in space.locked:
                assert value == knob.in_layout(space.job.layout), knob.name
            elif value is not None and knob.applies(ranked.layout):
                assert knob.fault(value, context) is None, f"{knob.name} {value}"


@pytest.mark.parametrize("name", PLANNED)
def test_megatron_accepts_the_plans_of_quartet_plan(name: str) -> None:
    command = next(one for one in COMMANDS if one.name == name)
    flags = native_flags()
    read = job_to_plan(command)
    with hopper(command):
        baseline = space_of(command, job_of(command), {}).baseline
        user = flags.values(command.words)
        for ranked in rank(read.request, top=3).best:
            plan = replace(
                baseline,
                layout=ranked.layout,
                split=Split(transformer_layers_per_stage=ranked.split),
                schedule=stock_choice(ranked.layout),
            )
            with mock.patch.dict(os.environ):
                words, _ = rewrite(plan, flags=flags, words=command.words)
                set_connections(user, flags.values(words), environment=os.environ, architecture=lambda: 9)
                validated(words)


def test_the_commands_are_of_many_kinds() -> None:
    """Twenty commands, of which some have each feature that the issue names."""
    assert len(COMMANDS) >= 20
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    for flag in (
        "--fp8-format", "--tp-comm-overlap", "--context-parallel-size", "--multi-latent-attention",
        "--no-overlap-p2p-communication", "--num-experts", "--recompute-granularity",
    ):  # fmt: skip
        assert any(flag in command.words for command in COMMANDS), flag
    assert any(not command.environment for command in COMMANDS)
