"""Searched schedules against the best named one, on pipelines as they are: nothing is equal.

    python benchmarks/schedule_search.py --split even --time-limit 4
    python benchmarks/schedule_search.py --split auto --time-limit 4
    python benchmarks/schedule_search.py --caps [--tokens 4096]

Every case has unequal F, I and W, an embedding, a head of several layers' cost, one slow device in four
and links that are slow between groups of four devices; p devices in 4, 8, 16, m microbatches from p to 8p,
memory caps from p/2 + 1 to 2p shares (a share: one device's even part of a microbatch's activations).
`--split even` gives every schedule the even split; `--split auto` gives named ones the same search of the
split as found ones. A ratio is the best named makespan over the found one; its mean is geometric.

`--caps` is tight memory alone: equal transformer layers whose F, I and W are in proportion to a real layer's
FLOPs, attention's backward in I; p in 4 and 8, m in 16 and 32, caps of 3/8 to 3/4 of 1F1B's activations, an
even split, the default number of evaluations. The competitors are all named schedules that fit, V-Half and
V-Min by the published construction (`schedule/named/blocks.py`) among them. A ratio is the found makespan
over the best named one there; the command fails if one is above 1.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.model.costs import EMBEDDING, HEAD, Costs, LayerCost
from quartet_plugin.schedule.search import SearchResult, search


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pipeline: `cap` in shares of a device, and the seed of its costs."""

    num_devices: int
    num_microbatches: int
    cap: float
    seed: int


def cases(seeds: int) -> Iterator[Case]:
    """The grid of the benchmark."""
    for seed in range(seeds):
        for p in (4, 8, 16):
            for m in (p, 2 * p, 4 * p, 8 * p):
                for cap in (p / 2 + 1, p, 2 * p):
                    yield Case(num_devices=p, num_microbatches=m, cap=cap, seed=seed)


def costs_of(case: Case) -> Costs:
    """Costs in seconds of a transformer-like model on unequal devices."""
    p = case.num_devices
    rng = np.random.default_rng([case.seed, p, case.num_microbatches, round(2 * case.cap)])
    num_layers = 4 * p
    base = 1e-3 * np.array([1.0, rng.uniform(0.9, 1.3), rng.uniform(0.6, 1.0)])

    def layer(name: str, scale: float, size: float) -> LayerCost:
        forward, input_grad, weight_grad = (base * scale * rng.uniform(0.95, 1.05, 3)).tolist()
        return LayerCost(
            name=name,
            forward_s=forward,
            input_grad_s=input_grad,
            weight_grad_s=weight_grad,
            activation_bytes=size,
        )

    layers = [layer(EMBEDDING, 0.1, 1e6)]
    layers += [layer(f"layer.{i}", 1.0, 1e8) for i in range(num_layers)]
    layers.append(layer(HEAD, float(rng.uniform(1.5, 3.0)), 5e7))
    group = np.arange(p) // 4
    transfer = np.where(group[:, None] == group[None, :], 0.1e-3, 0.6e-3) * rng.uniform(0.8, 1.2, (p, p))
    np.fill_diagonal(transfer, 0.0)
    share = sum(item.activation_bytes for item in layers) / p
    slowdown = np.ones(p)
    slowdown[rng.permutation(p)[: p // 4]] = rng.uniform(1.1, 1.4)
    return Costs(
        num_devices=p,
        num_microbatches=case.num_microbatches,
        layers=tuple(layers),
        device_slowdown=slowdown,
        transfer_s=transfer,
        memory_limit_bytes=np.full(p, case.cap * share),
        weight_grad_held_fraction=float(rng.choice([0.5, 1.0])),
        backward_fused_s=None,
    )


CAPS = (3 / 8, 1 / 2, 5 / 8, 3 / 4)
LAYERS_A_DEVICE = 4


def capped_costs(p: int, m: int, cap: float, *, hidden: int, length: int) -> Costs:
    """Costs in seconds of equal layers under a cap in parts of 1F1B's activations.

    A layer's matrix products take 24 h FLOPs per token and unit of width, causal attention 2 s, its backward
    2.5 times as much, all of it in I (Dao 2023); a hand-over takes a hundredth of a device's forward.
    """
    attention = 2 * length / (24 * hidden)
    layer = LayerCost(
        name="layer",
        forward_s=1e-3 * (1 + attention),
        input_grad_s=1e-3 * (1 + 2.5 * attention),
        weight_grad_s=1e-3,
        activation_bytes=1e8,
    )
    transfer = np.full((p, p), 0.01 * LAYERS_A_DEVICE * layer.forward_s)
    np.fill_diagonal(transfer, 0.0)
    return Costs(
        num_devices=p,
        num_microbatches=m,
        layers=(layer,) * (LAYERS_A_DEVICE * p),
        device_slowdown=np.ones(p),
        transfer_s=transfer,
        memory_limit_bytes=np.full(p, cap * p * LAYERS_A_DEVICE * layer.activation_bytes),
        weight_grad_held_fraction=1.0,
        backward_fused_s=None,
    )


def run_caps(placement: str, *, lengths: Sequence[int]) -> int:
    """Print the rows of tight caps; 1 where a named schedule is shorter than what is found."""
    print("equal layers of width 4096, even split, default evaluations; makespans in ms")
    print(" tokens  p    m   cap     best named        ms   found     ms   found/named      s")
    worst = 0.0
    for length in lengths:
        for p, m, cap in ((p, m, cap) for p in (4, 8) for m in (16, 32) for cap in CAPS):
            result = search(
                capped_costs(p, m, cap, hidden=4096, length=length), split="even", placement=placement
            )
            best, found = result.named_best, result.simulation.makespan_s
            ratio = found / best.score_s if best else math.nan
            worst = max(worst, 0.0 if best is None else ratio)
            print(
                f"{length:7d} {p:2d} {m:4d} {cap:5.3f}  {best.label if best else 'none fits':>13} "
                f"{1e3 * best.score_s if best else math.nan:9.2f}  x{result.schedule.num_stages // p} "
                f"{1e3 * found:9.2f}  {ratio:10.4f}  {result.elapsed_s:7.2f}",
                flush=True,
            )
    print(f"largest ratio {worst:.4f}")
    return int(worst > 1.0 + 1e-9)


def row(case: Case, result: SearchResult) -> tuple[str, float | None]:
    """A line of the table, and the ratio where a named schedule fits."""
    best = result.named_best
    found = result.simulation.makespan_s
    origin = result.schedule.origin
    how = str(origin.get("name", "insertion" if "inserted" in origin else "family"))
    ratio = best.score_s / found if best else None
    chunks = result.schedule.num_stages // case.num_devices
    text = (
        f"{case.num_devices:3d} {case.num_microbatches:4d} {case.cap:5.1f}  "
        f"{best.label if best else 'none fits':>22} {1e3 * best.score_s if best else math.nan:9.2f}  "
        f"{how:>10} x{chunks} {1e3 * found:9.2f}  {ratio or math.nan:6.4f}  {result.elapsed_s:5.2f}"
    )
    return text, ratio


def mean(ratios: list[float]) -> str:
    """Geometric mean and range."""
    if not ratios:
        return "no case"
    centre = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{centre:.4f} (least {min(ratios):.4f}, most {max(ratios):.4f}, {len(ratios)} cases)"


def main() -> int:
    """Run the grid and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=("even", "auto"), default="even")
    parser.add_argument("--time-limit", type=float, default=4.0, help="seconds a case")
    parser.add_argument("--seeds", type=int, default=1, help="pipelines for each size")
    parser.add_argument("--devices", type=int, nargs="*", help="only these numbers of devices")
    parser.add_argument("--caps", action="store_true", help="the rows of tight memory instead")
    parser.add_argument("--placement", default="auto", help="with --caps: only this placement")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[4096, 32768], help="with --caps: lengths of sequences"
    )
    given = parser.parse_args()
    if given.caps:
        return run_caps(given.placement, lengths=given.tokens)
    search(costs_of(Case(num_devices=4, num_microbatches=4, cap=4, seed=0)), evaluations=200)
    print(f"split {given.split}, {given.time_limit:g} s a case, {os.cpu_count()} cores; makespans in ms")
    print("  p    m   cap              best named        ms       found         ms   ratio      s")
    ratios: list[tuple[Case, float]] = []
    for case in cases(given.seeds):
        if given.devices and case.num_devices not in given.devices:
            continue
        text, ratio = row(case, search(costs_of(case), split=given.split, time_limit_s=given.time_limit))
        print(text, flush=True)
        if ratio is not None:
            ratios.append((case, ratio))
    print(f"all                   {mean([r for _, r in ratios])}")
    print(f"cap p/2 + 1           {mean([r for c, r in ratios if c.cap < c.num_devices])}")
    print(f"cap 2p                {mean([r for c, r in ratios if c.cap > c.num_devices])}")
    print(f"m = p                 {mean([r for c, r in ratios if c.num_microbatches == c.num_devices])}")
    print(f"m = 8p                {mean([r for c, r in ratios if c.num_microbatches == 8 * c.num_devices])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
