"""Quantities, intervals and untrusted text, formatted for people."""

from quartet_plugin.model.measurement import Interval
from quartet_plugin.protocol.masking import masked

BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_FLOPS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1.0, "FLOP/s"))


def duration(seconds: float) -> str:
    """Whole seconds, minutes or hours."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    """Bytes with three digits and a fitting unit."""
    return _scaled(num_bytes, BYTES)


def rate(flops_per_s: float) -> str:
    """FLOP/s with three digits and a fitting unit."""
    return _scaled(flops_per_s, _FLOPS)


def time_of(seconds: float) -> str:
    """A short time with three digits and a fitting unit."""
    return _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")))


def spread(interval: Interval, form: str) -> str:
    """A median and its interval, each in the format `form`."""
    return f"{form.format(interval.median)} ({form.format(interval.low)} to {form.format(interval.high)})"


def clean(text: str, *, limit: int = 500) -> str:
    """Text from a program on one line, secrets masked, control characters blanked, cut to `limit`."""
    shown = masked(text)[: 4 * limit]
    words = "".join(char if char.isprintable() else " " for char in shown).split()
    line = " ".join(words)
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    number = value / scale
    digits = 0 if abs(number) >= 100 or number == int(number) else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {unit}"
