"""When the reductions of bucket groups are started, in steps of any order of I and W."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.megatron.runtime.reduction import GradReductions

# Of a chunk's two bucket groups: the later layer's parameters, and the earlier layer's.
LATE, EARLY = ("late.weight", "late.bias"), ("early.weight", "early.bias")
NUM_MICROBATCHES = 2


class BucketGroup:
    """In place of DDP's: it notes its name in the step's events when its reduction is started."""

    def __init__(self, name: str, params: Sequence[Any], events: list[str]) -> None:
        self.name, self.params, self.events = name, set(params), events
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True)

    def start_grad_sync(self) -> None:
        """Start the reduction."""
        self.events.append(f"reduce {self.name}")


class Chunk:
    """In place of DDP: its bucket groups."""

    def __init__(self, groups: Sequence[BucketGroup]) -> None:
        self.bucket_groups = groups
        self.expert_parallel_bucket_groups: list[BucketGroup] = []


class Parameter:
    """A parameter with a name."""

    def __init__(self, name: str) -> None:
        self.name, self.shape = name, (2,)


class Model:
    """Chunks of two layers, whose hooks report to the reductions as DDP's do."""

    def __init__(self, *, num_chunks: int = 1) -> None:
        self.events: list[str] = []
        self.reductions = GradReductions()
        (make_wrapper,) = self.reductions.wrappers().values()
        make_hook = make_wrapper(lambda _, parameter: lambda: self.events.append(parameter.name))
        self.chunks: list[Any] = []
        self.hooks: list[dict[str, Any]] = []
        for chunk in range(num_chunks):
            params = {name: Parameter(f"{chunk}.{name}") for name in (*LATE, *EARLY)}
            groups = [
                BucketGroup(f"{chunk}.{names[0].partition('.')[0]}", [params[n] for n in names], self.events)
                for names in (LATE, EARLY)
            ]
            self.chunks.append(Chunk(groups))
            self.hooks.append({name: make_hook(None, parameter) for name, parameter in params.items()})

    def step(self, actions: str, *, num_microbatches: int = NUM_MICROBATCHES) -> list[str]:
        """The events of a step of actions such as "I0 W0", on chunk 0; `B1` is of chunk 1."""
        self.events.clear()
        step = self.reductions.begin(self.chunks, num_microbatches=num_microbatches, is_overlapped=True)
        for action in actions.split():
            kind, chunk = action[0], int(action[1])
            names = {"B": (*LATE, *EARLY), "I": (LATE[1], EARLY[1]), "W": (LATE[0], EARLY[0])}[kind]
            for name in names:
                self.hooks[chunk][name]()
            if kind != "I":
                step.microbatch_done(chunk)
            self.events.append(action)
        self.reductions.end()
        return list(self.events)


def reductions_of(events: list[str]) -> list[str]:
    """The event before every reduction, and its group."""
    return [f"{before} -> {event}" for before, event in pairwise(events) if event.startswith("reduce")]


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ("B0 B0", ["0.late.bias -> reduce 0.late", "0.early.bias -> reduce 0.early"]),
        # The weights' gradients of all microbatches run last: those of a group are complete in the last W.
        ("I0 I0 W0 W0", ["0.late.weight -> reduce 0.late", "0.early.weight -> reduce 0.early"]),
        # A bias may be complete after the weights of its group.
        ("I0 W0 B0", ["0.late.bias -> reduce 0.late", "0.early.bias -> reduce 0.early"]),
    ],
)
def test_a_group_is_reduced_at_its_last_gradient(actions: str, expected: list[str]) -> None:
    model = Model()
    first = model.step(actions)
    # The first step shows what to wait for; it reduces by chunk.
    assert first[-3:] == ["reduce 0.late", "reduce 0.early", actions[-2:]]
    for _ in range(2):
        events = model.step(actions)
        assert reductions_of(events) == expected
        assert events[-1] == actions[-2:]


def test_chunks_are_reduced_while_others_compute() -> None:
    model = Model(num_chunks=2)
    for _ in range(2):
        events = model.step("B1 B1 B0 B0")
    assert reductions_of(events) == [
        "1.late.bias -> reduce 1.late",
        "1.early.bias -> reduce 1.early",
        "0.late.bias -> reduce 0.late",
        "0.early.bias -> reduce 0.early",
    ]
    assert events.index("reduce 1.early") < events.index("B0")


def test_each_number_of_microbatches_has_its_own_counts() -> None:
    model = Model()
    model.step("B0 B0")
    assert model.step("B0 B0 B0", num_microbatches=3)[-3:-1] == ["reduce 0.late", "reduce 0.early"]
    for actions, count in (("B0 B0", 2), ("B0 B0 B0", 3)):
        events = model.step(actions, num_microbatches=count)
        assert events.count("reduce 0.late") == 1
        assert reductions_of(events)[0] == "0.late.bias -> reduce 0.late"


def test_all_steps_start_groups_in_the_order_of_the_first() -> None:
    """The ranks that reduce together must agree, also where one computes gradients in another order."""
    model = Model(num_chunks=2)
    steps = [model.step(actions) for actions in ("B1 B1 B0 B0", "B0 B0 B1 B1")]
    first, later = ([event for event in events if event.startswith("reduce")] for events in steps)
    assert later == first


def test_a_gradient_that_is_missing_delays_its_group_to_the_chunks_end() -> None:
    model = Model()
    model.step("B0 B0")
    step = model.reductions.begin(model.chunks, num_microbatches=NUM_MICROBATCHES, is_overlapped=True)
    model.events.clear()
    for _ in range(NUM_MICROBATCHES):
        for name in (LATE[1], *EARLY):
            model.hooks[0][name]()
        step.microbatch_done(0)
    assert model.events[-2:] == ["reduce 0.late", "reduce 0.early"]


def test_a_gradient_after_the_start_of_its_reduction_is_refused() -> None:
    model = Model()
    model.step("B0 B0")
    with pytest.raises(RuntimeError, match=r"gradient 3 .* had waited for 2"):
        model.step("B0 B0 B0")


def test_without_overlap_nothing_is_started() -> None:
    model = Model()
    step = model.reductions.begin(model.chunks, num_microbatches=1, is_overlapped=False)
    model.hooks[0][LATE[0]]()
    step.microbatch_done(0)
    assert model.events == [f"0.{LATE[0]}"]


def test_a_step_that_was_interrupted_teaches_nothing() -> None:
    model = Model()
    model.reductions.begin(model.chunks, num_microbatches=NUM_MICROBATCHES, is_overlapped=True)
    model.hooks[0][LATE[0]]()
    model.reductions.abort()
    model.step("B0 B0")
    assert reductions_of(model.step("B0 B0"))[0] == "0.late.bias -> reduce 0.late"
