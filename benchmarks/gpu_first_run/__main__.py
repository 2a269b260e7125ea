"""The first run on a machine with a GPU: `python -m benchmarks.gpu_first_run [--output FOLDER]`.

Runs each step of `steps.py` in a process of its own, within ten minutes altogether, and writes what it found
as soon as it is known: FOLDER/first-run.json for the cost model, FOLDER/first-run.md to read. Steps that the
device cannot do, or for which no time is left, are named as left out. On a machine without a GPU it runs on
the CPU device. Exits 0 where every step that ran holds, else 1.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_first_run.page import page
from benchmarks.gpu_first_run.steps import STEPS, Device, Step
from quartet_plugin.launchers.local import resolve_device
from quartet_plugin.model.files import write_json_atomic, write_text_atomic

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 600.0
_MAX_TEXT = 2_000
# For a step to end its own processes, at its limit.
_END_S = 20.0


def main() -> int:
    """Run the steps; 1 where one of them does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("first-run"), metavar="FOLDER")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="limit on the whole run")
    parser.add_argument("--brief", action="store_true", help="the short steps alone")
    options = parser.parse_args()
    device = resolve_device(options.device, environment=os.environ)
    options.output.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    result: dict[str, Any] = {
        "schema_version": 1,
        "device": device,
        "device_name": device,
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "limit_s": options.seconds,
        "wall_s": 0.0,
        "steps": {},
    }
    for step in STEPS:
        left_s = options.seconds - (time.monotonic() - begin)
        reason = left_out(step, device=device, left_s=left_s, is_brief=options.brief)
        if reason is not None:
            entry = _entry(step, state="left out", reason=reason)
        else:
            print(f"{step.name} (at most {min(step.limit_s, left_s):.0f} s) ...", flush=True)
            entry = run(step, device=device, folder=options.output / step.name, left_s=left_s)
        result["steps"][step.name] = entry
        result["device_name"] = result["steps"]["versions"]["found"].get("device", device)
        result["wall_s"] = time.monotonic() - begin
        print(f"{step.name}: {entry['state']}{' - ' * bool(entry['reason'])}{entry['reason']}", flush=True)
        write_json_atomic(options.output / "first-run.json", result)
        write_text_atomic(options.output / "first-run.md", page(result))
    states = [entry["state"] for entry in result["steps"].values()]
    num_run = len(states) - states.count("left out")
    target, unfinished = options.output / "first-run.md", _unfinished(result["steps"])
    print(f"{target}: {num_run} of {len(states)} steps ran{unfinished}")
    return int(any(state not in ("holds", "left out") for state in states))


def left_out(step: Step, *, device: Device, left_s: float, is_brief: bool) -> str | None:
    """Why a step is not begun; None where it is."""
    if device not in step.devices:
        return "needs a GPU"
    if is_brief and not step.is_brief:
        return "not one of the short steps"
    least_s = step.least_s[device == "cpu"]
    return f"needs {least_s:.0f} s, {max(0.0, left_s):.0f} s are left" if left_s < least_s else None


def run(step: Step, *, device: Device, folder: Path, left_s: float) -> dict[str, Any]:
    """Run a step in a process group of its own, and end the group at the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "found.json"
    target.unlink(missing_ok=True)
    limit_s = max(1.0, min(step.limit_s, left_s - _END_S))
    words = [
        sys.executable,
        "-m",
        "benchmarks.gpu_first_run.measure",
        step.name,
        device,
        str(folder.resolve()),
    ]
    begin = time.monotonic()
    paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(paths)}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_take_interrupts,
        )
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
            # quartet ends its trial, whose processes are a group of their own.
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_END_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(target.read_text()) if target.exists() else {}
    entry = _entry(step, state="holds", wall_s=time.monotonic() - begin, found=found)
    faults = entry["found"].pop("faults", [])
    if code is None:
        entry |= {"state": "out of time", "reason": f"ended after {limit_s:.0f} s"}
    elif code != 0:
        entry |= {"state": "failed", "reason": _last_line(folder / "output.txt")}
    elif faults:
        entry |= {"state": "does not hold", "reason": "; ".join(faults)}
    return entry


def _unfinished(steps: dict[str, Any]) -> str:
    """The steps without a whole result, by what became of them."""
    named: dict[str, list[str]] = {}
    for name, entry in steps.items():
        if entry["state"] != "holds":
            named.setdefault(entry["state"], []).append(name)
    return "".join(f"; {state}: {', '.join(names)}" for state, names in named.items())


def _take_interrupts() -> None:
    """A shell starts a command in the background with interrupts ignored, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _entry(
    step: Step, *, state: str, reason: str = "", wall_s: float = 0.0, found: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "state": state,
        "reason": reason,
        "wall_s": wall_s,
        "must_hold": step.holds,
        "found": found or {},
    }


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:_MAX_TEXT] if lines else "no output"


if __name__ == "__main__":
    raise SystemExit(main())
