"""`quartet check`: does a plan train as stock does? Writes the receipt that `quartet train` asks for."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet_plugin.cli.command import (
    AcceptChangedSource,
    DeviceName,
    JsonSwitch,
    check_range,
    check_seconds,
    pass_on_changed_source,
    user_command,
)
from quartet_plugin.cli.output import show
from quartet_plugin.errors import PlanError, StorageError

if TYPE_CHECKING:
    from quartet_plugin.launchers.command import Command
    from quartet_plugin.model.receipt import LayoutReference, Receipt, StepComparison
    from quartet_plugin.trial.parity import ParityGate
    from quartet_plugin.trial.request import Device, Progress

_MAX_STEPS = 1_000
STEPS = 5
_DEADLINE_S = 600.0


def check_command(
    ctx: typer.Context,
    plan: Annotated[Path, typer.Argument(help="The plan to check.", show_default=False)],
    steps: Annotated[int, typer.Option(help="Number of training steps to compare.")] = STEPS,
    device: DeviceName = "auto",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="A folder for weights and logs; all nodes on which the command itself starts processes must "
            "be able to access it. Default: PLAN.parity, beside PLAN."
        ),
    ] = None,
    deadline: Annotated[
        float,
        typer.Option(
            help="Time limit of each run, in seconds. The run that also writes the weights has more time."
        ),
    ] = _DEADLINE_S,
    accept_changed_source: AcceptChangedSource = False,
    as_json: JsonSwitch = False,
) -> None:
    """Compare the losses and gradient norms of a plan with stock, from equal weights, on equal data."""
    from quartet_plugin.cli.plan_checks import check_before_start
    from quartet_plugin.launchers.command import parse_command
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.receipt import receipt_path
    from quartet_plugin.model.schema import dump

    pass_on_changed_source(is_accepted=accept_changed_source)
    check_range("--steps", steps, most=_MAX_STEPS)
    check_seconds("--deadline", deadline)
    words = user_command(ctx)
    content = read_plan(plan)
    training = parse_command(words)
    check_before_start(content, command=training, path=plan)
    with parity_gate(
        plan, command=training, device=device, steps=steps, folder=folder, deadline_s=deadline
    ) as gate:
        receipt = gate.check(content)
    if as_json:
        typer.echo(json.dumps({"path": str(receipt_path(plan)), **dump(receipt)}, indent=1))
        keep_receipt(receipt, plan=plan, place=gate.folder)
        return
    show(*lines(receipt))
    kept = keep_receipt(receipt, plan=plan, place=gate.folder)
    show(f"passed: {receipt.agreement}; receipt {kept}")


@contextmanager
def parity_gate(
    plan: Path,
    *,
    command: "Command",
    device: "Device",
    steps: int = STEPS,
    folder: Path | None = None,
    deadline_s: float = _DEADLINE_S,
) -> "Iterator[ParityGate]":
    """The parity gate of a command for the plan of a file; the gate's weights are removed at the end.

    Without `folder` its runs go to PLAN.parity beside the plan.
    """
    from quartet_plugin.cli.signals import ended_as_by_ctrl_c
    from quartet_plugin.launchers.warm import WarmLauncher
    from quartet_plugin.trial.parity import ParityGate

    place = folder or plan.with_name(f"{plan.name.removesuffix('.json')}.parity")
    weights = _new_folder(place)
    try:
        # The reference, the plan and stock under the plan's layout share their imports.
        with ended_as_by_ctrl_c(), WarmLauncher() as launcher:
            yield ParityGate(
                launcher=launcher,
                command=command,
                folder=place,
                weights=weights,
                num_steps=steps,
                device=device,
                deadline_s=deadline_s,
                on_progress=_show if sys.stderr.isatty() else None,
            )
    finally:
        if sys.stderr.isatty():
            _show_text("", then="\r")
        shutil.rmtree(weights, ignore_errors=True)


def keep_receipt(receipt: "Receipt", *, plan: Path, place: Path) -> Path:
    """Write the receipt beside its plan, and return its file. Raises PlanError if the check failed."""
    from quartet_plugin.model.receipt import receipt_path, write_receipt

    target = receipt_path(plan)
    write_receipt(receipt, path=target)
    if receipt.failure is not None:
        raise PlanError(f"{plan}: does not train as stock does: {receipt.failure.reason}; logs in {place}")
    return target


def lines(receipt: "Receipt") -> list[str]:
    """A table of the steps, under the tolerances."""
    against = "the command's configuration" if receipt.reference == "command" else "stock parallelism"
    allowed = receipt.tolerance
    header = [
        f"against {against}, {receipt.precision}; allowed: loss {allowed.loss:g}, gradient norm "
        f"{allowed.grad_norm:g} (relative)",
        f"{'step':>4}  {'loss':>14}  {'deviation':>10}  {'gradient norm':>14}  {'deviation':>10}",
    ]
    return header + [_step_line(step) for step in receipt.steps] + _layout_lines(receipt.layout_reference)


def _step_line(step: "StepComparison") -> str:
    return (
        f"{step.step:>4}  {float(step.loss):>14.9g}  {float(step.loss_deviation):>10.2e}  "
        f"{float(step.grad_norm):>14.9g}  {float(step.grad_norm_deviation):>10.2e}"
    )


def _layout_lines(reference: "LayoutReference | None") -> list[str]:
    """The comparison with stock under the plan's layout, if the command's layout rounds differently."""
    if reference is None:
        return []
    allowed = reference.tolerance
    loss, norm = float(reference.loss_rounding), float(reference.grad_norm_rounding)
    return [
        f"{reference.layout} rounds otherwise: under it stock's loss differs from the command's by "
        f"{loss:.1e}, its gradient norm by {norm:.1e}",
        f"against stock under {reference.layout}; allowed: loss {allowed.loss:g}, gradient norm "
        f"{allowed.grad_norm:g} (relative)",
        *(_step_line(step) for step in reference.steps),
    ]


def _show(name: str, progress: "Progress") -> None:
    _show_text(f"{name}: {progress.phase} {progress.iteration}/{progress.num_iterations}")


def _show_text(text: str, *, then: str = "") -> None:
    """Write a text over the line of progress."""
    print(f"\r{text:<60}", end=then, file=sys.stderr, flush=True)


def _new_folder(place: Path) -> Path:
    """A new folder for the weights only, so that removing it cannot delete other files."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="weights-", dir=place.absolute()))
    except OSError as error:
        raise StorageError(
            f"{place}: cannot be created: {error.strerror}; name a writable place with --folder"
        ) from error
