"""Ranked plans of a described job for reading and as JSON: `quartet plan`'s lines, tables and record."""

from collections.abc import Mapping, Sequence
from typing import Any

from quartet_plugin.cost.memory import distinct_numbers
from quartet_plugin.model.schema import dump
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.planner.frontier import MAX_POINTS, DevicesPoint
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.layout_table import Refusal
from quartet_plugin.planner.plans import Plain
from quartet_plugin.planner.ranking import Ranked, Ranking
from quartet_plugin.report.explain import differences, layout_words
from quartet_plugin.report.summary import aligned
from quartet_plugin.report.throughput import JobCost, Peak, Throughput, job_cost, throughput
from quartet_plugin.schedule.choice import origin_words
from quartet_plugin.space.axes import Axis

MAX_REFUSALS = 12
MAX_UNREAD = 40
# Predicted memory is 1 to 8 % off in the mean of a family of measured runs (docs/cost-model.md).
NEAR_LIMIT = 0.05
# What rounding leaves of a term is none.
_LEAST_SHARE = 1e-6
_GIB = 2.0**30


def job_line(job: PlanRequest) -> str:
    """The planned job: model, sequences, batch, precision and devices."""
    shape, machines = job.shape, job.machines
    experts = "" if job.experts is None else f", {job.experts.num_experts} experts"
    model = f"{shape.num_layers} layers of hidden size {shape.hidden_size:,}{experts}"
    batch = f"{job.global_batch_size:,} sequences of {shape.seq_length:,} tokens per iteration"
    count = machines.num_devices
    nodes = "unequal devices" if job.has_unequal_devices else machines.device.name
    return f"{model}; {batch}; {job.precision}; {count:,} x {nodes}, {machines.devices_per_node} a node"


def rates_of(job: PlanRequest, iteration_s: float, *, shape: ModelShape, has_peak: bool = True) -> Throughput:
    """The rates of a plan of `shape`; MFU only where all devices are equal and their peak is known."""
    is_known = has_peak and not job.has_unequal_devices
    return throughput(
        iteration_s,
        shape=shape,
        global_batch_size=job.global_batch_size,
        num_devices=job.machines.num_devices,
        peak=Peak.of(job.machines.device, job.precision) if is_known else None,
        experts=job.experts,
        latent_attention=job.latent,
        packed=job.packed,
    )


def cost_of_job(job: PlanRequest, rates: Throughput) -> JobCost | None:
    """The time and money of the whole job, where it says its tokens."""
    return job_cost(
        rates.tokens_per_s,
        num_devices=job.machines.num_devices,
        num_tokens=job.cost.tokens,
        price_per_device_hour=job.cost.price_per_device_hour,
    )


def plan_line(ranked: Ranked) -> str:
    """Seconds, layout and memory of a ranked plan."""
    memory = ranked.memory
    total, available = distinct_numbers(memory.total_bytes / _GIB, memory.available_bytes / _GIB, digits=1)
    words = f"{ranked.iteration_s:.4g} s per iteration, {plan_words(ranked)}"
    return f"{words}, {total} GiB of {available}"


def plan_words(ranked: Ranked) -> str:
    """Layout and schedule of a ranked plan."""
    words = layout_words(ranked.layout)
    if ranked.layout.pipeline_parallel == 1:
        return words
    place = ", MTP on the stage before the last one" if ranked.is_mtp_before_last else ""
    return f"{words}{place}, {ranked.schedule_label}"


def gap_words(ranked: Ranked) -> str:
    """The remaining gap of the order to a bound on every order with its split and placement."""
    gap = 0.0 if ranked.gap is None else ranked.gap
    order = None if ranked.order is None else origin_words(ranked.order)
    words = "" if order is None else f" ({order})"
    return f"schedule {ranked.schedule_label}{words}: at most {100 * gap:.2f} % over the shortest order"


def rate_lines(job: PlanRequest, ranked: Ranked) -> list[str]:
    """The rates of a plan, and what the job takes where it says its tokens."""
    rates = rates_of(job, ranked.iteration_s, shape=ranked.shape)
    cost = cost_of_job(job, rates)
    return [rates.words] if cost is None else [rates.words, cost.words]


def term_words(ranked: Ranked) -> str:
    """The terms that cost anything, the largest first."""
    terms = sorted(ranked.terms.items(), key=lambda item: -item[1])
    least = _LEAST_SHARE * ranked.iteration_s
    return ", ".join(f"{name.removesuffix('_s')} {value:.4g} s" for name, value in terms if value > least)


def headroom_line(ranked: Ranked) -> str | None:
    """A plan whose predicted memory is nearer to the limit than predictions are to measured memory."""
    memory = ranked.memory
    left = memory.available_bytes - memory.total_bytes
    if left >= NEAR_LIMIT * memory.available_bytes:
        return None
    return (
        f"memory: {left / _GIB:.1f} GiB below the limit, and a prediction may be {100 * NEAR_LIMIT:.0f} % "
        "off; --frontier memory lists plans that need less"
    )


def reason_words(ranked: Ranked, best: Ranked) -> str:
    """Its seconds over the best plan's by term, the largest difference first."""
    slower = 100 * (ranked.equal_work_s / best.equal_work_s - 1)
    if ranked.shape != best.shape:
        return f"{slower:.1f} % slower for equal work, with another shape"
    terms = differences(ranked.terms, best.terms)
    return f"{slower:.1f} % slower: {terms}" if terms else "as fast"


def mapping_words(ranked: Ranked) -> str:
    """The stock rank order if the mapping equals one, otherwise the seconds of the best stock order."""
    stock = min((ranked.stock_s or {}).items(), key=lambda item: item[1], default=None)
    if stock is None:
        return "mapping solved; no stock order of the ranks is legal"
    if stock[1] <= ranked.iteration_s * (1 + _LEAST_SHARE):
        return f"mapping solved: no order of the ranks is faster than the stock order {stock[0]}"
    return f"mapping solved: the stock order {stock[0]} takes {stock[1]:.4g} s"


def plain_line(plain: Plain, best: Ranked) -> str:
    """The baseline of the plans, and how much faster the best plan is."""
    name = "your command" if plain.is_users else "plain"
    fault = "" if plain.fits else " (does not fit in memory by this model)"
    gain = plain.iteration_s / best.equal_work_s
    seconds = f"{plain.iteration_s:.4g} s per iteration{fault}"
    return f"{name}: {layout_words(plain.layout)}: {seconds}; the best plan is {gain:.2f}x as fast"


def unread_line(unread: Sequence[str]) -> str:
    """The flags of the command that a plan does not read."""
    more = f", and {len(unread) - MAX_UNREAD} more" if len(unread) > MAX_UNREAD else ""
    return f"not read: {', '.join(unread[:MAX_UNREAD])}{more}"


def refusal_lines(refusals: Sequence[Refusal]) -> list[str]:
    """A table of the constraints, those that refused most first."""
    if not refusals:
        return ["refused: none"]
    degrees = [refusal for refusal in refusals if not refusal.reason.startswith("memory")]
    memory = [refusal for refusal in refusals if refusal.reason.startswith("memory")]
    lines = []
    for title, rows, others in (
        ("refused degrees (TP x CP x PP)", degrees, "for other reasons"),
        ("layouts too large for the memory", memory, "with other degrees"),
    ):
        if rows:
            shown = [[str(refusal.num_refused), refusal.reason] for refusal in rows[:MAX_REFUSALS]]
            lines += ["", *aligned([[">count", title], *shown])]
            hidden = sum(refusal.num_refused for refusal in rows[MAX_REFUSALS:])
            lines += [f"(and {hidden} {others})"] if hidden else []
    return lines


def devices_lines(points: Sequence[DevicesPoint]) -> list[str]:
    """The best plan for each number of devices."""
    has_cost = points[0].job.cost.tokens is not None
    has_price = has_cost and points[0].job.cost.price_per_device_hour is not None
    heads = [">devices", ">s per iteration", ">tokens/s per device", ">efficiency"]
    heads += [*([">days"] if has_cost else []), *([">price"] if has_price else []), "plan"]
    rows = []
    for point in points:
        count = str(point.job.machines.num_devices)
        if point.best is None:
            rows.append([count, *[""] * (len(heads) - 2), f"none: {point.reason}"])
            continue
        rates = rates_of(point.job, point.best.iteration_s, shape=point.best.shape)
        cost = cost_of_job(point.job, rates)
        cells = [count, f"{point.best.iteration_s:.4g}", f"{rates.tokens_per_s_per_device:,.0f}"]
        cells.append(f"{100 * (point.efficiency or 0.0):.1f} %")
        if cost is not None:
            cells.append(f"{cost.days:,.1f}")
            cells += [] if cost.price is None else [f"{cost.price:,.0f}"]
        rows.append([*cells, plan_words(point.best)])
    return aligned([heads, *rows])


def memory_lines(points: Sequence[Ranked]) -> list[str]:
    """The plans that no other one beats in both time and memory."""
    rows = [
        [
            f"{point.iteration_s:.4g}",
            f"{point.memory.total_bytes / _GIB:.2f}",
            f"{100 * (point.equal_work_s / points[0].equal_work_s - 1):.1f} %",
            plan_words(point),
        ]
        for point in points
    ]
    lines = aligned([[">s per iteration", ">GiB", ">slower", "plan"], *rows])
    return [*lines, f"(the first {MAX_POINTS})"] if len(points) == MAX_POINTS else lines


def ranked_data(job: PlanRequest, ranked: Ranked) -> dict[str, Any]:
    """One ranked plan as JSON data."""
    rates = rates_of(job, ranked.iteration_s, shape=ranked.shape)
    cost = cost_of_job(job, rates)
    return {
        "num_devices": job.machines.num_devices,
        "shape": dump(ranked.shape),
        "layout": dump(ranked.layout),
        "split": list(ranked.split),
        **({"mtp_before_last": True} if ranked.is_mtp_before_last else {}),
        "schedule": ranked.schedule_label,
        "group": ranked.group,
        "gap": ranked.gap,
        "iteration_s": ranked.iteration_s,
        "equal_work_s": ranked.equal_work_s,
        "terms": dict(ranked.terms),
        "peak_memory_bytes": ranked.memory.total_bytes,
        "is_stock_order": ranked.slots is None,
        **rates.as_data(),
        "cost": None if cost is None else cost.as_data(),
    }


def devices_data(points: Sequence[DevicesPoint]) -> list[dict[str, Any]]:
    """The best plan for each number of devices as JSON data."""
    return [
        {
            "num_devices": point.job.machines.num_devices,
            "efficiency": point.efficiency,
            "plan": None if point.best is None else ranked_data(point.job, point.best),
            "reason": point.reason or None,
        }
        for point in points
    ]


def ranking_data(
    job: PlanRequest,
    ranking: Ranking,
    *,
    plain: Plain,
    files: Sequence[str | None],
    unread: Sequence[str],
    locked: Mapping[Axis, str],
    refusals: Sequence[Refusal] | None,
) -> dict[str, Any]:
    """`quartet plan --json`: the plans, what they are compared with, and how many layouts there were."""
    return {
        "schema_version": 1,
        "global_batch_size": job.global_batch_size,
        "precision": job.precision,
        "available_memory_bytes": ranking.best[0].memory.available_bytes,
        "plans": [
            {"file": file, **ranked_data(job, ranked)}
            for file, ranked in zip(files, ranking.best, strict=True)
        ],
        "plain": {
            "layout": dump(plain.layout),
            "split": list(plain.split),
            **({"mtp_before_last": True} if plain.is_mtp_before_last else {}),
            "iteration_s": plain.iteration_s,
            "is_users": plain.is_users,
            "fits": plain.fits,
        },
        "layouts": {
            "considered": ranking.num_considered,
            "predicted": ranking.num_predicted,
            "too_large": ranking.num_too_large,
            "pruned": ranking.num_pruned,
        },
        "refused": None
        if refusals is None
        else [{"reason": refusal.reason, "count": refusal.num_refused} for refusal in refusals],
        "not_read": list(unread),
        "locked": {axis.value: feature for axis, feature in locked.items()},
        "limits": list(ranking.limits),
    }
