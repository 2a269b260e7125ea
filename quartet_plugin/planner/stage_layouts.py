"""The layout of one pipeline by itself: how many layers each stage holds, with stage times and memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from quartet_plugin.cost.constants import Constants
from quartet_plugin.cost.iteration.terms import stage_parts
from quartet_plugin.cost.memory import Memory, memory_by_device, peak_memory
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Split
from quartet_plugin.planner.fitting_split import fitting_split
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import fault_of_tensor_parallel
from quartet_plugin.space.knobs.divisors import divisors, nearest_words
from quartet_plugin.split.layers import EndLoads, even_split, split_for_end_loads

Counts = tuple[int, ...]
# Splits that one search predicts at most; each takes a millisecond or two.
MAX_PREDICTED = 6_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """A split with its prediction: seconds an iteration, a microbatch's seconds a stage, memory a device.

    `mtp_layers` lie on the last stage, beside its transformer layers.
    """

    split: Split
    iteration_s: float
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    memory: tuple[Memory, ...]
    mtp_layers: int = 0

    @property
    def megatron_layout(self) -> str:
        """Megatron's `--pipeline-model-parallel-layout`."""
        return self.split.layout_text(mtp_layers=self.mtp_layers)

    @property
    def fits(self) -> bool:
        """Whether every device holds its peak."""
        return all(memory.fits for memory in self.memory)


def check_stages(num_layers: int, *, pipeline: int, num_chunks: int) -> None:
    """Raise InfeasibleError, with the nearest sizes that fit, for more stages than layers."""
    if pipeline * num_chunks <= num_layers:
        return
    kept = num_layers // pipeline
    nearest = f"--pp {pipeline} --vpp {kept}" if kept else f"--pp {num_layers} --vpp 1"
    raise InfeasibleError(
        f"--pp {pipeline} --vpp {num_chunks}: {pipeline * num_chunks} stages are more than the {num_layers} "
        f"layers; the nearest that fits is {nearest}"
    )


def check_degrees(request: PlanRequest, *, tensor: int, expert: int) -> None:
    """Raise InfeasibleError, with the nearest sizes that fit, for sizes that the model cannot be cut by."""
    fault_of = partial(fault_of_tensor_parallel, request, request.shape)
    legal = [tp for tp in divisors(request.shape.num_attention_heads) if fault_of(tp, legal=()) is None]
    fault = fault_of(tensor, legal=legal)
    if fault is not None:
        raise InfeasibleError(f"--tp {tensor}: {fault}")
    num_experts = 1 if request.experts is None else request.experts.num_experts
    if num_experts % expert:
        fault = "the model has no experts"
        if request.experts is not None:
            fault = f"EP {expert} does not divide {num_experts} experts"
        raise InfeasibleError(f"--ep {expert}: {fault}{nearest_words(expert, divisors(num_experts))}")


def best_and_even(
    request: PlanRequest, layout: Layout, *, constants: Constants
) -> tuple[StageLayout, StageLayout]:
    """The fastest split that was found, and the even split, under the framework's stock order.

    The search starts from the even split and from the one that balances the devices' work, and moves one
    layer between two stages as long as that is faster. Where one of these does not fit in memory, it also
    starts from the split near it that fits, which goes before one that does not. Raises InfeasibleError for
    more stages than layers.
    """
    check_stages(
        request.shape.num_layers, pipeline=layout.pipeline_parallel, num_chunks=layout.virtual_stages
    )
    known: dict[Counts, tuple[bool, float]] = {}

    def score(split: Counts) -> tuple[bool, float]:
        if split not in known:
            run = run_of(split)
            known[split] = not peak_memory(run).fits, predict(run, constants).iter_time_s
        return known[split]

    def run_of(split: Counts) -> TrainingRun:
        return request.run(request.shape, layout, split)

    even = even_split(request.shape.num_layers, num_stages=layout.num_stages)
    end_loads = _end_loads(request, layout, even, constants)
    starts = {even, _balanced(request, layout, even, end_loads)}
    fitting = [fitting_split(start, run_of=run_of, end_loads=end_loads) for start in starts]
    starts |= {split for split in fitting if split is not None}
    best = min((_descended(start, score, known) for start in sorted(starts)), key=score)
    return _predicted(request, layout, best, constants), _predicted(request, layout, even, constants)


def _descended(
    start: Counts, score: Callable[[Counts], tuple[bool, float]], known: dict[Counts, tuple[bool, float]]
) -> Counts:
    """The split that no move of one layer makes better, or the best one when the limit is reached."""
    best = start
    while len(known) < MAX_PREDICTED:
        nearest = min(_neighbours(best), key=score, default=best)
        if score(nearest) >= score(best):
            break
        best = nearest
    return best


def _neighbours(split: Counts) -> Iterator[Counts]:
    """The splits with one layer in another stage; only the end stages may hold none."""
    last = len(split) - 1
    for giver, count in enumerate(split):
        if count <= (0 if giver in (0, last) and last > 0 else 1):
            continue
        for taker in range(len(split)):
            if taker != giver:
                yield tuple(n - (stage == giver) + (stage == taker) for stage, n in enumerate(split))


def _end_loads(request: PlanRequest, layout: Layout, even: Counts, constants: Constants) -> EndLoads:
    """The ends' work, counted in layers of a middle stage; none where there is no middle stage."""
    if len(even) < 3:
        return EndLoads()
    totals = [total for _, _, total in _stage_seconds(request, layout, even, constants)]
    layer_s = totals[len(even) // 2] / even[len(even) // 2]
    return EndLoads(
        embedding=max(0.0, totals[0] / layer_s - even[0]), head=max(0.0, totals[-1] / layer_s - even[-1])
    )


def _balanced(request: PlanRequest, layout: Layout, even: Counts, end_loads: EndLoads) -> Counts:
    """The split that balances the devices."""
    if len(even) < 3:
        return even
    return split_for_end_loads(
        request.shape.num_layers,
        num_devices=layout.pipeline_parallel,
        num_chunks=layout.virtual_stages,
        end_loads=end_loads,
    )


def _stage_seconds(
    request: PlanRequest, layout: Layout, split: Counts, constants: Constants
) -> list[tuple[float, float, float]]:
    """Seconds of a microbatch's forward, backward and both, a stage."""
    run = request.run(request.shape, layout, split)
    sums = [Times.sum_of(parts.values()) for parts in stage_parts(run, constants)]
    return [(stage.forward_s, stage.input_grad_s + stage.weight_grad_s, stage.total_s) for stage in sums]


def _predicted(request: PlanRequest, layout: Layout, split: Counts, constants: Constants) -> StageLayout:
    run = request.run(request.shape, layout, split)
    seconds = _stage_seconds(request, layout, split, constants)
    return StageLayout(
        split=Split(transformer_layers_per_stage=split),
        iteration_s=predict(run, constants).iter_time_s,
        forward_s=tuple(forward for forward, _, _ in seconds),
        backward_s=tuple(backward for _, backward, _ in seconds),
        memory=tuple(memory_by_device(run)),
        mtp_layers=request.mtp_layers,
    )
