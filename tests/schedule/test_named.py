"""Named schedules meet their closed forms: bubble and memory in one device's share of a microbatch."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.schedule.action import ActionKind
from quartet_plugin.schedule.named import NAMED, blocks, named, refusal_of, rules
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.simulate import Simulation, simulate
from tests.schedule.sample_costs import uniform

Shares = tuple[float, float, float]
ONE: Shares = (1.0, 1.0, 1.0)
UNEQUAL: Shares = (1.0, 0.9, 0.6)
SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8, 12) for m in (2 * p, 2 * p + 3, 4 * p)]


def run(schedule: Schedule, shares: Shares = ONE) -> Simulation:
    routes = schedule.routes or (schedule.placement,)
    costs = [uniform(route, shares=shares) for route in routes]
    return simulate(schedule, costs[0], other_route=costs[1] if len(costs) == 2 else None)


def bubble(simulation: Simulation, m: int, shares: Shares = ONE) -> float:
    return simulation.makespan_s - m * sum(shares)


def slip(simulation: Simulation, m: int, shares: Shares = ONE) -> float:
    return simulation.period_s - m * sum(shares)


def peak(simulation: Simulation) -> float:
    return float(simulation.peak_activation_bytes.max())


@pytest.mark.parametrize(
    ("name", "makespan", "memory"),
    [
        ("gpipe", 117.0, 32.0),
        ("1f1b", 117.0, 8.0),
        ("interleaved", 106.5, 11.5),
        ("breadth-first", 106.5, 32.0),
        ("zb-h1", 103.0, 8.0),
        ("zb-h2", 103.0, 15.0),
        ("zb-interleaved", 99.5, 11.5),
        ("zb-v", 99.5, 8.0),
        ("v-half", 104.5, 5.0),
        ("v-min", 109.5, 4.0),
        ("dualpipev", 99.5, 8.5),
    ],
)
def test_eight_devices_and_32_microbatches(name: str, makespan: float, memory: float) -> None:
    result = run(named(name, num_devices=8, num_microbatches=32))
    assert result.makespan_s == pytest.approx(makespan)
    assert peak(result) == pytest.approx(memory)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("shares", [ONE, UNEQUAL])
def test_linear_closed_forms(p: int, m: int, shares: Shares) -> None:
    forward, input_grad, weight_grad = shares
    whole = (p - 1) * sum(shares)
    for name, memory in (("gpipe", m), ("1f1b", p)):
        result = run(named(name, num_devices=p, num_microbatches=m), shares)
        assert bubble(result, m, shares) == pytest.approx(whole)
        assert peak(result) == pytest.approx(memory)
    h1 = run(named("zb-h1", num_devices=p, num_microbatches=m), shares)
    assert bubble(h1, m, shares) == pytest.approx((p - 1) * (forward + input_grad - weight_grad))
    assert peak(h1) == pytest.approx(p)
    h2 = run(named("zb-h2", num_devices=p, num_microbatches=m), shares)
    assert peak(h2) == pytest.approx(2 * p - 1)
    if m >= 3 * p:
        expected = (p - 1) * max(0.0, forward + input_grad - 2 * weight_grad)
        assert slip(h2, m, shares) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize(("p", "k"), [(2, 2), (3, 3), (4, 2), (4, 4), (8, 2)])
def test_looped_closed_forms(p: int, k: int, v: int) -> None:
    m = p * k
    for shares in (ONE, UNEQUAL):
        whole = (p - 1) * sum(shares) / v
        inter = run(named("interleaved", num_devices=p, num_microbatches=m, num_chunks=v), shares)
        assert bubble(inter, m, shares) == pytest.approx(whole)
        assert peak(inter) == pytest.approx(p + (p - 1) / v)
        breadth = run(named("breadth-first", num_devices=p, num_microbatches=m, num_chunks=v), shares)
        assert bubble(breadth, m, shares) == pytest.approx(whole)
        assert peak(breadth) == pytest.approx(m)
    zero = run(named("zb-interleaved", num_devices=p, num_microbatches=m, num_chunks=v))
    assert bubble(zero, m) == pytest.approx((p - 1) / v)
    assert peak(zero) == pytest.approx(p + (p - 1) / v)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_v_closed_forms(p: int, m: int) -> None:
    zb_v = run(named("zb-v", num_devices=p, num_microbatches=m))
    assert bubble(zb_v, m) == pytest.approx((p - 1) / 2)
    assert slip(zb_v, m) == pytest.approx(0.0, abs=1e-9)
    assert peak(zb_v) == pytest.approx(p)
    dual = run(named("dualpipev", num_devices=p, num_microbatches=m))
    assert bubble(dual, m) == pytest.approx((p - 1) / 2)
    assert peak(dual) == pytest.approx(p + 0.5)
    if m >= 4 * p and p > 2:
        half = run(named("v-half", num_devices=p, num_microbatches=m))
        assert peak(half) == pytest.approx(p // 2 + 1)
        assert bubble(half, m) == pytest.approx(1.5 * p - (3.5 if p % 2 == 0 else 2.0), abs=0.51)
        smallest = run(named("v-min", num_devices=p, num_microbatches=m))
        assert peak(smallest) <= (p + 4) // 3 + 1e-9
        assert bubble(smallest, m) <= 2 * p - 1.5


# Makespans of the published generator (sail-sg/zero-bubble-pipeline-parallelism at 39f2c186) in this
# simulator, with F, I, W of a device's share and twice a hand-over as in PROFILES. The last is that of a real
# layer of width 4,096 at 4,096 tokens, in parts of W (`benchmarks/schedule_search.py --caps`).
PROFILES = (
    (1.0, 1.0, 1.0, 0.0),
    (1.0, 1.0, 1.0, 0.05),
    (1.0, 1.3, 0.9, 0.02),
    (13 / 12, 29 / 24, 1.0, 0.02 * 13 / 12),
)
PUBLISHED = [
    ("v-half", 2, 4, 2, (12.5, 12.7, 13.86, 14.0025)),
    ("v-half", 3, 9, 2, (29.5, 29.85, 32.47, 32.9633)),
    ("v-half", 4, 8, 3, (26.5, 27.05, 29.86, 29.9858)),
    ("v-half", 4, 32, 3, (98.5, 99.05, 106.66, 108.9858)),
    ("v-half", 5, 15, 3, (50.5, 51.2, 55.81, 56.5733)),
    ("v-half", 6, 12, 4, (41.5, 42.35, 46.82, 47.0342)),
    ("v-half", 7, 14, 4, (50.5, 51.55, 56.73, 57.12)),
    ("v-half", 8, 16, 5, (56.5, 57.7, 63.74, 64.0392)),
    ("v-half", 8, 32, 5, (104.5, 105.7, 114.94, 116.7058)),
    ("v-half", 9, 18, 5, (65.5, 66.85, 73.67, 74.1467)),
    ("v-min", 2, 4, 2, (13.5, 13.75, 15.8, 15.5667)),
    ("v-min", 3, 9, 2, (29.5, 30.45, 37.63, 35.5783)),
    ("v-min", 4, 8, 2, (29.5, 30.5, 37.35, 35.475)),
    ("v-min", 4, 32, 2, (101.5, 104.9, 131.91, 123.515)),
    ("v-min", 5, 15, 3, (52.5, 54.5, 66.92, 63.3217)),
    ("v-min", 6, 12, 3, (44.5, 46.3, 56.57, 53.6967)),
    ("v-min", 7, 14, 3, (53.5, 55.7, 68.13, 64.62)),
    ("v-min", 8, 16, 4, (61.5, 64.15, 78.02, 74.1467)),
    ("v-min", 8, 32, 4, (109.5, 114.2, 141.22, 133.0133)),
    ("v-min", 9, 18, 4, (68.5, 71.5, 87.35, 82.8417)),
]


@pytest.mark.parametrize(("name", "p", "m", "memory", "makespans"), PUBLISHED)
def test_v_half_and_v_min_are_no_longer_than_the_published_generators(
    name: str, p: int, m: int, memory: float, makespans: tuple[float, ...]
) -> None:
    schedule = named(name, num_devices=p, num_microbatches=m)
    transfer = np.array(schedule.placement[:-1]) != np.array(schedule.placement[1:])
    for (*shares, seconds), published in zip(PROFILES, makespans, strict=True):
        costs = replace(
            uniform(schedule.placement, shares=(shares[0], shares[1], shares[2])),
            forward_transfer_s=np.append(transfer, False) * seconds / 2,
            backward_transfer_s=np.insert(transfer, 0, False) * seconds / 2,
        )
        result = simulate(schedule, costs)
        assert result.makespan_s <= published + 1e-3
        assert peak(result) <= memory


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_a_steady_block_that_is_repeated_is_one_that_was_squeezed_with_more_microbatches(p: int) -> None:
    for block in (blocks.v_half_block(p), blocks.v_min_block(p)):
        many = 2 * p + 9
        whole = blocks.squeezed(block, p, many)
        for device, order in enumerate(blocks.orders_of_block(block, p=p, m=many)):
            assert order.tolist() == blocks.codes(whole[device], device, p=p, m=many).tolist()


@pytest.mark.parametrize(("p", "waves"), [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 2)])
def test_a_unit_of_hanayo_has_its_closed_forms(p: int, waves: int) -> None:
    order = named("hanayo", num_devices=p, num_microbatches=p, num_chunks=2 * waves)
    equal = run(order, (1.0, 0.5, 0.5))
    assert bubble(equal, p, (1.0, 0.5, 0.5)) == pytest.approx((p - 1) * 2.0 / (2 * waves))
    doubled = run(order)
    assert bubble(doubled, p) == pytest.approx(2.0 * (p - 1) / waves)
    assert peak(equal) == peak(doubled) == pytest.approx(p)


@pytest.mark.parametrize("p", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_one_steady_wave_of_hanayo_has_the_bubble_of_one_unit(p: int, k: int) -> None:
    result = run(named("hanayo", num_devices=p, num_microbatches=p * k))
    assert bubble(result, p * k) == pytest.approx(2.0 * (p - 1))
    assert peak(result) == pytest.approx(p)


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32), (8, 21)])
def test_waves_of_hanayo_beat_1f1b_at_its_memory(p: int, m: int) -> None:
    stock = run(named("1f1b", num_devices=p, num_microbatches=m))
    one, two = (run(named("hanayo", num_devices=p, num_microbatches=m, num_chunks=v)) for v in (2, 4))
    assert bubble(two, m) < bubble(one, m) < bubble(stock, m)
    assert peak(two) <= p
    assert peak(one) <= p


@pytest.mark.parametrize(("p", "k"), [(2, 1), (4, 1), (4, 3), (8, 2)])
def test_chimera_closed_form(p: int, k: int) -> None:
    shares = (1.0, 0.5, 0.5)
    result = run(named("chimera", num_devices=p, num_microbatches=p * k), shares)
    assert bubble(result, p * k, shares) == pytest.approx((p - 2) / 2 * 2.0)
    assert peak(result) <= p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_has_half_the_bubble_of_its_v_form_with_whole_stages(p: int) -> None:
    result = run(named("dualpipe", num_devices=p, num_microbatches=4 * p))
    assert bubble(result, 4 * p) == pytest.approx(p / 2 - 1)
    assert peak(result) == pytest.approx(p + 1)


def test_mixpipe_beats_chimera_when_backward_is_longer() -> None:
    results = [run(named(name, num_devices=8, num_microbatches=32)) for name in ("mixpipe", "chimera")]
    assert results[0].makespan_s < results[1].makespan_s
    assert peak(results[0]) <= 12


@pytest.mark.parametrize("name", sorted(NAMED))
def test_every_size_that_is_not_refused_runs(name: str) -> None:
    ran = 0
    for p in (1, 2, 3, 4, 6):
        for m in (1, 2, 3, 4, 6, 7, 12, 13):
            grouped = NAMED[name].has_group
            if refusal_of(name, num_devices=p, num_microbatches=m) or (grouped and m % p):
                continue
            run(named(name, num_devices=p, num_microbatches=m))
            ran += 1
    assert ran > 3


def megatron_interleaved(p: int, m: int, v: int, group: int, rank: int) -> list[tuple[str, int, int]]:
    """Rank's order as stated by Megatron-Core: (direction, chunk, microbatch)."""
    table = []
    for first in range(0, m, group):
        table += [(i, c) for c in range(v) for i in range(first, min(first + group, m))]
    warm = min((p - rank - 1) * 2 + (v - 1) * group, m * v)
    order = [("F", table[k][1], table[k][0]) for k in range(warm)]
    for k in range(m * v - warm):
        order.append(("F", table[warm + k][1], table[warm + k][0]))
        order.append(("B", v - 1 - table[k][1], table[k][0]))
    order += [("B", v - 1 - table[k][1], table[k][0]) for k in range(m * v - warm, m * v)]
    return order


@pytest.mark.parametrize(("p", "m", "v", "group"), [(4, 8, 2, 4), (4, 8, 3, 8), (2, 10, 2, 5), (3, 7, 2, 4)])
def test_interleaved_is_megatrons_order(p: int, m: int, v: int, group: int) -> None:
    schedule = named("interleaved", num_devices=p, num_microbatches=m, num_chunks=v, group=group)
    for rank in range(p):
        ours = [(a.kind.name, a.stage // p, a.microbatch) for a in schedule.actions(rank)]
        assert ours == megatron_interleaved(p, m, v, group, rank)


def test_kinds_match_the_registry() -> None:
    for name, spec in NAMED.items():
        schedule = named(name, num_devices=4, num_microbatches=8)
        kinds = {ActionKind(int(k)) for k in np.unique(np.concatenate(schedule.orders) & 3)}
        assert (ActionKind.W in kinds) == spec.split_backward, name
        assert (schedule.routes is not None) == (not spec.executable), name


@pytest.mark.parametrize(
    ("name", "extra", "words"),
    [
        ("2f2b", {}, "expected one of"),
        ("1f1b", {"num_chunks": 2}, "exactly 1"),
        ("zb-v", {"num_chunks": 3}, "exactly 2"),
        ("interleaved", {"num_chunks": 1}, "2 or more"),
        ("hanayo", {"num_chunks": 3}, "even"),
        ("zb-v", {"group": 4}, "only interleaved"),
        ("interleaved", {"group": 0}, "1 or more"),
        ("dualpipev", {"num_microbatches": 7}, "at least 8"),
        ("chimera", {"num_microbatches": 7}, "even number"),
        ("dualpipe", {"num_devices": 3}, "even number"),
        ("1f1b", {"num_microbatches": 0}, "1 or more"),
        ("gpipe", {"num_devices": 4000, "num_microbatches": 60000}, "too many"),
    ],
)
def test_refuses_impossible_sizes(name: str, extra: dict[str, int], words: str) -> None:
    sizes: dict[str, Any] = {"num_devices": 4, "num_microbatches": 8, **extra}
    with pytest.raises(ConfigError, match=words):
        named(name, **sizes)


def plain_order(slots: list[int], stages: list[int], spans: list[tuple[int, int]], m: int) -> list[int]:
    """The codes of one device's slots, step by step as the rules say them."""
    splits = any(slot >= 0 and slot & 3 == ActionKind.I for slot in slots)
    done: dict[tuple[int, str], int] = {}
    body: list[int | None] = []

    def code(chunk: int, number: int, kind: int) -> int:
        return (stages[chunk] * m + spans[chunk][0] + number) * 4 + kind

    for slot in slots:
        chunk, kind = slot >> 2, slot & 3
        place = (chunk, "f" if kind == ActionKind.F else "w" if kind == ActionKind.W else "b")
        if slot < 0:
            body.append(None)
        elif done.get(place, 0) < spans[chunk][1]:
            body.append(code(chunk, done.get(place, 0), kind))
            done[place] = done.get(place, 0) + 1
    for chunk, (_, count) in enumerate(spans):
        backward = ActionKind.I if splits else ActionKind.B
        body += [code(chunk, n, ActionKind.F) for n in range(done.get((chunk, "f"), 0), count)]
        body += [code(chunk, n, backward) for n in range(done.get((chunk, "b"), 0), count)]
    weights = [
        entry + ActionKind.W - ActionKind.I
        for entry in body
        if entry is not None and entry & 3 == ActionKind.I
    ]
    if None in body:
        oldest = iter(weights)
        body = [next(oldest, None) if entry is None else entry for entry in body]
    kept = [entry for entry in body if entry is not None]
    return kept + [weight for weight in weights if weight not in kept]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.booleans(), st.data())
def test_slots_become_the_actions_that_the_rules_say(
    num_chunks: int, m: int, has_oldest: bool, splits: bool, data: st.DataObject
) -> None:
    kinds = [ActionKind.F, *((ActionKind.I, ActionKind.W) if splits else (ActionKind.B,))]
    letters = [chunk * 4 + kind for chunk in range(num_chunks) for kind in kinds]
    if has_oldest and splits:
        letters = [slot for slot in letters if slot & 3 != ActionKind.W] + [rules.OLDEST_W]
    slots = data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=30))
    stages = data.draw(st.permutations(range(num_chunks + 2)))[:num_chunks]
    half = m if data.draw(st.booleans()) else (m + 1) // 2
    spans = [(0, half) if chunk % 2 == 0 else (m - half, half) for chunk in range(num_chunks)]
    order = rules.order_of_slots(
        np.array(slots, dtype=np.int64), stages=stages, num_microbatches=m, ranges=spans
    )
    assert order.tolist() == plain_order(slots, stages, spans, m)
