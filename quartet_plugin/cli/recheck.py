"""`quartet recheck`: may a plan still be used here, after an upgrade of Megatron or torch?"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from quartet_plugin.cli.command import PlanFile
from quartet_plugin.cli.output import show
from quartet_plugin.errors import InfrastructureError, PlanError, SeamError

_MODULE = "quartet_plugin.megatron.recheck"


def recheck_command(plan: PlanFile) -> None:
    """After an upgrade: is Megatron, where the plugin takes hold of it, still as the plan needs it?"""
    from quartet_plugin.cli.train import framework_version
    from quartet_plugin.model.frameworks import capabilities
    from quartet_plugin.model.plan import read_plan
    from quartet_plugin.model.receipt import needs_receipt, require_receipt

    content = read_plan(plan)
    made_for = content.made_for
    if not capabilities(made_for.framework).has_recheck:
        raise PlanError(f"{plan}: made for {made_for.framework}; only Megatron's seams are rechecked")
    needs_runtime = needs_receipt(content)
    report = _report(with_runtime=needs_runtime)
    fault = fault_of(report)
    if fault is not None:
        raise SeamError(fault)
    lines = [f"{len(report['seams'])} seams: as known"]
    here = report["framework_version"]
    if here != made_for.framework_version:
        raise PlanError(
            f"{plan}: made for megatron-core {made_for.framework_version}, here is {here}: its seams "
            "are as known, what was measured is not; make a plan with `quartet tune`"
        )
    lines.append(f"megatron-core {here}: the plan's own")
    if needs_runtime:
        receipt = require_receipt(content, path=plan, torch_version=framework_version("torch"))
        lines.append(f"parity receipt: passed over {len(receipt.steps)} steps with these versions")
    show(*lines)


def fault_of(report: dict[str, Any]) -> str | None:
    """The first fault in a report on this Megatron, in one line; None where every seam is as known."""
    faults = [item["fault"] for item in report["seams"] if item["fault"] is not None]
    if report["fault"] is None:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        return f"{faults[0]}{more}" if faults else None
    if not faults:
        return str(report["fault"])
    return f"{report['fault']}; {len(faults)} of {len(report['seams'])} seams differ, the first: {faults[0]}"


def _report(*, with_runtime: bool) -> dict[str, Any]:
    """A report on this Megatron's seams, made in another process, which may import torch."""
    from quartet_plugin.model.files import read_json

    with tempfile.TemporaryDirectory(prefix="quartet-") as folder:
        target = Path(folder, "report.json")
        done = subprocess.run(
            [sys.executable, "-m", _MODULE, str(target), "runtime" if with_runtime else "flags"],
            capture_output=True,
            text=True,
            check=False,
        )
        if not target.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise InfrastructureError(f"Megatron cannot be looked at: {last}")
        content: dict[str, Any] = read_json(target)
        return content
