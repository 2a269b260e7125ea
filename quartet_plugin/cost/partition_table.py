"""Prices every form of tensor partition for one layer: the table of `quartet partition price`."""

from typing import Any

from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.devices import DeviceSpec, device_named
from quartet_plugin.cost.partitions import SCALE_OUT, SCALE_UP, LinearPrice, PartitionRates, price_layer
from quartet_plugin.errors import PlanError
from quartet_plugin.partition.layer import LAYER_FORMS, Linear
from quartet_plugin.partition.table import Phase

BF16_BYTES = 2


def rates_of(device: DeviceSpec) -> PartitionRates:
    """The rates of a device of the library in bf16, with the cost model's constants."""
    constants = fitted()
    return PartitionRates(
        flops_per_s=device.ceiling_flops("bf16") * constants.gemm_rate,
        bytes_per_s={
            SCALE_UP: device.scale_up_bandwidth_bytes_per_s * constants.scale_up,
            SCALE_OUT: device.scale_out_bandwidth_bytes_per_s * constants.scale_out,
        },
        hop_s=constants.hop_s / 4,
        element_bytes=BF16_BYTES,
        units=device.compute_units,
        devices_per_domain=device.scale_up_devices,
        peer_share=1 / max(1, device.scale_up_devices - 1) if device.scale_up_topology == "mesh" else 1.0,
    )


def price_table(*, hidden: int, tokens: int, num_devices: int, device: str) -> dict[str, Any]:
    """Prices of all forms that fit, by form, the fastest first; a form that does not fit has a remark.

    Raises ConfigError for an unknown device, PlanError where no form fits, or the devices leave fast links.
    """
    spec = device_named(device)
    if num_devices > spec.scale_up_devices:
        raise PlanError(
            f"{num_devices} devices: the fast links of {device} join {spec.scale_up_devices}; "
            "tensor parallelism stays inside of them"
        )
    rates = rates_of(spec)
    linears = (
        Linear(name="qkv", role="in", sizes=(tokens, hidden, 3 * hidden)),
        Linear(name="proj", role="out", sizes=(tokens, hidden, hidden)),
        Linear(name="fc1", role="in", sizes=(tokens, hidden, 4 * hidden)),
        Linear(name="fc2", role="out", sizes=(tokens, 4 * hidden, hidden)),
    )
    prices, remarks = {}, []
    for form in LAYER_FORMS:
        try:
            prices[form] = price_layer(form, linears, num_devices=num_devices, rates=rates)
        except PlanError as error:
            remarks.append(f"{form}: {error}")
    if not prices:
        raise PlanError(f"{num_devices} devices: no form of partition fits; {remarks[0]}")
    forms = sorted(prices, key=lambda form: sum(price.time_s for price in prices[form]))
    return {
        "schema_version": 1,
        "device": device,
        "devices": num_devices,
        "forms": {form: _row(prices[form]) for form in forms},
        "remarks": [*remarks, "predicted by the cost model, not measured; attention itself is left out"],
    }


def price_rows(content: dict[str, Any]) -> list[list[str]]:
    """The table's rows for reading."""
    rows = [["form", ">ms", ">products", ">exposed", ">borders", ">sent MB", ">buffers MB"]]
    for form, row in content["forms"].items():
        seconds = [row["time_s"], row["product_s"], row["exposed_s"], row["border_s"]]
        rows.append(
            [
                form,
                *(f"{1e3 * value:.3f}" for value in seconds),
                f"{(row['sent_bytes'] + row['border_bytes']) / 1e6:.1f}",
                f"{row['buffer_bytes'] / 1e6:.1f}",
            ]
        )
    return rows


def _row(prices: tuple[LinearPrice, ...]) -> dict[str, Any]:
    return {
        "time_s": sum(price.time_s for price in prices),
        "product_s": sum(price.product_s for price in prices),
        "exposed_s": sum(phase.exposed_s for price in prices for phase in price.phases.values()),
        "border_s": sum(price.border_s for price in prices),
        "sent_bytes": sum(sum(price.sent_bytes.values()) for price in prices),
        "border_bytes": sum(price.border_bytes for price in prices),
        "buffer_bytes": max(price.buffer_bytes for price in prices),
        "linears": {
            price.name: {
                "partition": price.partition,
                "time_s": price.time_s,
                "sent_bytes": [
                    {"phase": str(phase), "tensor": str(tensor), "level": level, "bytes": size}
                    for (phase, tensor, level), size in price.sent_bytes.items()
                ],
                "phases": {str(phase): price.phases[phase].time_s for phase in Phase},
            }
            for price in prices
        },
    }
