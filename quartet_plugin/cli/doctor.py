"""`quartet doctor`: what can be tuned with the framework here, axis by axis, before anything starts."""

import socket
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quartet_plugin.cli.command import PlanFile
from quartet_plugin.cli.output import show
from quartet_plugin.errors import InfrastructureError, PlanError, SeamError, UsageError

if TYPE_CHECKING:
    from quartet_plugin.model.plan import Plan

_MODULE = "quartet_plugin.megatron.doctor"
_CUSTOM_SCHEDULES = "custom_schedules"
_SHOWN_FUNCTIONS = 40


class ReportFormat(StrEnum):
    """The output formats of the report."""

    TEXT = "text"
    JSON = "json"


def doctor_command(
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Tell whether this plan can be used here.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="WHEEL|TREE",
            help="Show the differences of changed functions from those of another Megatron.",
        ),
    ] = None,
    form: Annotated[
        ReportFormat, typer.Option("-f", "--format", help="Print lines, or one JSON object.")
    ] = ReportFormat.TEXT,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes", help="Check the devices, links, ports, clocks, disks and limits of every node."
        ),
    ] = False,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="With --nodes: the launcher that reaches the nodes. Default: this allocation of Slurm."
        ),
    ] = None,
    trial_nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --nodes: the number of nodes to check. Default: all that the launcher knows."
        ),
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --nodes: the site.yaml, which has the cluster's settings for every job.",
        ),
    ] = None,
) -> None:
    """Tell which axes can be tuned with the installed Megatron, and why others cannot; launch nothing."""
    if against is not None and not against.exists():
        raise PlanError(f"--against {against}: there is no such file or folder")
    if plan is not None:
        others: dict[str, object] = {
            "--against": against,
            "--nodes": nodes,
            "--launcher": launcher,
            "--site": site,
            "--trial-nodes": trial_nodes,
            "-f": form is not ReportFormat.TEXT,
        }
        given = next((name for name, value in others.items() if value), None)
        if given is not None:
            raise UsageError(f"quartet doctor: {given} does not go with --plan; leave one of the two out")
        recheck_command(plan)
        return
    if nodes and against is not None:
        raise UsageError("quartet doctor: --nodes and --against are two checks; give only one")
    if nodes:
        _doctor_nodes(launcher=launcher, site=site, trial_nodes=trial_nodes, form=form)
        return
    if (launcher, site, trial_nodes) != (None, None, None):
        raise UsageError(
            "quartet doctor: --launcher, --site and --trial-nodes work only with --nodes; add it"
        )
    report = _report(against)
    _show_report(report, form)
    if report["fault"] is not None:
        raise SeamError(report["fault"])


def _doctor_nodes(
    *, launcher: str | None, site: Path | None, trial_nodes: int | None, form: ReportFormat
) -> None:
    """Show what the nodes and the framework have. Raises InfrastructureError where a check failed."""
    from quartet_plugin.cli.doctor_nodes import node_rows
    from quartet_plugin.report.node_checks import CheckRow, table_lines

    rows, facts = node_rows(launcher=launcher, site=site, trial_nodes=trial_nodes)
    report = _report(None)
    changed = _faults(report)
    rows.insert(
        1,
        CheckRow(
            check="framework",
            state="fail" if report["fault"] else "warn" if changed else "ok",
            finding=report["fault"]
            or f"megatron-core {report['framework_version']}, {len(changed)} changed functions",
            fix="`quartet doctor` shows which axes this excludes" if changed and not report["fault"] else "",
        ),
    )
    if form is ReportFormat.JSON:
        import json
        from dataclasses import asdict

        content = {"schema_version": 1, "nodes": facts, "checks": [asdict(row) for row in rows]}
        typer.echo(json.dumps(content, indent=1))
    else:
        show(*table_lines(rows))
    failed = [row.check for row in rows if row.state == "fail"]
    if failed:
        raise InfrastructureError(f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)}")


def recheck_command(plan: PlanFile) -> None:
    """Tell whether a plan can still be used after an upgrade; an alias of `quartet doctor --plan PLAN`."""
    from quartet_plugin.model.frameworks import capabilities
    from quartet_plugin.model.plan import read_plan

    content = read_plan(plan)
    if not capabilities(content.made_for.framework).has_recheck:
        raise PlanError(
            f"{plan}: made for {content.made_for.framework}; only Megatron's functions are rechecked"
        )
    show(*_plan_lines(content, path=plan, report=_report(None)))


def _plan_lines(plan: "Plan", *, path: Path, report: dict[str, Any]) -> list[str]:
    """Why the plan can be used here. Raises SeamError or PlanError if it cannot."""
    from quartet_plugin.cli.plan_checks import framework_version
    from quartet_plugin.model.receipt import needs_receipt, needs_runtime, require_receipt

    if report["fault"] is not None:
        raise SeamError(report["fault"])
    has_schedule = needs_runtime(plan)
    custom = next(row for row in report["axes"] if row["axis"] == _CUSTOM_SCHEDULES)
    faults = _faults(report)
    if has_schedule and custom["state"] != "works":
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise SeamError(
            f"{path}: its schedule cannot run here: {faults[0]}{more}; {_difference_command(report)}"
        )
    here, made_for = report["framework_version"], plan.made_for
    if here != made_for.framework_version:
        raise PlanError(
            f"{path}: made for megatron-core {made_for.framework_version}, here is {here}: what was measured "
            "is of another release; make a plan with `quartet tune`"
        )
    level = (
        "a custom schedule; every function that it replaces is unchanged"
        if has_schedule
        else ("native flags, which this Megatron has")
    )
    lines = [f"megatron-core {here}: the plan's own", f"the plan needs {level}"]
    if needs_receipt(plan):
        receipt = require_receipt(plan, path=path, torch_version=framework_version("torch"))
        lines.append(f"parity receipt: passed over {len(receipt.steps)} steps with these versions")
    return lines


def _show_report(report: dict[str, Any], form: ReportFormat) -> None:
    if form is ReportFormat.JSON:
        import json

        # Nodes of a cluster stand beside this one.
        nodes = [{"host": socket.gethostname(), "frameworks": [report]}]
        typer.echo(json.dumps({"schema_version": 1, "nodes": nodes}, indent=1))
        return
    if report["framework_version"] is None:
        return
    faults = _faults(report)
    show(
        f"framework  megatron-core {report['framework_version']} in {report['folder']}",
        f"functions  {len(report['functions'])}, {len(faults)} of them changed; the nearest known release is "
        f"{report['nearest']}",
        *(f"{row['axis']:17} {row['state']:6} {row['reason']}" for row in report["axes"]),
    )
    if faults:
        show("", *faults[:_SHOWN_FUNCTIONS], _difference_command(report))
    for text in report.get("differences", {}).values():
        show("", *text.splitlines())


def _faults(report: dict[str, Any]) -> list[str]:
    return [item["fault"] for item in report["functions"] if item["fault"] is not None]


def _difference_command(report: dict[str, Any]) -> str:
    release = report["nearest"]
    return (
        f"to see the difference: pip download --no-deps megatron-core=={release} && "
        f"quartet doctor --against megatron_core-{release}-*.whl"
    )


def _report(against: Path | None) -> dict[str, Any]:
    """A report on the installed Megatron, from a separate process, which may import torch."""
    from quartet_plugin.model.files import read_json

    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        target = Path(folder, "report.json")
        words = [str(target), *([] if against is None else [str(against)])]
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, *words], capture_output=True, text=True, check=False
        )
        if not target.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InfrastructureError(f"Megatron cannot be inspected: {last}")
        content: dict[str, Any] = read_json(target)
        return content
