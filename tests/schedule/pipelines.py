"""Random pipelines and random legal schedules of them, for property tests."""

from dataclasses import replace

import numpy as np

from quartet_plugin.errors import PlanError
from quartet_plugin.model.costs import Costs
from quartet_plugin.schedule.action import Action, ActionKind, OverlappedPair
from quartet_plugin.schedule.files import costs_from_json
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import check_progress


def random_placement(rng: np.random.Generator, num_devices: int, num_chunks: int) -> list[int]:
    """Linear, loop, V-like or shuffled; device 0 first, every device equally often."""
    there = list(range(num_devices))
    kind = rng.choice(["loop", "snake", "any"])
    if kind == "loop":
        return there * num_chunks
    if kind == "snake":
        return [d for c in range(num_chunks) for d in (there if c % 2 == 0 else there[::-1])]
    rest = rng.permutation([d for d in there for _ in range(num_chunks)][1:])
    return [0, *rest.tolist()]


def random_split(rng: np.random.Generator, num_layers: int, num_stages: int) -> list[int]:
    """No empty stage."""
    cuts = sorted(rng.choice(np.arange(1, num_layers), size=num_stages - 1, replace=False).tolist())
    counts: list[int] = np.diff([0, *cuts, num_layers]).tolist()
    return counts


def random_costs(
    rng: np.random.Generator, *, num_devices: int, num_microbatches: int, num_layers: int, fused: bool = False
) -> Costs:
    """Unequal layers, devices and links; some costs are 0; no memory limit."""
    transfer = rng.uniform(0, 1.5, size=(num_devices, num_devices)) * (rng.random() < 0.7)
    np.fill_diagonal(transfer, 0)
    layers = [
        {
            "name": f"layer.{index}",
            "forward_s": float(rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)])),
            "input_grad_s": float(rng.choice([0.0, 1.0, 2.0, rng.uniform(0, 5)])),
            "weight_grad_s": float(rng.choice([0.0, 1.0, rng.uniform(0, 5)])),
            "activation_bytes": float(rng.integers(0, 4)),
        }
        for index in range(num_layers)
    ]
    return costs_from_json(
        {
            "schema_version": 1,
            "num_devices": num_devices,
            "num_microbatches": num_microbatches,
            "layers": layers,
            "device_slowdown": rng.choice([1.0, 1.0, 1.5], size=num_devices).tolist(),
            "transfer_s": transfer.tolist(),
            "weight_grad_held_fraction": float(rng.choice([0.0, 0.5, 1.0])),
            "backward_fused_s": [float(rng.uniform(0, 6)) for _ in layers] if fused else None,
        }
    )


def random_schedule(
    rng: np.random.Generator, *, placement: list[int], num_microbatches: int, mixed: bool = True
) -> Schedule:
    """Run any action that could run, until all have; backwards full or split as it falls, or all split."""
    num_stages = len(placement)
    whole = (
        rng.random((num_stages, num_microbatches)) < 0.4
        if mixed
        else np.zeros((num_stages, num_microbatches))
    )
    kinds = [
        [
            (ActionKind.F, ActionKind.B) if whole[s, i] else (ActionKind.F, ActionKind.I, ActionKind.W)
            for i in range(num_microbatches)
        ]
        for s in range(num_stages)
    ]
    todo = [Action(s, k, i) for s in range(num_stages) for i in range(num_microbatches) for k in kinds[s][i]]
    done: set[tuple[int, ActionKind, int]] = set()
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    while todo:
        able = [a for a in todo if _able(a, done, num_stages)]
        order = rng.permutation(len(able)) if rng.random() < 0.5 else np.arange(len(able))
        action = able[int(order[0])]
        todo.remove(action)
        rows[placement[action.stage]].append(action)
        done.add(
            (action.stage, ActionKind.I if action.kind == ActionKind.B else action.kind, action.microbatch)
        )
    return Schedule.of_actions(rows, num_microbatches=num_microbatches, placement=placement)


def _able(action: Action, done: set[tuple[int, ActionKind, int]], num_stages: int) -> bool:
    stage, kind, i = action
    if kind == ActionKind.F:
        return stage == 0 or (stage - 1, ActionKind.F, i) in done
    if kind == ActionKind.W:
        return (stage, ActionKind.I, i) in done
    return (stage, ActionKind.F, i) in done and (
        stage == num_stages - 1 or (stage + 1, ActionKind.I, i) in done
    )


def with_random_pairs(rng: np.random.Generator, schedule: Schedule) -> Schedule:
    """The schedule with some neighbours as overlapped pairs, fewer until the devices can all finish."""
    share = rng.uniform(0.2, 1.0)
    while True:
        rows = [_paired(rng, schedule.actions(d), share) for d in range(schedule.num_devices)]
        paired = Schedule.of_actions(
            rows, num_microbatches=schedule.num_microbatches, placement=schedule.placement
        )
        paired = replace(paired, layers_per_stage=schedule.layers_per_stage, origin=schedule.origin)
        try:
            check_progress(paired)
        except PlanError:
            share = 0.8 * share if share > 1e-3 else 0.0
        else:
            return paired


def _paired(rng: np.random.Generator, actions: list[Action], share: float) -> list[Action | OverlappedPair]:
    row: list[Action | OverlappedPair] = []
    index = 0
    while index < len(actions):
        two = sorted(actions[index : index + 2], key=lambda action: action.kind)
        pair = OverlappedPair(*two) if len(two) == 2 else None
        if pair is not None and pair.fault is None and rng.random() < share:
            row.append(pair)
            index += 2
        else:
            row.append(actions[index])
            index += 1
    return row


def with_exchanges(rng: np.random.Generator, costs: Costs) -> Costs:
    """The costs with a random part of each forward and each input gradient as all-to-all."""
    fused = costs.backward_fused_s
    return replace(
        costs,
        exchange_s=tuple(
            (
                layer.forward_s * rng.uniform(0, 1),
                min(layer.input_grad_s, np.inf if fused is None else fused[index]) * rng.uniform(0, 1),
            )
            for index, layer in enumerate(costs.layers)
        ),
    )
