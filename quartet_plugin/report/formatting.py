"""Quantities, intervals and untrusted text, formatted for people."""

from collections.abc import Iterable

from quartet_plugin.model.measurement import Interval, Measurement
from quartet_plugin.protocol.terminal import reason_line

BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
# The columns of every table of trials.
SECONDS_HEAD, SPEEDUP_HEAD, MEMORY_HEAD = "s/iter", "speedup", "peak memory"
_DRIFTED = "*"
# That of the interval of a median over many launches.
CONFIDENCE = 0.95
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


def microbatch_words(number: int) -> str:
    """A number of microbatches."""
    return f"{number} microbatch{'' if number == 1 else 'es'}"


def iteration_words(seconds: float) -> str:
    """Seconds an iteration."""
    return f"{seconds:.3f}"


def speedup_words(ratio: float, *, drift: float = 1.0) -> str:
    """A speedup over the baseline; one over the baseline as it was measured again has a mark.

    `drift` is the machine's speed over its speed when the baseline was first measured; `drift_note` says what
    the mark means.
    """
    return f"{ratio:.2f}x{'' if drift == 1.0 else _DRIFTED}"


def speedup_sentence(ratio: float, *, drift: float = 1.0) -> str:
    """The same without a table, so the words include the baseline."""
    again = "" if drift == 1.0 else f" (baseline remeasured at {speedup_words(drift)} of its first speed)"
    return f"{speedup_words(ratio)} as fast as the baseline{again}"


def drift_note(drifts: Iterable[float]) -> str | None:
    """The meaning of the mark below a table with rows of these drifts; None where no row has the mark."""
    speeds = dict.fromkeys(speedup_words(drift) for drift in drifts if drift != 1.0)
    if not speeds:
        return None
    return f"{_DRIFTED} speedup over the baseline remeasured at {', '.join(speeds)} of its first speed"


def bubble_words(fraction: float) -> str:
    """The part of all devices' time, between a pipeline's first and last action, in which they run none."""
    return f"{100 * fraction:.1f} %"


def iteration_spread(measured: Measurement) -> str:
    """Seconds an iteration with their interval, named as what it is.

    The interval of a few launches' median is their whole range, which holds it with 1 - 2^(1 - n).
    """
    seconds, count = measured.iteration_s, measured.num_launches
    ends = f"{iteration_words(seconds.low)} to {iteration_words(seconds.high)}"
    is_range = 1.0 - 2.0 ** (1 - count) < CONFIDENCE
    kind = f"in {count} launch{'' if count == 1 else 'es'}" if is_range else "95 % interval"
    return f"{iteration_words(seconds.median)} ({ends}, {kind})"


def speedup_spread(speedup: Interval) -> str:
    """A speedup that was measured in turns with the baseline, with its interval."""
    return f"{speedup.median:.2f}x ({speedup.low:.2f}x to {speedup.high:.2f}x)"


def clean(text: str, *, limit: int = 500) -> str:
    """Text from a program on one line, secrets masked, control characters blanked, cut to `limit`."""
    return reason_line(text, limit=limit)


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    number = value / scale
    digits = 0 if abs(number) >= 100 or number == int(number) else 1 if abs(number) >= 10 else 2
    return f"{number:,.{digits}f} {unit}"
