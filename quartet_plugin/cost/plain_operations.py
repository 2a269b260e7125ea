"""Bytes that a layer of plain PyTorch operations saves of a token, where fused kernels save less.

Counted in Megatron's local layers with every fusion off. A tensor that is saved keeps the storage that it is
a view of: values, and queries and keys that are neither rotated nor repeated, keep the whole output of the
first product.
"""

from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.model.job_description import LatentAttention

# Bytes of a number in fp32.
SINGLE = 4.0


def norm_bytes(run: TrainingRun) -> float:
    """Bytes of one norm: its input and statistics; an RMSNorm's input and normalized input, in fp32."""
    return _norm_bytes(run, run.shape.hidden_size)


def _norm_bytes(run: TrainingRun, width: int) -> float:
    if run.has_rms_norms:
        return SINGLE * (2 * width + 1)
    return float(run.element_bytes) * width + 2 * SINGLE


def compressed_bytes(run: TrainingRun, latent: LatentAttention) -> float:
    """Bytes of latent attention before its heads: two norms and their outputs, cosines and sines.

    The compressed keys are a view of what holds the key part with positions, too.
    """
    ranks, size = (latent.q_lora_rank, latent.kv_lora_rank), float(run.element_bytes)
    norms = sum(_norm_bytes(run, rank) + size * rank for rank in ranks)
    positions = size * latent.qk_pos_emb_head_dim
    return norms + positions + 4 * positions / run.layout.micro_batch_size


def gated_bytes(run: TrainingRun, ffn: float) -> float:
    """Bytes of a gated FFN of `ffn` columns: both halves together, one activated, one copied, the result."""
    return 5.0 * run.element_bytes * ffn


def mask_bytes(run: TrainingRun) -> float:
    """Bytes of a microbatch's causal mask, one a score, which all layers of a stage share."""
    return run.tokens_per_microbatch * run.attended_length


def attention_bytes(run: TrainingRun) -> float:
    """Bytes of a token's queries, keys, values, and of the cosines and sines that rotate them."""
    size, heads, groups = _head_sizes(run)
    if heads == groups:
        # Values are a view of what queries and keys are rotated out of.
        return attention_input_bytes(run)
    queries = _projected_bytes(run) if _has_query_views(run) else size * heads
    # Keys and values are repeated for every query head; what they are copied from is not needed again.
    return queries + 2 * size * heads + _angle_bytes(run)


def attention_input_bytes(run: TrainingRun) -> float:
    """Bytes of the same that stay where attention is recomputed between its products."""
    size, heads, groups = _head_sizes(run)
    kept = _projected_bytes(run) + _angle_bytes(run)
    if _is_rotated(run):
        return kept + size * (heads + groups)
    return kept if _has_query_views(run) else kept + size * heads


def _has_query_views(run: TrainingRun) -> bool:
    """Whether queries are a view of the first product's output; those of several groups are copied."""
    _, heads, groups = _head_sizes(run)
    is_single = groups == 1 and run.layout.micro_batch_size == 1
    return not _is_rotated(run) and (heads == groups or is_single)


def _is_rotated(run: TrainingRun) -> bool:
    return run.shape.position_embedding == "rope"


def _projected_bytes(run: TrainingRun) -> float:
    size, heads, groups = _head_sizes(run)
    return size * (heads + 2 * groups)


def _angle_bytes(run: TrainingRun) -> float:
    """Bytes of a cosine and a sine for queries and for keys, which the sequences of a microbatch share."""
    return 4 * _head_sizes(run)[0] / run.layout.micro_batch_size if _is_rotated(run) else 0.0


def _head_sizes(run: TrainingRun) -> tuple[float, float, float]:
    """Bytes of one head of a token, and the query heads and groups of this rank."""
    shape, tp = run.shape, run.layout.tensor_parallel
    size = float(run.element_bytes) * shape.kv_channels
    return size, shape.num_attention_heads / tp, max(1.0, shape.num_query_groups / tp)
