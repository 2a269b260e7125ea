"""A schedule in the CSV that `torch.distributed.pipelining` loads as "compute_only".

One row a device, its actions in order, as text: `0F0,0F1,0B0`. PyTorch writes idle steps as empty cells;
the parser skips them, the printer writes none. The placement follows from the rows; what a CSV cannot hold
(layers a stage, origin) is not kept.
"""

from quartet_plugin.errors import PlanError
from quartet_plugin.schedule.action import MAX_ACTIONS, MAX_MICROBATCHES, MAX_STAGES, Action
from quartet_plugin.schedule.files import order_texts
from quartet_plugin.schedule.schedule import Schedule
from quartet_plugin.schedule.validate import validate


def to_csv(schedule: Schedule) -> str:
    """One line a device. Raises PlanError for a schedule with two copies of the model."""
    if schedule.routes is not None:
        raise PlanError(
            "routes: a CSV has one device a stage; a schedule with two copies cannot be written as one"
        )
    rows = (order_texts(order, num_microbatches=schedule.num_microbatches) for order in schedule.orders)
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(text: str) -> Schedule:
    """The exact inverse of `to_csv` for orders and placement.

    Raises PlanError for a text that is no complete schedule which can run: unknown actions, a stage on two
    rows or missing, actions missing, doubled or in an order that deadlocks.
    """
    rows = [_parse_row(number, line) for number, line in enumerate(text.splitlines())]
    if not any(rows):
        raise PlanError("the CSV holds no action; write one row of actions a device")
    if sum(map(len, rows)) > MAX_ACTIONS:
        raise PlanError(f"the CSV holds over {MAX_ACTIONS} actions; split the step")
    device_of: dict[int, int] = {}
    for device, row in enumerate(rows):
        for action in row:
            if device_of.setdefault(action.stage, device) != device:
                raise PlanError(
                    f"{action} in row {device}: stage {action.stage} is already in row "
                    f"{device_of[action.stage]}; keep a stage on one device"
                )
    missing = next((s for s in range(len(device_of)) if s not in device_of), None)
    if missing is not None:
        raise PlanError(f"stage {missing} has no action; number the stages from 0 without a gap")
    schedule = Schedule.of_actions(
        rows,
        num_microbatches=1 + max(action.microbatch for row in rows for action in row),
        placement=[device_of[stage] for stage in range(len(device_of))],
    )
    validate(schedule)
    return schedule


def _parse_row(number: int, line: str) -> list[Action]:
    actions = []
    for column, cell in enumerate(line.split(",")):
        if not cell:
            continue
        try:
            action = Action.parse(cell)
        except PlanError as error:
            raise PlanError(f"row {number}, column {column}: {error}") from None
        if action.stage >= MAX_STAGES or action.microbatch >= MAX_MICROBATCHES:
            raise PlanError(
                f"row {number}, column {column}: {action} is beyond {MAX_STAGES} stages "
                f"or {MAX_MICROBATCHES} microbatches"
            )
        actions.append(action)
    return actions
