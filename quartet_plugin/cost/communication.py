"""The time of collectives and transfers on the links that the ranks of a group use.

Megatron numbers ranks tp fastest, then cp, dp and pp; a group of `size` ranks `stride` apart spans one
scale-up domain, or several with some ranks in each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quartet_plugin.cost import state_space
from quartet_plugin.cost.compute import LayerTimes
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.cost.iteration.orders import device_of_stages
from quartet_plugin.cost.layer_partition import exposed_times, stock_share
from quartet_plugin.cost.run import ContextComm, Overlap, TrainingRun, UniformCluster
from quartet_plugin.cost.times import Times
from quartet_plugin.model.costs import FloatArray
from quartet_plugin.model.job_description import Experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The ranks of a collective: their number, how many share a scale-up domain, and the ring's bandwidth."""

    size: int
    local: int
    bytes_per_s: float
    hop_s: float

    @property
    def num_domains(self) -> int:
        """Scale-up domains the group spans."""
        return -(-self.size // self.local)

    @property
    def ring_latency_s(self) -> float:
        """The latency of a pass around all ranks: all-gathers and reduce-scatters have no tree."""
        return self.hop_s * (self.num_domains - 1) + self.hop_s / 4 * (self.size - self.num_domains)

    @property
    def tree_latency_s(self) -> float:
        """The latency of one all-reduce: logarithmic across domains."""
        return self.hop_s * (self.num_domains - 1).bit_length() + self.hop_s / 4 * (self.local - 1)

    def gather_s(self, total_bytes: float, *, calls: float = 1.0) -> float:
        """Seconds of all-gathers or reduce-scatters of `total_bytes` together, in `calls` calls."""
        if self.size == 1:
            return 0.0
        moved = total_bytes * (self.size - 1) / self.size / self.bytes_per_s
        return moved + calls * self.ring_latency_s

    def reduce_s(self, total_bytes: float) -> float:
        """Seconds of an all-reduce."""
        if self.size == 1:
            return 0.0
        return 2 * (total_bytes * (self.size - 1) / self.size / self.bytes_per_s + self.tree_latency_s)


def group(cluster: UniformCluster, constants: Constants, *, size: int, stride: int) -> Group:
    """The group of `size` ranks that are `stride` apart in Megatron's order."""
    domain = cluster.scale_up_devices
    span = size * stride
    if span <= domain:
        up = cluster.scale_up_bytes_per_s * constants.scale_up
        if cluster.device.scale_up_topology == "mesh" and size > 1:
            # A mesh reaches each peer with its own link only.
            up *= min(1.0, (size - 1) / max(1, cluster.device.scale_up_devices - 1))
        return Group(size=size, local=size, bytes_per_s=up, hop_s=constants.hop_s)
    local = max(1, domain // stride) if stride < domain else 1
    local = min(local, size)
    # Several rings, one through each local rank's network port, share the traffic between domains.
    out = cluster.scale_out_bytes_per_s * constants.scale_out * local
    up = cluster.scale_up_bytes_per_s * constants.scale_up
    bandwidth = min(out, up) if local > 1 else out
    return Group(size=size, local=local, bytes_per_s=bandwidth, hop_s=constants.hop_s)


def exchange_s(
    ranks: Group,
    cluster: UniformCluster,
    constants: Constants,
    total_bytes: float,
    *,
    outside_share: float = 1.0,
    port_share: float | None = None,
) -> float:
    """Seconds of an all-to-all where every rank sends `total_bytes`, the share that it keeps included.

    `outside_share` of what leaves the domain crosses the slow links; the domain's own links spread the rest.
    `port_share` is the share of the slow links' nominal rate that is reached; None takes that of collectives.
    """
    if ranks.size == 1:
        return 0.0
    inside = total_bytes * (ranks.local - 1) / ranks.size
    outside = total_bytes * (ranks.size - ranks.local) / ranks.size
    up = cluster.scale_up_bytes_per_s * constants.scale_up
    out = cluster.scale_out_bytes_per_s * (constants.scale_out if port_share is None else port_share)
    spread = outside * (1.0 - outside_share)
    return (inside + spread) / up + outside * outside_share / out + ranks.tree_latency_s


def tensor_parallel(run: TrainingRun, constants: Constants) -> tuple[Times, float]:
    """The exposed time of a layer's tensor-parallel traffic, and that of one repeated forward.

    Of blocks that another partition cuts than the framework's it is what their table leaves exposed.
    """
    partition = run.layout.tensor_partition
    if partition is None:
        return _collectives(run, constants)
    share, cut = stock_share(partition), exposed_times(run, constants)
    times, repeated = _collectives(run, constants)
    return times.scaled(share).plus(cut), repeated * share + cut.forward_s


def _collectives(run: TrainingRun, constants: Constants) -> tuple[Times, float]:
    """The exposed time of a layer's tensor-parallel collectives, and that of one repeated forward.

    Two all-reduces forward and two backward (Shoeybi et al. 2019), or as many pairs of an all-gather and
    a reduce-scatter under sequence parallelism, which gathers once more for the weight gradients (Korthikanti
    et al. 2022).
    Transformer Engine gathers the operands of narrow products in their own format
    (`distributed.gather_along_first_dim`); what is reduce-scattered has the layers' precision.
    """
    tp = run.layout.tensor_parallel
    if tp == 1:
        return Times(), 0.0
    ranks = group(run.cluster, constants, size=tp, stride=1)
    size = run.element_bytes * run.tokens_per_microbatch * run.shape.hidden_size
    is_narrow = run.has_narrow_products and run.software.gathers_narrow and run.layout.sequence_parallel
    narrow = 1.0 / run.element_bytes if is_narrow else 1.0
    forward = 2 * ranks.reduce_s(size) * (1.0 + narrow) / 2
    backward = forward
    overlap = run.software.tensor_overlap
    left = constants.tensor_exposed
    if overlap is Overlap.NONE:
        gathered_again = 2 * ranks.gather_s(size * narrow) if run.layout.sequence_parallel else 0.0
        return Times(forward, backward + gathered_again, 0.0), forward
    if overlap is Overlap.FULL:
        return Times(forward * left, backward * left, 0.0), forward * left
    return Times(forward, backward * left, 0.0), forward


def ffn_pairs(run: TrainingRun, experts: Experts) -> tuple[float, float]:
    """The tensor-parallel collectives of a layer's routed experts and of its shared one.

    In those of a dense FFN. Devices that share an expert all-gather the tokens that arrived for it, and
    reduce-scatter its outputs (`MoEAlltoAllTokenDispatcher`); where all tokens are gathered they do so once a
    token. Whole experts have none of these.
    """
    shared = 1.0 if experts.shared_ffn_hidden_size else 0.0
    if run.has_whole_experts:
        return 0.0, shared
    if run.software.gathers_tokens:
        return 1.0, shared
    return experts.experts_per_token * run.expert_load, shared


def skew(run: TrainingRun, constants: Constants, layer: LayerTimes) -> Times:
    """Waiting of tensor-parallel ranks for the slowest, where collectives stop the computation.

    Equal ranks are never equally fast from one collective to the next, and each of them waits for all.
    """
    is_apart = run.layout.tensor_parallel > 1 and run.software.tensor_overlap is Overlap.NONE
    if not (is_apart and isinstance(constants, ClusterConstants)):
        return Times()
    return Times(constants.skew * layer.total.forward_s, constants.skew * layer.total.input_grad_s, 0.0)


def context_parallel(run: TrainingRun, constants: Constants, attention: Times) -> Times:
    """The exposed time of what ranks that share sequences send each other, beside the attention it feeds.

    Neighbours exchange heads for sequence where the job says so, and rings join the others; or all ranks
    gather keys and values.
    """
    cp = run.layout.context_parallel
    if cp == 1:
        return Times()
    if run.software.context_comm is ContextComm.ALL_GATHER:
        return _gathered_keys(run, constants)
    size = run.exchanging_ranks
    if size == 1:
        return _ring_of_keys(run, constants, attention, size=cp, stride=run.layout.tensor_parallel)
    stride = size * run.layout.tensor_parallel
    rings = _ring_of_keys(run, constants, attention, size=cp // size, stride=stride)
    return _exchanged_heads(run, constants, size=size).plus(rings)


def _ring_of_keys(
    run: TrainingRun, constants: Constants, attention: Times, *, size: int, stride: int
) -> Times:
    """The exposed time of passing keys and values around a ring of `size` ranks, `stride` apart."""
    if size == 1:
        return Times()
    ranks = group(run.cluster, constants, size=size, stride=stride)
    forward = ranks.gather_s(_bytes_of_keys(run, size=size))
    if run.software.tensor_overlap is Overlap.NONE and not run.software.has_data_overlap:
        return Times(forward, 2 * forward, 0.0)
    left = constants.tensor_exposed
    return Times(
        _exposed_s(forward, behind_s=attention.forward_s, least=left),
        _exposed_s(2 * forward, behind_s=attention.input_grad_s, least=left),
        0.0,
    )


def _bytes_of_keys(run: TrainingRun, *, size: int) -> float:
    """Bytes of a microbatch's keys and values on `size` ranks together.

    A tensor-parallel rank holds one query group at least; latent attention has keys and values of every head.
    """
    groups, key, value = _groups_of_keys(run)
    width = max(1.0, groups / run.layout.tensor_parallel) * (key + value)
    return run.element_bytes * run.tokens_per_microbatch * width * size


def _groups_of_keys(run: TrainingRun) -> tuple[int, int, int]:
    """The groups of keys and values, and the numbers that a token has in each key and in each value."""
    shape, latent = run.shape, run.latent
    if latent is None:
        return shape.num_query_groups, shape.kv_channels, shape.kv_channels
    return shape.num_attention_heads, latent.qk_head_dim + latent.qk_pos_emb_head_dim, latent.v_head_dim


def _gathered_keys(run: TrainingRun, constants: Constants) -> Times:
    """The time of gathering the keys, and the values, of whole sequences before attention.

    The backward all-gathers both once more and reduce-scatters their gradients
    (`AttnFuncWithCPAndKVAllGather` of Transformer Engine's `context_parallel.py`).
    """
    cp = run.layout.context_parallel
    ranks = group(run.cluster, constants, size=cp, stride=run.layout.tensor_parallel)
    forward = ranks.gather_s(_bytes_of_keys(run, size=cp), calls=2)
    return Times(forward, 2 * forward, 0.0)


def _exchanged_heads(run: TrainingRun, constants: Constants, *, size: int) -> Times:
    """The time of the all-to-alls of `size` ranks around attention: a part of the sequence for one of heads.

    Queries, keys and values go in and outputs come back; in the backward outputs and their gradients go in
    and the gradients of the other three come back (`AttnFuncWithCPAndQKVOA2A`, the same file).
    """
    ranks = group(run.cluster, constants, size=size, stride=run.layout.tensor_parallel)
    heads, (groups, key, value) = run.shape.num_attention_heads, _groups_of_keys(run)

    def seconds(width: int) -> float:
        per_token = run.element_bytes * width / run.layout.tensor_parallel
        return exchange_s(ranks, run.cluster, constants, run.tokens_per_microbatch * per_token)

    inputs = seconds(heads * key) + seconds(groups * key) + seconds(groups * value)
    outputs = seconds(heads * value)
    return Times(inputs + outputs, inputs + 2 * outputs, 0.0)


def scanned_heads(run: TrainingRun, constants: Constants) -> Times:
    """The time of the all-to-alls of ranks that share sequences around a scan, heads for sequence.

    Gates, values, keys, queries and steps go in one after the other, and outputs come back; their gradients
    do the reverse (`MambaContextParallel` of Megatron's `mamba_context_parallel.py`).
    """
    if run.layout.context_parallel == 1:
        return Times()
    ranks = group(run.cluster, constants, size=run.layout.context_parallel, stride=run.layout.tensor_parallel)
    once = sum(
        exchange_s(ranks, run.cluster, constants, run.element_bytes * run.tokens_per_microbatch * width)
        for width in state_space.exchanged_widths(run)
    )
    return Times(once, once, 0.0)


def expert_parallel(run: TrainingRun, constants: Constants, experts: Experts) -> Times:
    """The time of dispatching and combining a layer's tokens, forward and backward."""
    ep = run.layout.expert_parallel
    if ep == 1:
        return Times()
    if run.software.gathers_tokens:
        return _gathered_tokens(run, constants, experts)
    ranks = group(run.cluster, constants, size=ep, stride=run.expert_shards)
    size = (
        run.element_bytes
        * run.tokens_per_microbatch
        * experts.experts_per_token
        * run.shape.hidden_size
        * run.expert_load
    )
    share = 1.0
    if run.software.sends_once_a_domain:
        share = _share_sent(experts.experts_per_token * run.kept_share, ranks.num_domains)
    once = exchange_s(
        ranks,
        run.cluster,
        constants,
        size / run.layout.tensor_parallel,
        outside_share=share,
        port_share=run.cluster.port_share,
    )
    once += run.software.exchange_start_s
    return Times(2 * once, 2 * once, 0.0)


def _gathered_tokens(run: TrainingRun, constants: Constants, experts: Experts) -> Times:
    """The time of bringing a layer's tokens to all devices of its experts, and their outputs back.

    Each device gathers the tokens of all that share the experts, their probabilities and choices, whatever
    the routing, and reduce-scatters as many outputs; the backward does the reverse
    (`MoEAllGatherTokenDispatcher`). What shares of tensor parallelism gather of each other is theirs.
    """
    shards, ep = run.expert_shards, run.layout.expert_parallel
    ranks = group(run.cluster, constants, size=shards * ep, stride=1)
    tokens = run.tokens_per_microbatch * shards / run.layout.tensor_parallel * (ep - 1)
    outputs_s = run.element_bytes * tokens * run.shape.hidden_size / ranks.bytes_per_s + ranks.ring_latency_s
    probabilities_s = run.element_bytes * tokens * experts.num_experts / ranks.bytes_per_s
    choices_s = tokens * experts.num_experts / ranks.bytes_per_s
    both = 2.0 * (outputs_s + run.software.exchange_start_s) + probabilities_s
    return Times(both + choices_s, both, 0.0)


def _share_sent(chosen: float, num_domains: int) -> float:
    """The domains that a token is sent to, over its experts, which lie in each domain with equal chance."""
    missed: float = (1.0 - 1.0 / num_domains) ** chosen
    return num_domains * (1.0 - missed) / chosen


def beside_compute(run: TrainingRun, constants: Constants, exchange: Times, layer: LayerTimes) -> Times:
    """What stays exposed of a layer's exchanges where they run beside computation.

    Nothing is hidden here where the schedule itself says by its pairs what runs beside what.
    """
    if run.has_pairs or not sum(exchange):
        return exchange
    if run.software.expert_overlap:
        return _beside_another_microbatch(run, constants, exchange, layer)
    if run.software.shared_expert_overlap and not run.software.gathers_tokens:
        return _beside_shared_expert(constants, exchange, layer)
    return exchange


def _beside_another_microbatch(
    run: TrainingRun, constants: Constants, exchange: Times, layer: LayerTimes
) -> Times:
    """What stays exposed beside another microbatch's computation of the layer.

    A layer's forward and another's backward run in two parts (`model_chunk_schedule_plan.py`): the routed
    experts beside dispatch, and what is before the dispatch beside combine. In each the exchange of the
    forward runs beside the backward, and that of the backward, which waits for its computation, beside the
    forward. Weight gradients are in that computation unless they are delayed; then the exchange does not wait
    for them.
    """
    routed = layer.routed_experts
    before = Times(*(whole - part for whole, part in zip(layer.total, routed, strict=True)))
    once = sum(exchange) / 4
    took = sum(
        _both_ways_s(part, once, is_delayed=run.software.delayed_weight_gradients)
        for part in (routed, before)
    )
    return exchange.scaled(max(constants.data_exposed, (took - sum(layer.total)) / (4 * once)))


def _both_ways_s(part: Times, once: float, *, is_delayed: bool) -> float:
    """Seconds of a part's backward and forward beside two exchanges of `once` seconds."""
    forward, input_grad, weight_grad = part
    started = max(input_grad + weight_grad, once)
    if not is_delayed:
        return started + max(forward, once)
    return max(started + forward, max(input_grad, once) + once)


def _beside_shared_expert(constants: Constants, exchange: Times, layer: LayerTimes) -> Times:
    """What stays exposed beside the shared expert's products.

    Those into its hidden width run beside dispatch, those out of it beside combine (`shared_experts.py`).
    """
    left = constants.data_exposed

    def exposed(both: float, *products: float) -> float:
        return sum(max(left * both / 2, both / 2 - product) for product in products)

    into, out = layer.shared_into, layer.shared_out
    backward = (part.input_grad_s + part.weight_grad_s for part in (into, out))
    return Times(
        exposed(exchange.forward_s, into.forward_s, out.forward_s),
        exposed(exchange.input_grad_s, *backward),
        0.0,
    )


def hideable_s(constants: Constants, exchanges: Sequence[Times]) -> FloatArray:
    """Seconds of each stage's exchanges that a pair can hide, forward and backward [2, num_stages].

    As with all overlapped traffic, a constant part of it stays exposed.
    """
    seconds = np.array(
        [(exchange.forward_s, exchange.input_grad_s) for exchange in exchanges], dtype=np.float64
    )
    hideable: FloatArray = (1.0 - constants.data_exposed) * seconds.T
    return hideable


def transfer_s(
    run: TrainingRun, constants: Constants, *, sender: int, receiver: int, num_tensors: int = 1
) -> float:
    """Seconds of one microbatch's boundary tensor between two pipeline ranks, or of several at once.

    Ranks that hold the same boundary send a slice each where sequence parallelism, or the scatter and
    gather of interleaved schedules, allows it (Narayanan et al. 2021).
    """
    layout, cluster = run.layout, run.cluster
    stride = layout.tensor_parallel * run.copies
    size = num_tensors * run.element_bytes * run.tokens_per_microbatch * run.shape.hidden_size
    if layout.sequence_parallel or layout.virtual_stages > 1 or run.software.splits_transfers:
        size /= layout.tensor_parallel
    latency = transfer_latency_s(constants)
    domain = cluster.scale_up_devices
    if sender * stride // domain == receiver * stride // domain:
        return size / (cluster.scale_up_bytes_per_s * constants.peer) + latency
    return size / (cluster.scale_out_bytes_per_s * constants.scale_out) + latency


def tensor_parallel_ends(run: TrainingRun, constants: Constants) -> tuple[Times, Times]:
    """The time of the embedding's and of the head's tensor-parallel collectives for a microbatch.

    The embedding's output is reduced; the loss over a split vocabulary takes a maximum and two sums a token
    (Shoeybi et al. 2019, section 3), and the head's input gradient is reduced.
    """
    tp = run.layout.tensor_parallel
    if tp == 1 or not run.software.reduces_ends:
        return Times(), Times()
    ranks = group(run.cluster, constants, size=tp, stride=1)
    hidden = ranks.reduce_s(run.element_bytes * run.tokens_per_microbatch * run.shape.hidden_size)
    token = ranks.reduce_s(4.0 * run.tokens_per_microbatch)
    return Times(hidden, 0.0, 0.0), Times(3 * token, hidden, 0.0)


def tied_ends_s(run: TrainingRun, constants: Constants) -> float:
    """Seconds a step to sum the gradients of embeddings on the first pipeline rank and another one.

    The last one has them where the head is tied, or that with multi-token prediction, which embeds further
    tokens.
    """
    layout = run.layout
    other_rank = layout.pipeline_parallel + run.embedding_stage
    placement = device_of_stages(run)
    is_apart = placement[0] != placement[run.embedding_stage]
    has_both = run.shape.tied_embeddings or run.mtp_layers > 0
    if not (is_apart and has_both and run.software.reduces_ends):
        return 0.0
    ranks_between = layout.tensor_parallel * run.copies
    shares_domain = ranks_between * (other_rank + 1) <= run.cluster.scale_up_devices
    stride = 1 if shares_domain else ranks_between * other_rank
    both_ends = group(run.cluster, constants, size=2, stride=stride)
    weights = run.shape.embedding_parameters / layout.tensor_parallel
    return both_ends.reduce_s(float(run.software.gradient_bytes) * weights)


def transfer_latency_s(constants: Constants) -> float:
    """Seconds of latency of one message between pipeline ranks."""
    ratio = constants.peer_hop if isinstance(constants, ClusterConstants) else 1.0
    return constants.hop_s * ratio


def num_buckets(num_parameters: float, num_ranks: int, *, bucket_elements: float = 0.0) -> float:
    """Megatron's number of gradient buckets, of 40 million elements or, if more, a million a rank.

    `bucket_elements` is another size of a bucket; 0 is Megatron's.
    """
    return max(1.0, num_parameters / (bucket_elements or max(40e6, 1e6 * num_ranks)))


def data_parallel_s(
    run: TrainingRun,
    constants: Constants,
    *,
    num_dense: float,
    num_expert: float,
    forward_s: float,
    backward_s: float,
) -> float:
    """The exposed time of reducing gradients and gathering updated parameters.

    The `num_dense` parameters are shared by all data and context parallel ranks, the `num_expert` ones by
    ranks that hold the same experts. The traffic can hide behind `forward_s` and `backward_s`, those of one
    microbatch.
    """
    if run.zero_stage == 3:
        return 0.0
    tp, ranks = run.layout.tensor_parallel, run.expert_copies
    reduce, gather = _reduce_and_gather(run, constants, num_dense, num_ranks=run.copies, stride=tp)
    if num_expert and ranks > 1:
        stride = run.expert_shards * run.layout.expert_parallel
        more = _reduce_and_gather(run, constants, num_expert, num_ranks=ranks, stride=stride)
        reduce, gather = reduce + more[0], gather + more[1]
    if not run.software.has_data_overlap:
        return reduce + gather
    left = constants.data_exposed
    # Chunks of an interleaved schedule finish one after the other, each after a round of microbatches.
    v = run.layout.virtual_stages
    rounds = max(1.0, run.layout.pipeline_parallel * (v - 1) / v)
    rounds = min(rounds, float(run.num_microbatches))
    exposed = _exposed_s(reduce, behind_s=rounds * backward_s, least=left)
    if not run.software.gather_overlap:
        return exposed + gather
    return exposed + _exposed_s(gather, behind_s=rounds * forward_s, least=left)


def _exposed_s(seconds: float, *, behind_s: float, least: float) -> float:
    """Seconds of traffic that `behind_s` of compute does not hide; `least` is the share that none hides."""
    return max(seconds * least, seconds - behind_s)


def _reduce_and_gather(
    run: TrainingRun, constants: Constants, num_parameters: float, *, num_ranks: int, stride: int
) -> tuple[float, float]:
    if num_ranks == 1:
        return 0.0, 0.0
    reducing = group(run.cluster, constants, size=num_ranks, stride=stride)
    gradients = float(run.software.gradient_bytes) * num_parameters
    if run.zero_stage == 0:
        return reducing.reduce_s(gradients), 0.0
    shards = min(run.optimizer_group, num_ranks)
    calls = num_buckets(num_parameters, num_ranks, bucket_elements=run.software.bucket_elements)
    reduce = (
        reducing.reduce_s(gradients)
        if shards < num_ranks or run.software.reduces_all
        else reducing.gather_s(gradients, calls=calls)
    )
    back = group(run.cluster, constants, size=shards, stride=stride)
    gather = back.gather_s(float(run.parameter_bytes) * num_parameters, calls=calls)
    if run.software.zero_broadcasts:
        gather += shards * (back.num_domains - 1) * constants.hop_s
    return reduce, gather


def sharded_parameters_s(
    run: TrainingRun,
    constants: Constants,
    *,
    num_dense: float,
    num_expert: float,
    forward_s: float,
    backward_s: float,
) -> float:
    """The exposed time of a rank's fully sharded parameters (ZeRO-3, FSDP) for a microbatch.

    All-gather before the forward; all-gather again and reduce-scatter gradients in the backward. Both are
    prefetched a layer ahead.
    """
    if run.zero_stage != 3:
        return 0.0
    if run.software.shards_parameters:
        return _by_units_s(run, constants, num_dense, num_expert, forward_s=forward_s, backward_s=backward_s)
    num_parameters = num_dense + num_expert
    size = run.shard_group
    ranks = group(run.cluster, constants, size=size, stride=run.layout.tensor_parallel)
    calls = run.shape.num_layers * run.software.collectives_per_layer / run.layout.pipeline_parallel
    gather = ranks.gather_s(float(run.element_bytes) * num_parameters, calls=calls)
    scatter = ranks.gather_s(float(run.software.gradient_bytes) * num_parameters, calls=calls)
    left = constants.data_exposed
    exposed = _exposed_s(gather, behind_s=forward_s, least=left)
    return exposed + _exposed_s(gather + scatter, behind_s=backward_s, least=left)


def _by_units_s(
    run: TrainingRun,
    constants: Constants,
    num_dense: float,
    num_expert: float,
    *,
    forward_s: float,
    backward_s: float,
) -> float:
    """The exposed time of what Megatron-FSDP all-gathers and reduce-scatters for a microbatch.

    A layer is all-gathered and released in each pass; embedding and head are all-gathered once an iteration
    and stay, with nothing before the embedding that would hide it. Gradients of all of them are
    reduce-scattered in every backward. Expert weights are sharded over the ranks that hold the same experts
    (megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py).
    """
    layout, calls = run.layout, run.shape.num_layers / run.layout.pipeline_parallel
    weight, gradient = float(run.element_bytes), float(run.software.gradient_bytes)
    ranks = group(run.cluster, constants, size=run.shard_group, stride=layout.tensor_parallel)
    gather = ranks.gather_s(weight * (num_dense - run.end_parameters), calls=calls)
    scatter = ranks.gather_s(gradient * num_dense, calls=calls)
    if num_expert:
        stride = run.expert_shards * layout.expert_parallel
        holders = group(run.cluster, constants, size=run.expert_copies, stride=stride)
        gather += holders.gather_s(weight * num_expert, calls=calls)
        scatter += holders.gather_s(gradient * num_expert, calls=calls)
    left = constants.data_exposed
    exposed = _exposed_s(gather, behind_s=forward_s, least=left)
    exposed += _exposed_s(gather + scatter, behind_s=backward_s, least=left)
    return exposed + ranks.gather_s(weight * run.end_parameters) / run.num_microbatches
