"""The layers that ranks have built, compared with the stages of a placement before anything runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.placement.state import StagePlacement
from quartet_plugin.megatron.runtime.layer_order import check_layer_order

V = StagePlacement((0, 1, 1, 0))
# First layer, number of layers, embedding, head; of each chunk of the two ranks.
IN_ORDER = [[[0, 2, 1, 0], [5, 1, 0, 1]], [[2, 3, 0, 0], [0, 0, 0, 0]]]


def chunk(first: int, count: int, *, has_embedding: int, has_head: int) -> Any:
    layers = [SimpleNamespace(layer_number=first + number + 1) for number in range(count)]
    return SimpleNamespace(
        config=SimpleNamespace(),
        decoder=SimpleNamespace(layers=layers),
        pre_process=bool(has_embedding),
        post_process=bool(has_head),
    )


def check(of_rank: list[Any], monkeypatch: pytest.MonkeyPatch, *, has_layers: bool = True) -> None:
    """As the first rank sees it."""

    def all_gather(everybody: list[torch.Tensor], here: torch.Tensor, group: Any) -> None:
        del group
        for number, (tensor, rows) in enumerate(zip(everybody, of_rank, strict=True)):
            tensor.copy_(here if number == 0 else torch.tensor(rows))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    chunks = [
        chunk(first, count, has_embedding=embedding, has_head=head)
        for first, count, embedding, head in of_rank[0]
    ]
    if not has_layers:
        chunks = [SimpleNamespace(pre_process=True) for _ in chunks]
    check_layer_order(chunks, V, group=None, device=torch.device("cpu"))


def test_stages_in_the_placements_order_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check(IN_ORDER, monkeypatch)
    check(IN_ORDER, monkeypatch, has_layers=False)


@pytest.mark.parametrize(
    ("of_rank", "words"),
    [
        # As Megatron builds them where nothing gives them to a placement.
        ([[[0, 2, 1, 0], [4, 2, 0, 0]], [[2, 2, 0, 0], [6, 2, 0, 1]]], "layers 6 to 8 were built as stage 2"),
        ([[[0, 2, 1, 0], [5, 1, 0, 0]], [[2, 3, 0, 0], [0, 0, 0, 1]]], r"than the plan's \(2\)"),
        ([[[0, 2, 0, 0], [5, 1, 0, 1]], [[2, 3, 1, 0], [0, 0, 0, 0]]], r"than the plan's \(0\)"),
    ],
)
def test_another_order_is_refused(of_rank: list[Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=words):
        check(of_rank, monkeypatch)
