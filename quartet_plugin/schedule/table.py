"""Shows a schedule as a table of devices and positions; a refusal has the window round one cell."""

from collections.abc import Collection, Sequence

from quartet_plugin.errors import PlanError
from quartet_plugin.schedule.action import Action
from quartet_plugin.schedule.schedule import Schedule

Cell = tuple[int, int]

MAX_WIDTH = 110
MAX_ROWS = 17
_EMPTY = "-"


def render(
    schedule: Schedule,
    *,
    mark: Cell | None = None,
    related: Collection[Cell] = (),
    around: int = 6,
    centres: Sequence[int] | None = None,
) -> str:
    """Devices down, positions across, `around` positions each side of the marked cell.

    `mark` is (device, index in its order) and shown as `[2F0]`; an index one past the end marks the place
    of a missing action. `related` cells are shown as `(2F0)`. `centres` [num_devices] gives each row a
    window of its own, for devices that have come unequally far; the row then says where it starts. A pair
    is two cells, the first with a plus: `2F1+  2B0`.
    At most 17 devices and 110 characters a line are shown, those nearest to the mark.
    """
    marked_device, marked_index = mark if mark is not None else (0, around)
    devices = _nearest(marked_device, len(schedule.orders), MAX_ROWS)
    reach = around
    while True:
        lines = _lines(schedule, devices, mark, frozenset(related), reach, marked_index, centres)
        if reach <= 1 or max(len(line) for line in lines) <= MAX_WIDTH:
            break
        reach -= 1
    left_out = len(schedule.orders) - len(devices)
    if left_out:
        lines.append(f"({left_out} more devices)")
    return "\n".join(lines)


def refusal(
    schedule: Schedule,
    reason: str,
    *,
    mark: Cell | None,
    related: Collection[Cell] = (),
    centres: Sequence[int] | None = None,
) -> PlanError:
    """The error for a schedule that breaks a rule: a line of reason, then the table with the cell marked."""
    error = PlanError(reason)
    error.table = render(schedule, mark=mark, related=related, centres=centres)
    return error


def place(cell: Cell) -> str:
    """Words for a cell."""
    return f"device {cell[0]}, position {cell[1]}"


def _nearest(centre: int, num_positions: int, max_positions: int) -> range:
    start = max(0, min(centre - max_positions // 2, num_positions - max_positions))
    return range(start, min(num_positions, start + max_positions))


def _lines(
    schedule: Schedule,
    devices: range,
    mark: Cell | None,
    related: frozenset[Cell],
    reach: int,
    marked_index: int,
    centres: Sequence[int] | None,
) -> list[str]:
    longest = 1 + max((len(order) for order in schedule.orders), default=0)
    rows: list[list[str]] = []
    for device in devices:
        window = _nearest(marked_index if centres is None else centres[device], longest, 2 * reach + 1)
        if not rows and centres is None:
            rows.append(["position", *map(str, window)])
        label = f"device {device}" if centres is None else f"device {device} from {window.start}"
        rows.append([label, *(_cell(schedule, (device, index), mark, related) for index in window)])
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    ]


def _cell(schedule: Schedule, cell: Cell, mark: Cell | None, related: frozenset[Cell]) -> str:
    device, index = cell
    order = schedule.orders[device]
    if index < len(order):
        text = str(Action.decode(int(order[index]), schedule.num_microbatches))
        if schedule.pairs and index in schedule.pairs[device]:
            text += "+"
    else:
        text = _EMPTY if cell == mark else ""
    if cell == mark:
        return f"[{text}]"
    return f"({text})" if cell in related and text else f"{text} " if text else ""
