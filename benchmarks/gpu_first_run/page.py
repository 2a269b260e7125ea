"""The readable page of a first run: a row a step, then what each of them found."""

from collections.abc import Mapping
from typing import Any


def page(result: Mapping[str, Any]) -> str:
    """The page in Markdown, of the steps that are known so far."""
    steps = result["steps"]
    rows = [
        f"| {name} | {step['state']} | {step['wall_s']:.0f} | {step['must_hold']} |"
        for name, step in steps.items()
    ]
    lines = [
        f"# First run on {result['device_name']}",
        "",
        f"{result['started']}, {result['wall_s']:.0f} s of {result['limit_s']:.0f} s, "
        f"device `{result['device']}`.",
        "",
        "| step | state | seconds | what must hold |",
        "|---|---|---|---|",
        *rows,
    ]
    for name, step in steps.items():
        lines += ["", f"## {name}: {step['state']}", ""]
        if step["reason"]:
            lines.append(step["reason"])
        lines += [f"- {key}: {_shown(value)}" for key, value in step["found"].items()]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return "; ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return " ".join(str(value).split())[:400]
