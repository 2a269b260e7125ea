"""Tokens of packed sequences: counted where a model is called, and read where a trial is scored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quartet_plugin.megatron.cpu_device.attention import _of_documents
from quartet_plugin.megatron.packed_batches import PackedBatches
from quartet_plugin.protocol.attempt_files import read_shared
from quartet_plugin.protocol.rank_files import RankReport, rank_file
from tests.megatron.entry_launch import MEGATRON_FLAGS, launch, write_trial

SCRIPT = Path(__file__).with_name("packed_pretrain.py")


class Model(torch.nn.Module):  # type: ignore[misc]
    """Computes nothing."""

    def __init__(self, graphs: str = "none") -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_impl=graphs)

    def forward(self, tokens: Any, packed_seq_params: Any = None) -> Any:
        return tokens


def packed(*offsets: int, **changes: Any) -> SimpleNamespace:
    """A microbatch's parameters with documents that begin at these offsets."""
    return SimpleNamespace(cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32), **changes)


def counted(model: Model) -> PackedBatches:
    batches = PackedBatches()
    batches.begin([model, Model()])
    return batches


def test_documents_of_a_step_are_counted_on_the_device() -> None:
    model = Model()
    batches = counted(model)
    assert batches.take() is None
    model(0, packed_seq_params=packed(0, 3, 7, 7))
    model(0, packed_seq_params=packed(0, 8))
    taken = batches.take()
    assert taken is not None
    assert taken[0] == 2
    assert taken[1].tolist() == [15.0, 9.0 + 16.0 + 64.0]
    assert batches.take() is None


def test_other_calls_count_nothing() -> None:
    model = Model()
    batches = counted(model)
    model(0)
    model(0, packed_seq_params=SimpleNamespace())
    # Groups of their own for each sequence.
    model(0, packed_seq_params=packed(0, 8, local_cp_size=2))
    with torch.no_grad():
        model(0, packed_seq_params=packed(0, 8))
    model.eval()(0, packed_seq_params=packed(0, 8))
    assert batches.take() is None


def test_a_model_in_graphs_and_no_model_are_not_counted() -> None:
    model = Model(graphs="full_iteration")
    batches = counted(model)
    model(0, packed_seq_params=packed(0, 8))
    assert batches.take() is None
    others: list[Any] = [None, [], SimpleNamespace()]
    for other in others:
        PackedBatches().begin(other)


def test_a_query_of_a_packed_sequence_sees_its_document_alone() -> None:
    """As attention over all tokens whose mask leaves the other documents out."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 2, 4, dtype=torch.float64) for _ in range(3))
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])  # the last two tokens belong to no document

    def attend(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        length = len(query)
        hidden = torch.ones(length, length).triu(1).bool() if mask is None else mask
        scores = torch.einsum("qbnh,kbnh->bnqk", query, key).masked_fill(hidden, -1e9)
        return torch.einsum("bnqk,kbnh->qbnh", scores.softmax(-1), value).flatten(2)

    later = torch.ones(9, 9).triu(1).bool()
    whole = attend(
        query[:, None], key[:, None], value[:, None], later | (documents[:, None] != documents[None])
    )
    real, padded = torch.tensor([0, 3, 6]), torch.tensor([0, 4, 7])
    params = SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=padded)
    torch.testing.assert_close(_of_documents(attend, query, key, value, params), whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trial_of_packed_sequences_says_their_tokens(tmp_path: Path) -> None:
    """Two copies of the model, each with two microbatches of two sequences."""
    trial = write_trial(tmp_path, warmup=1, measure=2)
    words = [*MEGATRON_FLAGS, "--dataloader-inter-document-masking", "--quartet-device", "cpu"]
    done = launch(2, [*words, "--quartet-trial", str(trial)], script=SCRIPT, folder=tmp_path)
    assert done.code == 0, done.output[-3000:]
    assert "packing" in done.ranks[0]["job"]["features"]
    for rank in range(2):
        report = read_shared(RankReport, rank_file(RankReport, folder=tmp_path, launch_rank=rank))
        assert len(report.iterations) == 3
        for step in report.iterations:
            assert step.packed is not None
            assert step.packed.num_microbatches == 2
            assert step.packed.num_tokens == 2 * 2 * (10 + 6 + 13)
            assert step.packed.squared_lengths == 2 * 2 * (100 + 36 + 169)
