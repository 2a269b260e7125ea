"""Transfers against the literature: PrimePar's Table 1 line by line, and closed forms of traffic."""

from fractions import Fraction

import pytest

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.named import named_partition
from quartet_plugin.partition.table import Phase, Tensor, coordinates
from quartet_plugin.partition.traffic import check_divides, messages, sent_in_shares
from quartet_plugin.partition.transfers import transfers_of
from tests.partition.counted import (
    copies,
    is_exposed,
    is_shift,
    redistributed_blocks,
    sent_by_tensor,
    traffic,
)


def primepar_senders(q: int) -> dict[tuple[Phase, int, Tensor], tuple[int, int]]:
    """Table 1 of the paper: the sender's row and column less the receiver's, by phase, step and tensor."""
    senders: dict[tuple[Phase, int, Tensor], tuple[int, int]] = {}
    for step in range(q - 1):
        senders[Phase.F, step, Tensor.INPUT] = (0, 1)
        senders[Phase.F, step, Tensor.WEIGHT] = (1, 0)
        senders[Phase.B, step, Tensor.OUTPUT_GRAD] = (0, 1)
        senders[Phase.B, step, Tensor.WEIGHT] = (-1, 1)
    senders[Phase.B, q - 1, Tensor.WEIGHT] = (0, 1)
    for step in range(q - 2):
        senders[Phase.G, step, Tensor.INPUT] = (1, -1)
        senders[Phase.G, step, Tensor.OUTPUT_GRAD] = (1, 0)
    senders[Phase.G, q - 2, Tensor.INPUT] = (1, 0)
    senders[Phase.G, q - 2, Tensor.OUTPUT_GRAD] = (1, 1)
    senders[Phase.G, q - 1, Tensor.WEIGHT_GRAD] = (0, 1)
    return senders


@pytest.mark.parametrize("q", [2, 3, 4, 8])
def test_transfers_of_the_paper_are_its_table(q: int) -> None:
    partition = named_partition(f"P{q}x{q}")
    places = coordinates(partition.mesh)
    expected = {
        (phase, step, tensor, ((r + by_row) % q) * q + (c + by_column) % q, target)
        for (phase, step, tensor), (by_row, by_column) in primepar_senders(q).items()
        for target, (r, c) in enumerate(places)
    }
    transfers = transfers_of(partition)
    derived = {(one.phase, one.step, one.tensor, one.source, one.target) for one in transfers}
    assert derived == expected
    assert len(transfers) == len(expected) == (6 * (q - 1) + 2) * q * q
    assert not any(is_exposed(one, partition) for one in transfers)


@pytest.mark.parametrize("q", [2, 3, 4, 8])
def test_the_paper_has_no_copies(q: int) -> None:
    partition = named_partition(f"P{q}x{q}")
    for phase, tensors in (
        (Phase.F, (Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT)),
        (Phase.B, (Tensor.OUTPUT_GRAD, Tensor.WEIGHT, Tensor.INPUT_GRAD)),
        (Phase.G, (Tensor.INPUT, Tensor.OUTPUT_GRAD, Tensor.WEIGHT_GRAD)),
    ):
        assert all(copies(partition, phase, tensor) == 1 for tensor in tensors)
        assert all(is_shift(partition, phase, tensor) for tensor in tensors)


def test_summa_broadcasts() -> None:
    assert copies(named_partition("2D3x3"), Phase.F, Tensor.INPUT) == 3
    assert not is_shift(named_partition("2D3x3"), Phase.F, Tensor.INPUT)


@pytest.mark.parametrize("q", [2, 3, 4])
def test_messages_of_paper_and_home_form(q: int) -> None:
    assert sum(messages(named_partition(f"P{q}x{q}")).values()) == 6 * (q - 1) + 2
    assert sum(messages(named_partition(f"home{q}x{q}-in")).values()) == 6 * (q - 1)
    by_tensor = messages(named_partition("P2x2"))
    assert by_tensor[Phase.B, Tensor.WEIGHT] == 2
    assert by_tensor[Phase.G, Tensor.WEIGHT_GRAD] == 1


CLOSED_FORMS = [
    *((f"column{t}", {"MN": Fraction(3 * (t - 1), t)}) for t in (2, 4)),
    *((f"row{t}", {"MK": Fraction(2 * (t - 1), t)}) for t in (2, 4)),
    *((f"ring-column{t}", {"MN": Fraction(3 * (t - 1), t)}) for t in (2, 4)),
    *((f"ring-row{t}", {"MK": Fraction(2 * (t - 1), t)}) for t in (2, 4)),
    *((f"2D{q}x{q}", dict.fromkeys(("MN", "NK"), Fraction(3 * (q - 1), q * q))) for q in (2, 3)),
    *((f"home{q}x{q}-in", dict.fromkeys(("MN", "NK", "MK"), Fraction(2 * (q - 1), q * q))) for q in (2, 4)),
    *((f"3D{q}x{q}x{q}", dict.fromkeys(("MN", "NK", "MK"), Fraction(2 * (q - 1), q**3))) for q in (2, 3)),
    ("column4-replicated", {"MN": Fraction(3, 2)}),
    # An all-reduce of the weight's gradient over the depth beside the grid's own.
    ("2.5D2x2x2", {"MN": Fraction(3, 8), "NK": Fraction(3, 4) + Fraction(1, 4)}),
    # Where every phase walks along the tokens the weight stays.
    ("home2x2-in-MMM", dict.fromkeys(("MN", "MK"), Fraction(3, 4))),
]


@pytest.mark.parametrize(("name", "shares"), CLOSED_FORMS, ids=[name for name, _ in CLOSED_FORMS])
def test_traffic_is_the_closed_form(name: str, shares: dict[str, Fraction]) -> None:
    assert sent_in_shares(named_partition(name)) == shares


def test_what_walks_decides_what_stays() -> None:
    sent = sent_by_tensor(named_partition("home2x2-in-KMN"), (8, 8, 8))
    assert (Phase.F, Tensor.INPUT) not in sent
    assert (Phase.B, Tensor.WEIGHT) not in sent
    assert (Phase.G, Tensor.OUTPUT_GRAD) not in sent


@pytest.mark.parametrize("name", ["ring-column4", "ring-row4", "home2x2-in", "P2x2"])
def test_rings_expose_nothing(name: str) -> None:
    assert all(key.is_hidden for key in traffic(named_partition(name), (32, 32, 32)))


def test_a_moving_result_exposes_its_last_transfer() -> None:
    sent = traffic(named_partition("home4x4-in-KKM"), (16, 16, 16))
    by_hidden = {key.is_hidden: elements for key, elements in sent.items() if key.tensor is Tensor.OUTPUT}
    assert by_hidden == {True: 2 * 16, False: 16}


def test_traffic_by_level() -> None:
    """Rows of a 2 x 2 grid on a node each: what crosses columns stays inside."""
    sent = traffic(
        named_partition("home2x2-in"),
        (8, 8, 8),
        level_of=lambda source, target: "node" if source // 2 == target // 2 else "network",
    )
    levels = {(key.phase, key.tensor): key.level for key in sent}
    assert levels[Phase.F, Tensor.INPUT] == "node"
    assert levels[Phase.F, Tensor.WEIGHT] == "network"
    assert levels[Phase.B, Tensor.OUTPUT_GRAD] == "node"


def test_in_then_out_needs_no_redistribution() -> None:
    chained = redistributed_blocks(named_partition("home2x2-in"), named_partition("home2x2-out"))
    assert chained == {"forward": 0, "backward": 0}


@pytest.mark.parametrize(("q", "moved"), [(2, 2), (4, 12)])
def test_the_papers_chain_moves_blocks(q: int, moved: int) -> None:
    chained = redistributed_blocks(named_partition(f"P{q}x{q}"), named_partition(f"P{q}x{q}"))
    assert chained == {"forward": moved, "backward": moved}


def test_parts_of_blocks_must_divide() -> None:
    with pytest.raises(
        PlanError, match="M is 6; must be a multiple of 4, for blocks of I are sent in 4 parts"
    ):
        check_divides(named_partition("column4"), (6, 4, 4))
