"""`quartet check`: does a plan train as stock does? Writes the receipt that `quartet train` asks for."""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import DeviceName, check_range, check_seconds, user_command
from quartet_plugin.cli.output import show
from quartet_plugin.errors import PlanError, StorageError

if TYPE_CHECKING:
    from quartet_plugin.model.receipt import Receipt
    from quartet_plugin.trial.request import Progress

_MAX_STEPS = 1_000


def check_command(
    ctx: typer.Context,
    plan: Annotated[Path, typer.Argument(help="The plan to check.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 5,
    device: DeviceName = "auto",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Where weights and logs go; all nodes must see it. Default: PLAN.parity beside the plan."
        ),
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that each of the runs may take.")] = 600.0,
) -> None:
    """Compare loss and gradient norm of a plan with stock, from the same weights, on the same data."""
    from quartet_plugin.cli.signals import ended_as_by_ctrl_c
    from quartet_plugin.cli.train import check_before_start
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.receipt import receipt_path, write_receipt
    from quartet_plugin.trial.parity import ParityGate

    check_range("--steps", steps, most=_MAX_STEPS)
    check_seconds("--deadline", deadline)
    words = user_command(ctx)
    content = read_plan(plan)
    training = parse_command(words)
    check_before_start(content, command=training, path=plan)
    place = folder or plan.with_name(f"{plan.name.removesuffix('.json')}.parity")
    weights = _new_folder(place)
    gate = ParityGate(
        command=training,
        folder=place,
        weights=weights,
        num_steps=steps,
        device=device,
        deadline_s=deadline,
        on_progress=_show if sys.stderr.isatty() else None,
    )
    try:
        with ended_as_by_ctrl_c():
            receipt = gate.check(content)
    finally:
        shutil.rmtree(weights, ignore_errors=True)
    target = receipt_path(plan)
    write_receipt(receipt, path=target)
    show(*lines(receipt))
    if receipt.failure is not None:
        raise PlanError(f"{plan}: does not train as stock does: {receipt.failure.reason}; logs in {place}")
    show(f"the plan trains as stock does; receipt: {target}")


def lines(receipt: "Receipt") -> list[str]:
    """A table of the steps, under the tolerances."""
    against = "the command's own configuration" if receipt.reference == "command" else "stock parallelism"
    allowed = receipt.tolerance
    header = [
        f"against {against}, {receipt.precision}; allowed: loss {allowed.loss:g}, gradient norm "
        f"{allowed.grad_norm:g} (relative)",
        f"{'step':>4}  {'loss':>14}  {'deviation':>10}  {'gradient norm':>14}  {'deviation':>10}",
    ]
    return header + [
        f"{step.step:>4}  {float(step.loss):>14.9g}  {float(step.loss_deviation):>10.2e}  "
        f"{float(step.grad_norm):>14.9g}  {float(step.grad_norm_deviation):>10.2e}"
        for step in receipt.steps
    ]


def _show(name: str, progress: "Progress") -> None:
    text = f"{name}: {progress.phase} {progress.iteration}/{progress.num_iterations}"
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def _new_folder(place: Path) -> Path:
    """A new folder for the weights alone, so that removing it can hit nothing else."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="weights-", dir=place.absolute()))
    except OSError as error:
        raise StorageError(
            f"{place}: cannot be made: {error.strerror}; name a writable place with --folder"
        ) from error
