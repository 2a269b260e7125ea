"""best/native.sh: the user's command with the plan's flags behind it, or the reason why there is none."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from quartet_plugin.cli.export import flags_of
from quartet_plugin.cli.native import native_path, native_text, write_native
from quartet_plugin.errors import PlanError
from quartet_plugin.model.plan import Mapping, Plan
from tests.model.plans import PLAN
from tests.space.jobs import make_layout
from tests.tuner.fakes import begin

STOCK = replace(PLAN, mapping=Mapping(slots=tuple(sorted(PLAN.mapping.slots))))
PROGRAM = '#!/bin/sh\npwd > seen\nprintf "%s\\n" "$@" >> seen\n'


def test_the_script_runs_the_command_with_the_plans_flags(tmp_path: Path) -> None:
    program = tmp_path / "a program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    command = (str(program), "--num-layers", "4", "--lr", "3e-4", "it's; $(touch pwned)")
    script = tmp_path / "native.sh"
    script.write_text(native_text(STOCK, command=command, cwd=tmp_path))
    subprocess.run(["sh", str(script)], check=True, cwd="/", timeout=30)
    where, *words = (tmp_path / "seen").read_text().splitlines()
    assert where == str(tmp_path)
    assert words[:5] == list(command[1:])
    rest = words[5:]
    for name, value in flags_of(STOCK).items():
        at = rest.index(name)
        assert value is True or rest[at + 1] == str(value)
    assert "--pipeline-model-parallel-layout" in rest
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("plan", "command", "says"),
    [
        (PLAN, ("torchrun", "x.py"), "orders the ranks"),
        (STOCK, ("torchrun", "x.py", "--", "more"), "a -- of its own"),
        (
            STOCK,
            ("torchrun", "x.py", "--decoder-first-pipeline-num-layers=3"),
            "does without --decoder-first",
        ),
        (
            STOCK,
            ("torchrun", "x.py", "--account_for_loss_in_pipeline_split"),
            "does without --account-for-loss",
        ),
        (
            replace(STOCK, made_for=replace(STOCK.made_for, framework="deepspeed")),
            ("deepspeed", "x.py"),
            "takes no flags",
        ),
    ],
)
def test_what_flags_cannot_say_has_no_script(plan: Plan, command: tuple[str, ...], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        native_text(plan, command=command, cwd=Path("/"))


def test_a_script_is_written_replaced_and_removed(tmp_path: Path) -> None:
    run = begin(tmp_path / "r")
    path = native_path(run.folder.path)
    path.parent.mkdir()
    assert write_native(STOCK, run=run) == f"sh {path}"
    other = replace(STOCK, layout=make_layout(micro_batch_size=8))
    write_native(other, run=run)
    assert "--micro-batch-size 8" in path.read_text()
    assert write_native(PLAN, run=run).startswith("no native.sh: the plan orders the ranks")
    assert not path.exists()
    assert write_native(None, run=run) == ""
