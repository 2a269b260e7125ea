"""The cost of a search in device-hours, and after how many iterations with its winner it is paid back."""

from dataclasses import dataclass

from quartet_plugin.model.history import RunHistory
from quartet_plugin.model.plan import Plan
from quartet_plugin.report.formatting import duration
from quartet_plugin.report.noise import noise_words
from quartet_plugin.report.other_model import NO_PAYBACK, payback_iterations

# From this share of unstable launches on a machine is called busy.
BUSY_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchExpense:
    """The expense of a run's search so far.

    `device_hours`: the devices of the command times the seconds of every launch, those of the parity gate,
    the drift checks and the final rounds included. `search_s`: the seconds that its sessions took.
    Of `launch_s` the launches of the parity gate took `gate_s`, warm-up iterations `warmup_s`, measured ones
    `measured_s`, and processes that start or end `starts_s`; `waiting_s` of `search_s` nothing was launched.
    `measured_share` is that of `measured_s` in all of it: of launches beside each other every one counts.
    `num_warm_starts` launches were forked from a trial server, `num_cold_starts` were started anew.
    `payback_iterations`: the iterations after which the winner has gained `search_s`; None without a winner
    that is faster and of the user's own model.
    """

    num_devices: int
    launch_s: float
    device_hours: float
    search_s: float
    starts_s: float
    gate_s: float
    warmup_s: float
    measured_s: float
    measured_share: float
    waiting_s: float
    num_warm_starts: int
    num_cold_starts: int
    payback_iterations: int | None


def expense_of(history: RunHistory) -> SearchExpense:
    """The expense of a run, from the files of its launches and its events."""
    num_devices = sum(node.num_slots for node in history.nodes)
    parts = history.launch_parts
    iterations_s = parts.gate_s + parts.warmup_s + parts.measured_s
    return SearchExpense(
        num_devices=num_devices,
        launch_s=history.launch_s,
        device_hours=num_devices * history.launch_s / 3600.0,
        search_s=history.search_s,
        starts_s=max(0.0, history.launch_s - iterations_s),
        gate_s=parts.gate_s,
        warmup_s=parts.warmup_s,
        measured_s=parts.measured_s,
        measured_share=parts.measured_s / max(history.launch_s, history.search_s, 1e-9),
        num_warm_starts=parts.num_warm,
        num_cold_starts=parts.num_cold,
        waiting_s=max(0.0, history.search_s - history.launch_s),
        payback_iterations=_payback_iterations(history.winner, search_s=history.search_s),
    )


def _payback_iterations(winner: Plan | None, *, search_s: float) -> int | None:
    if winner is None or winner.measurement is None or winner.is_other_model:
        return None
    return payback_iterations(winner.measurement, search_s=search_s)


def expense_words(expense: SearchExpense, winner: Plan | None) -> str:
    """The expense as one line of text."""
    words = f"{_hours_words(expense)}: {_basis_words(expense)}, within {duration(expense.search_s)}"
    payback = _payback_words(expense, winner)
    return f"{words}; {payback}" if payback else words


def expense_lines(history: RunHistory) -> list[str]:
    """The expense under its label; nothing before a first launch has ended."""
    expense = expense_of(history)
    if expense.launch_s <= 0:
        return []
    return [
        f"spent     {expense_words(expense, history.winner)}",
        f"time      {time_words(expense)}",
        f"unstable  {unstable_words(history)}",
        *([f"noise     {noise}"] if (noise := noise_words(history)) else []),
    ]


def unstable_words(history: RunHistory) -> str:
    """The number of launches whose iterations vary too much, and what follows."""
    num, num_measured = history.launch_parts.num_unstable, history.launch_parts.num_measured
    if not num:
        return f"none of {num_measured} measured launches was unstable"
    words = f"{num} of {num_measured} measured launches (parity checks included) had unstable iteration "
    words += "times; each was repeated once, and the median is used if it was unstable again"
    return words + ("; the machine was too busy" if num >= BUSY_SHARE * num_measured else "")


def time_words(expense: SearchExpense) -> str:
    """The launches' seconds by phase, the share of measured iterations, and the time between launches."""
    measured = f"measured {duration(expense.measured_s)} ({100 * expense.measured_share:.0f} %)"
    parts = (
        ("warm-up", expense.warmup_s),
        ("parity checks", expense.gate_s),
        (_starts_name(expense), expense.starts_s),
        ("waiting between launches", expense.waiting_s),
    )
    return ", ".join([measured, *(f"{name} {duration(seconds)}" for name, seconds in parts)])


def _starts_name(expense: SearchExpense) -> str:
    if not expense.num_warm_starts:
        return "startup and shutdown"
    return f"startup and shutdown ({expense.num_warm_starts} warm, {expense.num_cold_starts} cold)"


def expense_card(history: RunHistory) -> tuple[str, str, str]:
    """The expense as the name, value and note of one of the report's figures."""
    expense = expense_of(history)
    note = _payback_words(expense, history.winner) or _basis_words(expense)
    return "spent", _hours_words(expense), f"{note}; {time_words(expense)}"


def _hours_words(expense: SearchExpense) -> str:
    hours = expense.device_hours
    return f"{hours:,.3f} device-hours" if hours < 10 else f"{hours:,.0f} device-hours"


def _basis_words(expense: SearchExpense) -> str:
    return f"{expense.num_devices} devices in launches of {duration(expense.launch_s)}"


def _payback_words(expense: SearchExpense, winner: Plan | None) -> str:
    if winner is not None and winner.is_other_model:
        return NO_PAYBACK
    num = expense.payback_iterations
    return "" if num is None else f"paid back after {num:,} iterations of training"
