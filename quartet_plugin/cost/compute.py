"""Compute time of a layer, the embedding and the head, in seconds for one microbatch on one device.

A matrix product's time is a smooth maximum of its FLOPs at the device's rate and its operand traffic, so that
small and badly shaped products are slower without a table of shapes. The rest of a layer is memory traffic
and kernel starts.
"""

import math
from dataclasses import dataclass, field, replace

from quartet_plugin.cost import host_operations, state_space
from quartet_plugin.cost.constants import NEUTRAL, ClusterConstants, Constants
from quartet_plugin.cost.devices import DeviceSpec
from quartet_plugin.cost.run import TrainingRun
from quartet_plugin.cost.times import Times
from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.job_description import Experts

FLASH_BLOCK = 128
# The rate of streaming kernels as a share of the nominal memory bandwidth.
MEMORY_RATE = 0.85
# Generations on a 4 nm process, whose half-precision units outgrew the power budget.
POWER_LIMITED = ("hopper", "blackwell", "ada")
# Tiles of a matrix product's output (rows, columns), and a FLOP's cost in each tile size.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.1))
# Kernels of a layer's forward: fused (norms, rotary, activation, residuals) and not.
FUSED_KERNELS, PLAIN_KERNELS = 14, 30
# The rate of Triton kernels of attention's products as a share of the kernel written for the device.
TRITON_SHARE = 0.55
# A fused attention's backward multiplies five matrices where its forward multiplies two, a bit slower.
FLASH_BACKWARD = 2.5 / 0.85
ELEMENTWISE_BACKWARD = 1.5
# Bytes of a cast an element. To 8 bits: read 2, write 1 for each of the two layouts that products need. To 4
# bits: read 2 for the largest value, read 2 again for each layout, since one of them is rotated first
# (Transformer Engine, `recipe.NVFP4BlockScaling`), and write half a byte for each.
CAST_BYTES = {"fp8": 4.0, "fp4": 7.0}
_NONE = Times()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """A layer's compute by cause; `recompute_s` is the part of the forward that the backward repeats.

    Of the products `routed_experts` are those behind the exchange of tokens, `shared_into` and `shared_out`
    those into the shared expert's hidden width and out of it.
    """

    gemm: Times
    attention: Times
    elementwise: Times
    launch: Times
    recompute_s: float = 0.0
    routed_experts: Times = _NONE
    shared_into: Times = _NONE
    shared_out: Times = _NONE

    @property
    def total(self) -> Times:
        """The sum of all causes but recompute."""
        return Times.sum_of((self.gemm, self.attention, self.elementwise, self.launch))


@dataclass(frozen=True, slots=True, kw_only=True)
class _NonAttentionPart:
    """Seconds of one microbatch, and sizes, of a layer's dense FFN, experts or scan.

    All are zero for a layer of attention alone.
    `dense` are the times of products of (out, in) `sizes`, whose operands are cast. `hidden` is the width of
    the activation, `last_width` that of the last product's input. `moved_bytes` are further bytes of a
    forward; `scan` is added to the elementwise times, `launch` to those of the kernels' starts.
    """

    sizes: list[tuple[float, float]] = field(default_factory=list)
    dense: Times = _NONE
    routed_experts: Times = _NONE
    shared_into: Times = _NONE
    shared_out: Times = _NONE
    hidden: float = 0.0
    last_width: float = 0.0
    moved_bytes: float = 0.0
    scan: Times = _NONE
    launch: Times = _NONE


class Rates:
    """The rates of one device under given constants, in FLOP/s and bytes/s; made once a run."""

    def __init__(self, run: TrainingRun, constants: Constants) -> None:
        device = run.cluster.device
        low = run.has_narrow_products
        self.half = half_rate(device, run.half, constants)
        self.matmul = device.ceiling_flops(run.matmul) * constants.fp8_rate if low else self.half
        self.flash = self.half * constants.flash_rate * flash_share(run)
        self.memory = device.memory_bandwidth_bytes_per_s * MEMORY_RATE
        self.traffic = constants.gemm_traffic / device.memory_bandwidth_bytes_per_s
        self.element = run.element_bytes
        self.operand_bytes = 1 if low else self.element
        self.cast = constants.cast * CAST_BYTES.get(run.matmul, 0.0)
        self.units = device.compute_units
        graphed = 1.0 if run.software.is_graphed else run.software.graphed_share
        self.launch_s = constants.launch_s * (1.0 - graphed)
        self.host_operation_s = 0.0 if self.units == 1 else constants.host_operation_s
        self.ratios = constants if isinstance(constants, ClusterConstants) else NEUTRAL

    def gemm_s(self, m: float, n: float, k: float, *, is_gradient: bool = False) -> float:
        """Seconds of [m, k] x [k, n] in the layers' precision; a weight gradient adds to fp32."""
        size = self.operand_bytes
        out = 8 if is_gradient else self.element
        return _joined(
            2 * m * n * k / self.matmul * waves(m, n, self.units),
            (size * (m * k + k * n) + out * m * n) * self.traffic,
            units=self.units,
        )

    def half_gemm_s(
        self, m: float, n: float, k: float, batch: float = 1.0, *, out: float | None = None
    ) -> float:
        """Seconds of `batch` products in half precision; `out` are bytes an element of the result."""
        written = self.element if out is None else out
        return batch * _joined(
            2 * m * n * k / self.half * waves(m, n * batch, self.units),
            (self.element * (m * k + k * n) + written * m * n) * self.traffic,
            units=self.units,
        )


def waves(m: float, n: float, units: int) -> float:
    """The slowdown of a product because its tiles come in complete waves over the compute units, >= 1."""
    if units == 1:
        return 1.0  # a processor core works on parts of a tile as well
    best = math.inf
    for rows, columns, cost in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        best = min(best, math.ceil(tiles / units) * rows * columns * cost)
    return max(1.0, best * units / (m * n))


def _joined(compute_s: float, traffic_s: float, *, units: int) -> float:
    """Seconds of compute and traffic that overlap, the less the closer the two are.

    A processor core overlaps nothing: it packs the operands, then multiplies (Goto and van de Geijn 2008).
    """
    return compute_s + traffic_s if units == 1 else math.hypot(compute_s, traffic_s)


def flash_share(run: TrainingRun) -> float:
    """The rate of an attention kernel as a share of the kernel written for the device.

    FlashAttention 1 and its Triton form reach about half of version 2 (Dao 2023), version 2 about half of
    version 3 on Hopper (Shah et al. 2024).
    """
    if run.software.attention == "flash-1":
        return TRITON_SHARE
    new = run.cluster.device.generation in ("hopper", "blackwell")
    return 0.55 if run.software.attention == "flash-2" and new else 1.0


def half_rate(device: DeviceSpec, precision: Precision, constants: Constants) -> float:
    """FLOP/s of large half-precision products: near the ceiling, or at the limit of the power budget."""
    reached = device.ceiling_flops(precision) * constants.gemm_rate
    if device.power_watts is None or device.generation not in POWER_LIMITED:
        return reached
    return min(reached, device.power_watts * constants.flops_per_joule)


def products(run: TrainingRun) -> list[tuple[float, float]]:
    """(out, in) sizes of a layer's attention products on one tensor-parallel rank; none without attention."""
    if not run.has_attention:
        return []
    shape, tp = run.shape, run.layout.tensor_parallel
    h, d = shape.hidden_size, shape.kv_channels
    heads = shape.num_attention_heads / tp
    if run.latent is not None:
        mla = run.latent
        wide = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        return [
            (mla.q_lora_rank, h),
            (heads * wide, mla.q_lora_rank),
            (mla.kv_lora_rank + mla.qk_pos_emb_head_dim, h),
            (heads * (mla.qk_head_dim + mla.v_head_dim), mla.kv_lora_rank),
            (h, heads * mla.v_head_dim),
        ]
    groups = max(1.0, shape.num_query_groups / tp)
    return [((heads + 2 * groups) * d, h), (h, heads * d)]


def dense_products(run: TrainingRun) -> list[tuple[float, float]]:
    """(out, in) sizes of a rank's dense FFN, or of the projections of a state-space layer."""
    if run.scan is not None:
        return state_space.projections(run)
    shape, width = run.shape, run.shape.ffn_hidden_size / run.layout.tensor_parallel
    return ffn_products(shape.hidden_size, width, is_gated=shape.gated_ffn)


def ffn_products(hidden: float, ffn: float, *, is_gated: bool) -> list[tuple[float, float]]:
    """(out, in) sizes of an FFN."""
    return [(ffn * (2 if is_gated else 1), hidden), (hidden, ffn)]


def layer_times(
    run: TrainingRun,
    constants: Constants,
    rates: Rates,
    *,
    experts: Experts | None,
    cut: tuple[Times, Times] | None = None,
) -> LayerTimes:
    """One layer with a dense FFN, or with `experts`; what the run's layers lack is left out.

    `cut` are the products of another tensor partition than the framework's, and the starts that it adds.
    """
    t = run.tokens_per_microbatch
    attention, attention_passes = _attention(run, constants, rates) if run.has_attention else (_NONE, 0.0)
    ffn = _non_attention_part(run, constants, rates, experts)
    sizes = products(run)
    gemm = Times.sum_of(
        (_gemms(rates, t, sizes), ffn.dense, ffn.routed_experts, ffn.shared_into, ffn.shared_out)
    )
    sizes = sizes + ffn.sizes
    elementwise_bytes = _elementwise_bytes(run, ffn.hidden * rates.ratios.activation)
    passes = elementwise_bytes + attention_passes + ffn.moved_bytes
    scale = constants.elementwise / rates.memory
    cast = rates.cast * sum(t * (size_in + size_out) for size_out, size_in in sizes) / rates.memory
    memory = passes * scale
    add = _accumulation_s(run, rates, sizes)
    back = ELEMENTWISE_BACKWARD * rates.ratios.elementwise_backward
    elementwise = Times(memory + cast / 2, memory * back + cast / 2, add).plus(ffn.scan)
    kernels = FUSED_KERNELS if run.software.fused_elementwise else PLAIN_KERNELS
    start = kernels * run.kernel_ratio(has_experts=experts is not None) * rates.launch_s
    launch = Times(
        start,
        start * rates.ratios.launch_input,
        start * 0.5 * rates.ratios.launch_weight,
    ).plus(ffn.launch)
    if cut is not None:
        gemm, launch = cut[0], launch.plus(cut[1])
    times = LayerTimes(
        gemm=gemm,
        attention=attention,
        elementwise=elementwise,
        launch=launch,
        routed_experts=ffn.routed_experts,
        shared_into=ffn.shared_into,
        shared_out=ffn.shared_out,
    )
    if experts is not None:
        host = host_operations.operations(run, experts).scaled(rates.host_operation_s)
        wait = host_operations.exposed_times(host, times.total)
        times = replace(times, launch=launch.plus(wait))
    has_last = run.software.has_early_stop and run.has_ffn
    last = rates.gemm_s(t, run.shape.hidden_size, ffn.last_width) if has_last else 0.0
    if run.layout.recompute == "selective":
        return replace(times, recompute_s=_modules_s(run, constants, rates, times, experts=experts))
    return replace(times, recompute_s=(times.total.forward_s - last) * run.recomputed_share)


def _non_attention_part(
    run: TrainingRun, constants: Constants, rates: Rates, experts: Experts | None
) -> _NonAttentionPart:
    """What a layer has beside attention, by its kind."""
    if not run.has_ffn:
        return _NonAttentionPart()
    if experts is not None:
        return _expert_part(run, rates, experts)
    return _dense_part(run, rates) if run.scan is None else _scan_part(run, constants, rates)


def _dense_part(run: TrainingRun, rates: Rates) -> _NonAttentionPart:
    sizes = dense_products(run)
    width = sizes[-1][1]
    return _NonAttentionPart(
        sizes=sizes,
        dense=_gemms(rates, run.tokens_per_microbatch, sizes),
        hidden=width,
        last_width=width,
    )


def _scan_part(run: TrainingRun, constants: Constants, rates: Rates) -> _NonAttentionPart:
    sizes = dense_products(run)
    return _NonAttentionPart(
        sizes=sizes,
        dense=_gemms(rates, run.tokens_per_microbatch, sizes),
        last_width=sizes[-1][1],
        moved_bytes=state_space.passes_bytes(run, scan=rates.ratios.scan),
        scan=_scan(run, constants, rates).scaled(rates.ratios.scan),
        launch=state_space.kernels(run).scaled(rates.launch_s),
    )


def _expert_part(run: TrainingRun, rates: Rates, experts: Experts) -> _NonAttentionPart:
    (routed, shared_into, shared_out), width, permuted = _experts(run, rates, experts)
    return _NonAttentionPart(
        routed_experts=routed,
        shared_into=shared_into,
        shared_out=shared_out,
        hidden=width,
        last_width=width,
        moved_bytes=permuted,
        launch=host_operations.kernels_alone(run, experts).scaled(rates.launch_s),
    )


def head_times(run: TrainingRun, constants: Constants, rates: Rates) -> LayerTimes:
    """Final norm, output product and loss; the logits stay in half precision until the loss."""
    t, tp = run.tokens_per_microbatch, run.layout.tensor_parallel
    vocab, h = run.shape.vocab_size / tp, run.shape.hidden_size
    forward = rates.half_gemm_s(t, vocab, h)
    logits = t * vocab / rates.memory * constants.logits
    fused = run.software.fused_loss
    add = _eager_sum_s(run, rates)
    back = (6 if fused else 12) * rates.ratios.logits_backward
    start = 10 * rates.launch_s
    return LayerTimes(
        gemm=Times(
            forward,
            rates.half_gemm_s(t, h, vocab),
            rates.half_gemm_s(vocab, h, t, out=8) * rates.ratios.weight_product,
        ),
        attention=Times(),
        elementwise=Times(logits * (8 if fused else 16), logits * back, add),
        launch=Times(start, start * rates.ratios.launch_input, 0.0),
    )


def joined_states_times(run: TrainingRun, rates: Rates) -> Times:
    """The product that joins a layer's output with the next token's embedding (MTP's `eh_proj`)."""
    h = run.shape.hidden_size
    return _gemms(rates, run.tokens_per_microbatch, [(h / run.layout.tensor_parallel, 2.0 * h)])


def embedding_times(run: TrainingRun, rates: Rates) -> LayerTimes:
    """A gather, and a scattered addition to fp32 gradients.

    With eager gradients a full gradient is cleared before, and added to the sum after it.
    """
    traffic = run.tokens_per_microbatch * run.shape.hidden_size / rates.memory
    add = _eager_sum_s(run, rates) * 4 / 3
    return LayerTimes(
        gemm=Times(),
        attention=Times(),
        elementwise=Times(6 * traffic, 0.0, 10 * traffic + add),
        launch=Times(4 * rates.launch_s, 0.0, 4 * rates.launch_s),
    )


def _gemms(rates: Rates, tokens: float, sizes: list[tuple[float, float]]) -> Times:
    forward = sum(rates.gemm_s(tokens, n, k) for n, k in sizes)
    inputs = sum(rates.gemm_s(tokens, k, n) for n, k in sizes)
    weights = sum(rates.gemm_s(n, k, tokens, is_gradient=True) for n, k in sizes)
    return Times(forward, inputs, weights * rates.ratios.weight_product)


def _attention(run: TrainingRun, constants: Constants, rates: Rates) -> tuple[Times, float]:
    """The core of attention, and the bytes of its rearrangements."""
    shape, layout = run.shape, run.layout
    heads = shape.num_attention_heads / layout.tensor_parallel
    s, b = run.attended_length, run.documents_per_microbatch
    query = s / layout.context_parallel
    qk = v = float(shape.kv_channels)
    if run.latent is not None:
        qk, v = run.latent.qk_head_dim + run.latent.qk_pos_emb_head_dim, run.latent.v_head_dim
    if run.software.attention != "unfused":
        # Causal: half of the scores, in blocks; the diagonal blocks are computed whole.
        share = 0.5 * (1 + FLASH_BLOCK / s)
        flops = 2 * b * heads * query * s * (qk + v) * share
        forward = flops / (rates.flash * _channels_share((qk + v) / 2))
        return Times(forward, forward * FLASH_BACKWARD, 0.0), 0.0
    batch = b * heads
    forward = rates.half_gemm_s(query, s, qk, batch) + rates.half_gemm_s(query, v, s, batch)
    scores = batch * query * s * (rates.element / 2) / rates.memory * constants.softmax
    drop = 5.0 if run.software.has_dropout else 0.0
    moves = 2 * rates.element * run.tokens_per_microbatch * heads * (2 * qk + 2 * v)
    return Times(forward + scores * (4 + drop), 2 * forward + scores * (6 + drop), 0.0), moves


def _scan(run: TrainingRun, constants: Constants, rates: Rates) -> Times:
    """The scan of a state-space layer with its convolution.

    Its kernels are written in Triton, as attention's were before each device had its own.
    """
    parts = state_space.products(run)
    if run.software.plain_operations:
        seconds = [rates.half_gemm_s(part.m, part.n, part.k) for part in parts]
        moved = 0.0, 0.0
    else:
        rate = rates.half * constants.flash_rate * TRITON_SHARE
        rate *= _channels_share(state_space.mean_channels(run))
        seconds = [2 * part.m * part.n * part.k / rate for part in parts]
        moved = state_space.scan_bytes(run)
    byte_s = constants.elementwise / rates.memory
    forward = sum(part.forward * each for part, each in zip(parts, seconds, strict=True))
    backward = sum(part.backward * each for part, each in zip(parts, seconds, strict=True))
    return Times(
        _joined(forward, moved[0] * byte_s, units=rates.units),
        _joined(backward, moved[1] * byte_s, units=rates.units),
        0.0,
    )


def _channels_share(channels: float) -> float:
    """The rate of attention's products with heads of `channels`: under 128 matrix units are idle in part."""
    share: float = min(1.0, channels / 128) ** 0.5
    return share


def _elementwise_bytes(run: TrainingRun, ffn: float) -> float:
    """Bytes of norms, residuals, rotary embedding and activation in one forward; `ffn` is a rank's width."""
    shape, layout = run.shape, run.layout
    t, tp = run.tokens_per_microbatch, layout.tensor_parallel
    split = run.sequence_shards
    fused = run.software.fused_elementwise
    modern = shape.position_embedding == "rope"
    # Norms and residual sums; an unfused root-mean-square norm passes over memory twice as often.
    residual = (11.0 if run.software.has_dropout else 10.0) + (4.0 if modern and not fused else 0.0)
    residual *= run.num_sublayers / 2
    heads = run.has_attention * (shape.num_attention_heads + shape.num_query_groups) * shape.kv_channels / tp
    rotary = (2.0 if fused else 6.0) * heads if modern else 0.0
    activation = _activation(run) * ffn
    return run.element_bytes * t * (residual * shape.hidden_size / split + rotary + activation)


def _experts(
    run: TrainingRun, rates: Rates, experts: Experts
) -> tuple[tuple[Times, Times, Times], float, float]:
    """Products of the experts, their activations' width a token, and the bytes of permuting tokens.

    The products are those of routed experts, and of the shared one into its hidden width and out of it.
    """
    shape, layout = run.shape, run.layout
    t, h = run.tokens_per_microbatch, shape.hidden_size
    tp, ep = layout.tensor_parallel, layout.expert_parallel
    local = max(1.0, experts.num_experts / ep)
    arriving = t * experts.experts_per_token * run.expert_load
    # Tensor-parallel devices share the products of an expert, or the tokens of whole ones.
    each = arriving / local * run.expert_shards / tp
    sizes = ffn_products(h, experts.ffn_hidden_size / run.expert_shards, is_gated=shape.gated_ffn)
    routed = _gemms(rates, each, sizes).scaled(local)
    shared_into = shared_out = _NONE
    if experts.shared_ffn_hidden_size:
        shared = ffn_products(h, experts.shared_ffn_hidden_size / tp, is_gated=shape.gated_ffn)
        shared_into, shared_out = (_gemms(rates, t, [product]) for product in shared)
    width = _routed_width(run, experts) + experts.shared_ffn_hidden_size / tp
    # Tokens are permuted before and after the exchange, and back: two copies of each that the rank holds for
    # its experts, and two of each routed one of its own, unless the dispatcher permutes those itself. Where
    # all tokens are gathered it is one of all instead: outputs are added into a cleared tensor of their size.
    copied = 2.0 * arriving * run.expert_shards / tp
    if run.software.gathers_tokens:
        copied += t * ep * run.expert_shards / tp
    elif not run.software.sends_once_a_domain:
        copied += 2.0 * arriving / tp
    return (routed, shared_into, shared_out), width, 2.0 * copied * h * run.element_bytes


def _routed_width(run: TrainingRun, experts: Experts) -> float:
    """The width of routed experts' activations on the fullest rank, a token of the microbatch."""
    routed = experts.ffn_hidden_size * experts.experts_per_token * run.expert_load
    return routed / run.layout.tensor_parallel


def _accumulation_s(run: TrainingRun, rates: Rates, sizes: list[tuple[float, float]]) -> float:
    """Adding a microbatch's weight gradients to the sum, where the product does not do it itself."""
    software = run.software
    once = run.num_microbatches == 1 and not software.eager_gradients
    if software.fused_weight_gradient or once or run.zero_stage == 3:
        return 0.0
    weights = sum(n * k for n, k in sizes)
    return weights * 3.0 * software.main_gradient_bytes / rates.memory * rates.ratios.accumulation


def _eager_sum_s(run: TrainingRun, rates: Rates) -> float:
    """Seconds to add a microbatch's gradient of the vocabulary to the sum; 0 without eager gradients."""
    if not run.software.eager_gradients:
        return 0.0
    weights = run.shape.embedding_parameters / run.layout.tensor_parallel
    return weights * 3.0 * run.software.main_gradient_bytes / rates.memory * rates.ratios.accumulation


def _modules_s(
    run: TrainingRun, constants: Constants, rates: Rates, times: LayerTimes, *, experts: Experts | None
) -> float:
    """Seconds of the forwards of the modules that selective recompute repeats in a layer."""
    t, tp, h = run.tokens_per_microbatch, run.layout.tensor_parallel, run.shape.hidden_size
    split = run.sequence_shards
    byte_s = constants.elementwise * run.element_bytes * t / rates.memory
    other = times.gemm.forward_s + times.elementwise.forward_s
    seconds = run.software.selective_fraction * other
    if run.recomputes("core_attn"):
        seconds += times.attention.forward_s
    if run.recomputes("layernorm"):
        # Read the input, write the output.
        norms = run.num_norm_modules(has_experts=experts is not None)
        seconds += norms * (2.0 * h / split * byte_s + rates.launch_s)
    if run.recomputes("mla_up_proj") and run.latent is not None and run.has_attention:
        _, queries, _, keys, _ = products(run)
        rotated = 2.0 * run.shape.num_attention_heads / tp * run.latent.qk_pos_emb_head_dim
        seconds += rates.gemm_s(t, *queries) + rates.gemm_s(t, *keys) + 2.0 * rotated * byte_s
    if not run.has_ffn:
        return seconds
    if experts is None:
        ffn = run.shape.ffn_hidden_size / tp
        return seconds + (_ffn_s(run, rates, ffn, byte_s) if run.recomputes_mlp else 0.0)
    shared_ffn = experts.shared_ffn_hidden_size / tp
    if run.recomputes("moe"):
        products_of_experts, width, permuted = _experts(run, rates, experts)
        passes = permuted * constants.elementwise / rates.memory
        product_s = sum(part.forward_s for part in products_of_experts)
        # A layer's launches count its experts' as much as those of attention and an FFN together.
        launch_s = times.launch.forward_s / run.kernel_ratio(has_experts=True)
        return seconds + product_s + _activation(run) * width * byte_s + passes + launch_s
    if run.recomputes("moe_act"):
        seconds += _activation(run) * _routed_width(run, experts) * byte_s + rates.launch_s
    if run.recomputes("shared_experts") and shared_ffn:
        seconds += _ffn_s(run, rates, shared_ffn, byte_s)
    return seconds


def _ffn_s(run: TrainingRun, rates: Rates, ffn: float, byte_s: float) -> float:
    """Seconds of the forward of an FFN of `ffn` columns on this rank: two products and the activation."""
    sizes = ffn_products(run.shape.hidden_size, ffn, is_gated=run.shape.gated_ffn)
    product_s = sum(rates.gemm_s(run.tokens_per_microbatch, n, k) for n, k in sizes)
    return product_s + _activation(run) * ffn * byte_s + rates.launch_s


def _activation(run: TrainingRun) -> float:
    """Numbers that an activation reads and writes for one of its results."""
    if not run.shape.gated_ffn:
        return 2.0
    return 3.0 if run.software.fused_elementwise else 5.0
