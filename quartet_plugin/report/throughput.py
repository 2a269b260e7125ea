"""The rates of an iteration (tokens/s, model FLOP/s, MFU) and the job's days, device hours and price.

Every command that shows one of these figures takes it from here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quartet_plugin.cost.devices import DeviceSpec, match_device
from quartet_plugin.model.cluster import Precision
from quartet_plugin.model.job_description import Experts, LatentAttention, model_flops_per_sequence
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.report.formatting import rate

_HOUR_S, _DAY_S = 3600.0, 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The dense peak of one device: FLOP/s of products in the format `precision`."""

    flops_per_s: float
    precision: Precision

    @classmethod
    def of(cls, device: DeviceSpec, precision: Precision) -> "Peak":
        """The peak of a job's precision; a format that the device lacks has the next wider one's."""
        return cls(flops_per_s=device.peak_flops_of(precision), precision=device.format_of(precision))


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of one iteration; `mfu` is the part of the devices' peak FLOP/s, None where that is unknown.

    `peak_precision` is the format of that peak.
    """

    tokens_per_s: float
    tokens_per_s_per_device: float
    model_flops_per_s_per_device: float
    mfu: float | None
    peak_precision: Precision | None

    def as_data(self) -> dict[str, float | str | None]:
        """The rates as JSON data."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The rates in words: the job's tokens/s, then those of one device."""
        mfu = "" if self.mfu is None else f", MFU {self.mfu_words}"
        return (
            f"{self.tokens_per_s:,.0f} tokens/s, {self.tokens_per_s_per_device:,.0f} tokens/s per device, "
            f"{rate(self.model_flops_per_s_per_device)} per device{mfu}"
        )

    @property
    def mfu_words(self) -> str:
        """The MFU with the peak that it is a part of, empty where that is unknown."""
        return "" if self.mfu is None else f"{100 * self.mfu:.1f} % of the {self.peak_precision} peak"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """Time and money of a whole job; `price` is in the currency of the price of a device's hour, or None."""

    num_tokens: float
    days: float
    device_hours: float
    price: float | None

    def as_data(self) -> dict[str, float | None]:
        """The cost as JSON data."""
        return asdict(self)

    @property
    def words(self) -> str:
        """Days, tokens, device hours and, where one is known, the price, for a line of text."""
        price = "" if self.price is None else f", price {self.price:,.0f}"
        hours = f"{self.device_hours:,.0f} device hours"
        return f"{self.days:,.1f} days for {self.num_tokens:.4g} tokens, {hours}{price}"


def throughput(
    iteration_s: float,
    *,
    shape: ModelShape,
    global_batch_size: int,
    num_devices: int,
    peak: Peak | None,
    experts: Experts | None = None,
    latent_attention: LatentAttention | None = None,
    packed: PackedLengths | None = None,
) -> Throughput:
    """The rates of an iteration of `iteration_s` seconds; `peak` is one device's, or None.

    Of packed sequences only tokens without padding count.
    """
    sequences_per_s = global_batch_size / iteration_s
    flops = model_flops_per_sequence(shape, experts=experts, latent_attention=latent_attention, packed=packed)
    flops_per_s = sequences_per_s * flops / num_devices
    tokens_per_s = sequences_per_s * (shape.seq_length if packed is None else packed.tokens_per_sequence)
    return Throughput(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / num_devices,
        model_flops_per_s_per_device=flops_per_s,
        mfu=None if peak is None else flops_per_s / peak.flops_per_s,
        peak_precision=None if peak is None else peak.precision,
    )


def job_cost(
    tokens_per_s: float, *, num_devices: int, num_tokens: float | None, price_per_device_hour: float | None
) -> JobCost | None:
    """The time and price of training on `num_tokens` tokens; None if the number is unknown."""
    if num_tokens is None:
        return None
    seconds = num_tokens / tokens_per_s
    hours = seconds / _HOUR_S * num_devices
    price = None if price_per_device_hour is None else hours * price_per_device_hour
    return JobCost(num_tokens=num_tokens, days=seconds / _DAY_S, device_hours=hours, price=price)


def peak_of(nodes: Sequence[NodeInfo], precision: Precision = "bf16") -> Peak | None:
    """The peak of one of the nodes' devices; None where they differ or the library has none such."""
    names = {node.node_class.rpartition(" x")[0] for node in nodes}
    device = match_device(min(names)) if len(names) == 1 else None
    return None if device is None else Peak.of(device, precision)


def throughput_of(plan: Plan, iteration_s: float) -> Throughput:
    """The rates of a plan that takes `iteration_s` seconds per iteration.

    The peak is that of the device that the nodes name, in bf16 where nothing says the precision.
    """
    made_for, model = plan.made_for, plan.made_for.described_model
    return throughput(
        iteration_s,
        shape=plan.shape,
        global_batch_size=made_for.global_batch_size,
        num_devices=made_for.world_size,
        peak=peak_of(made_for.nodes, made_for.peak_precision),
        experts=model.experts,
        latent_attention=model.latent_attention,
        packed=made_for.packed,
    )


def cost_of(plan: Plan, rates: Throughput) -> JobCost | None:
    """The cost of the plan's job as far as the plan says its tokens; None where it does not."""
    job = plan.made_for.job
    if job is None:
        return None
    return job_cost(
        rates.tokens_per_s,
        num_devices=plan.made_for.world_size,
        num_tokens=job.num_tokens,
        price_per_device_hour=job.price_per_device_hour,
    )
