"""Proves the optima of seeded tiny pipelines and writes them as a golden file.

    python benchmarks/schedule_optima.py -o tests/golden/tiny_optima.json

A case whose optimum is not proven at the widest pass is left out; the result depends on nothing but the code.
"""

import argparse
import json
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.costs import Costs, IntArray, LayerCost
from quartet_plugin.schedule.exact import ExactResult, exact_optimum
from quartet_plugin.schedule.files import costs_to_json, order_texts

COVERS = (
    "p 2..4, m 1..8, one chunk (linear) and two (V, loop); unequal F, I, W, layers and splits, embedding and "
    "head; transfers, slow devices, activation limits with held fractions 0, 0.5 and 1; whole backwards "
    "cheaper than I + W. optimum_s is the shortest makespan over all orders of the given placement and "
    "split, every stage's backward whole or split as is better (all split unless backward_fused_s is given)."
)
WIDTHS = (20, 200, 2_000, 20_000)


class Wish(NamedTuple):
    """What a case should have; `limit` in shares of a microbatch's activations a device, 0 for none."""

    num_devices: int
    num_microbatches: int
    placement: str = "linear"
    transfer: bool = False
    slow: bool = False
    limit: float = 0.0
    held: float = 1.0
    ends: bool = False
    fused: bool = False


WISHES = [
    Wish(2, 1),
    Wish(2, 3, transfer=True),
    Wish(2, 4, "v"),
    Wish(2, 5, limit=2, slow=True),
    Wish(2, 6, "loop", transfer=True),
    Wish(2, 6, fused=True),
    Wish(2, 8, "v", limit=2, transfer=True),
    Wish(2, 8, ends=True, slow=True),
    Wish(2, 8, limit=1, held=0.0, transfer=True),
    Wish(3, 3, transfer=True, ends=True),
    Wish(3, 4, "v", slow=True),
    Wish(3, 5, limit=2, held=0.5),
    Wish(3, 5, "loop", limit=3, transfer=True),
    Wish(3, 6, fused=True, transfer=True),
    Wish(3, 6, "v", limit=2, held=0.5),
    Wish(3, 7, ends=True, limit=3),
    Wish(3, 8, slow=True, transfer=True),
    Wish(3, 8, limit=2, transfer=True),
    Wish(3, 8, "v", limit=3, slow=True),
    Wish(3, 8, "loop"),
    Wish(3, 4, fused=True, limit=2),
    Wish(4, 2, ends=True),
    Wish(4, 3, "v", transfer=True),
    Wish(4, 4),
    Wish(4, 4, transfer=True, limit=3),
    Wish(4, 4, slow=True, limit=2),
    Wish(4, 4, "v", ends=True),
    Wish(4, 4, "v", limit=3, held=0.5),
    Wish(4, 4, "v", slow=True, transfer=True),
    Wish(4, 4, "loop", transfer=True),
    Wish(4, 4, "loop", limit=4),
    Wish(4, 5, limit=4, transfer=True, ends=True),
    Wish(4, 5, "v", limit=2),
    Wish(4, 6, limit=3, held=0.0),
    Wish(4, 6, limit=3, held=0.5, transfer=True),
    Wish(4, 6, slow=True, ends=True, transfer=True),
    Wish(4, 6, "v", limit=4),
    Wish(4, 6, "v", ends=True, transfer=True),
    Wish(4, 6, "loop", slow=True),
    Wish(4, 7, limit=4),
    Wish(4, 7, transfer=True, slow=True),
    Wish(4, 8),
    Wish(4, 8, transfer=True),
    Wish(4, 8, ends=True, limit=4),
    Wish(4, 8, limit=4, slow=True, transfer=True),
    Wish(4, 8, limit=3, transfer=True),
    Wish(4, 8, limit=2, held=0.5, ends=True),
    Wish(4, 8, "v"),
    Wish(4, 8, "v", limit=4, transfer=True),
    Wish(4, 8, "loop", transfer=True, slow=True),
    Wish(4, 8, fused=True, limit=4),
    Wish(4, 5, fused=True, transfer=True),
    *(
        Wish(4, m, placement, limit=limit, held=held, transfer=transfer)
        for m, placement, limit, held, transfer in product(
            (5, 8), ("linear", "v"), (2.0, 2.5, 3.5), (0.5, 1.0), (False, True)
        )
        if (m, placement) != (8, "v")
    ),
]


def make_costs(wish: Wish, rng: np.random.Generator) -> Costs:
    """A cost table in whole milliseconds and whole bytes."""
    num_chunks = 1 if wish.placement == "linear" else 2
    num_layers = wish.num_devices * num_chunks + int(rng.integers(0, 2 * wish.num_devices + 1))
    uniform = rng.random() < 0.5
    base = rng.integers(4, 15, size=3)
    layers = []
    for index in range(num_layers):
        forward, input_grad, weight_grad = (base if uniform else rng.integers(3, 16, size=3)) / 1000
        layers.append(
            _layer(
                f"layer.{index}", forward, input_grad, weight_grad, 8 if uniform else int(rng.integers(6, 12))
            )
        )
    if wish.ends:
        layers.insert(0, _layer("embedding", 0.001, 0.0, 0.001, 0))
        layers.append(_layer("head", *_thousandths(rng.integers(5, 20, size=3)), 2))
    transfer = np.zeros((wish.num_devices, wish.num_devices))
    if wish.transfer:
        transfer = rng.integers(1, 9, size=transfer.shape) / 1000
        np.fill_diagonal(transfer, 0.0)
    slowdown = np.ones(wish.num_devices)
    if wish.slow:
        slowdown[rng.integers(0, wish.num_devices)] = rng.choice([1.25, 1.5, 2.0])
    fused = tuple(round(0.8 * (x.input_grad_s + x.weight_grad_s), 6) for x in layers)
    return Costs(
        num_devices=wish.num_devices,
        num_microbatches=wish.num_microbatches,
        layers=tuple(layers),
        device_slowdown=slowdown,
        transfer_s=transfer,
        memory_limit_bytes=None,
        weight_grad_held_fraction=wish.held,
        backward_fused_s=fused if wish.fused else None,
    )


def _thousandths(values: IntArray) -> tuple[float, float, float]:
    forward, input_grad, weight_grad = (values / 1000).tolist()
    return forward, input_grad, weight_grad


def _layer(name: str, forward: float, input_grad: float, weight_grad: float, num_bytes: int) -> LayerCost:
    return LayerCost(
        name=name,
        forward_s=float(forward),
        input_grad_s=float(input_grad),
        weight_grad_s=float(weight_grad),
        activation_bytes=float(num_bytes),
    )


def with_limit(costs: Costs, shares: float, placement: list[int], split: list[int]) -> Costs:
    """Limit every device to `shares` times the bytes a microbatch holds on it."""
    sizes = np.array([layer.activation_bytes for layer in costs.layers])
    ends = np.cumsum(split)
    held = np.zeros(costs.num_devices)
    for device, end, count in zip(placement, ends, split, strict=True):
        held[device] += sizes[end - count : end].sum()
    fields = {name: getattr(costs, name) for name in Costs.__dataclass_fields__}
    return Costs(**{**fields, "memory_limit_bytes": np.floor(shares * held)})


def split_of(costs: Costs, placement: list[int], rng: np.random.Generator) -> list[int]:
    """No empty stages; mostly the most even of some random splits, which leave the order most to decide."""
    work = np.array([layer.forward_s + layer.input_grad_s + layer.weight_grad_s for layer in costs.layers])
    slowdown = costs.device_slowdown[placement]
    best, best_load = [], np.inf
    for _ in range(int(rng.choice([1, 200, 200, 200]))):
        inner = np.arange(1, len(work))
        cuts = sorted(rng.choice(inner, size=len(placement) - 1, replace=False).tolist())
        load = np.zeros(costs.num_devices)
        np.add.at(load, placement, np.add.reduceat(work, [0, *cuts]) * slowdown)
        if load.max() < best_load:
            best, best_load = np.diff([0, *cuts, len(work)]).tolist(), load.max()
    return best


def placement_of(kind: str, num_devices: int) -> list[int]:
    """Device of each stage."""
    there = list(range(num_devices))
    return there + {"linear": [], "v": there[::-1], "loop": there}[kind]


def solve(costs: Costs, placement: list[int], split: list[int]) -> ExactResult | None:
    """The proven optimum over every stage's form of backward, or None."""
    best: ExactResult | None = None
    forms = product((True, False), repeat=len(split)) if costs.backward_fused_s else [(True,) * len(split)]
    for form in forms:
        result = exact_optimum(
            costs,
            placement=placement,
            layers_per_stage=split,
            split_backward=form,
            time_limit_s=np.inf,
            widths=WIDTHS,
        )
        if not result.proven:
            return None
        if best is None or result.makespan_s < best.makespan_s:
            best = result
    return best


def case(index: int, wish: Wish) -> dict[str, Any] | None:
    """One golden case, or None when its optimum was not proven."""
    rng = np.random.default_rng(1_000 + index)
    costs = make_costs(wish, rng)
    placement = placement_of(wish.placement, wish.num_devices)
    split = split_of(costs, placement, rng)
    if wish.limit:
        costs = with_limit(costs, wish.limit, placement, split)
    result = solve(costs, placement, split)
    if result is None:
        return None
    return {
        "id": f"{index:02d}-p{wish.num_devices}-m{wish.num_microbatches}-{wish.placement}",
        "costs": costs_to_json(costs),
        "placement": placement,
        "layers_per_stage": split,
        "optimum_s": round(result.makespan_s, 9),
        "orders": [
            order_texts(row, num_microbatches=costs.num_microbatches) for row in result.schedule.orders
        ],
    }


def main() -> None:
    """Prove every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    cases = []
    for index, wish in enumerate(WISHES):
        began = time.monotonic()
        try:
            made = case(index, wish)
        except InfeasibleError as error:
            print(f"{index:02d} {wish}: {error}", file=sys.stderr)
            continue
        shown = "not proven, left out" if made is None else f"{made['optimum_s']:.6f} s"
        print(f"{index:02d} {shown} in {time.monotonic() - began:.1f} s", flush=True)
        if made is not None:
            cases.append(made)
    head = {
        "schema_version": 1,
        "covers": COVERS,
        "made_by": "python benchmarks/schedule_optima.py -o tests/golden/tiny_optima.json",
    }
    rows = ",\n".join(json.dumps(c) for c in cases)
    output.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + rows + "\n]}\n")
    print(f"{len(cases)} of {len(WISHES)} cases proven")


if __name__ == "__main__":
    main()
