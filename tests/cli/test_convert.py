"""`quartet convert`: what it asks for before anything starts, and what it leaves behind."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli import train as train_command
from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.conversion import FORMAT, TRACKER, Conversion
from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.schema import read_record
from quartet_plugin.protocol.environment import CONVERSION_FILE
from tests.model.plans import PLAN

COMMAND = ("--", "torchrun", "--nproc-per-node", "2", "train.py")


def saved(folder: Path, *, step: int = 3) -> Path:
    """What --save leaves, as far as it is looked at before a start."""
    place = folder / "ckpt"
    (place / f"iter_{step:07d}").mkdir(parents=True)
    (place / f"iter_{step:07d}" / "metadata.json").write_text("{}")
    (place / TRACKER).write_text(str(step))
    return place


class Ranks:
    """In place of the processes: notes what they were told, and saves unless told not to."""

    def __init__(self, *, code: int = 0, saves: bool = True) -> None:
        self.told: list[Conversion] = []
        self.flags: list[list[str]] = []
        self._code, self._saves = code, saves

    def __call__(self, command: Any, *, flags: list[str], device: str, environment: Mapping[str, str]) -> int:
        conversion = read_record(Conversion, Path(environment[CONVERSION_FILE]))
        self.told.append(conversion)
        self.flags.append(flags)
        if self._saves:
            (Path(conversion.save) / FORMAT).mkdir()
            (Path(conversion.save) / FORMAT / TRACKER).write_text("3")
        return self._code


def test_the_new_folder_is_there_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr(train_command, "run_wrapped", ranks)
    source, new, plan = saved(tmp_path), tmp_path / "deep" / "new", tmp_path / "plan.json"
    write_plan(PLAN, path=plan)
    words = ["convert", str(source), "-o", str(new), "--to", str(plan), "--device", "cpu", *COMMAND]
    assert main(words) == 0
    assert (new / TRACKER).read_text() == "3"
    assert [path.name for path in new.parent.iterdir()] == ["new"]
    assert ranks.told[0].load == str(source)
    assert (ranks.told[0].step, ranks.told[0].is_weights_only) == (None, False)
    assert ranks.flags == [["--quartet-device", "cpu", "--quartet-plan", str(plan)]]


def test_one_iteration_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    monkeypatch.setattr(train_command, "run_wrapped", ranks)
    source = saved(tmp_path, step=7)
    words = ["convert", str(source / "iter_0000007"), "-o", str(tmp_path / "new"), "--to", "stock"]
    assert main([*words, "--weights-only", *COMMAND]) == 0
    assert ranks.told[0].load == str(source)
    assert (ranks.told[0].step, ranks.told[0].is_weights_only) == (7, True)
    assert ranks.flags == [[]]


@pytest.mark.parametrize(("ranks", "code"), [(Ranks(code=130), 130), (Ranks(saves=False), 5)])
def test_half_a_checkpoint_is_not_left(
    ranks: Ranks, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_command, "run_wrapped", ranks)
    source, new = saved(tmp_path), tmp_path / "new"
    assert main(["convert", str(source), "-o", str(new), "--to", "stock", *COMMAND]) == code
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_what_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan = saved(tmp_path), tmp_path / "plan.json"
    write_plan(PLAN, path=plan)
    new = str(tmp_path / "new")
    one_process = ("--", "python", "train.py")
    ds = ("--", "deepspeed", "--num_gpus", "2", "train.py")
    for words, what in (
        ((str(tmp_path), "-o", new, "--to", "stock", *COMMAND), "not a checkpoint of Megatron"),
        (
            (str(source / "iter_0000009"), "-o", new, "--to", "stock", *COMMAND),
            "not a checkpoint of Megatron",
        ),
        ((str(source), "-o", str(source), "--to", "stock", *COMMAND), "exists; name a new folder"),
        ((str(source), "-o", new, "--to", str(plan), *one_process), "made for 2 processes"),
        ((str(source), "-o", new, "--to", "stock", *ds), "not DeepSpeed's or Megatron-Bridge's"),
        ((str(source), "-o", new, "--to", "stock", "--device", "tpu", *COMMAND), "--device tpu"),
    ):
        assert main(["convert", *words]) == 2
        shown = capsys.readouterr().err
        assert what in shown
        assert shown.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "plan.json"]


@pytest.mark.parametrize(
    "change",
    [{"load": "relative"}, {"step": -1}, {"step": True}, {"save": 3}, {"schema_version": 2}, {"more": 1}],
)
def test_what_the_ranks_are_told_is_checked(change: dict[str, Any], tmp_path: Path) -> None:
    content = {"schema_version": 1, "load": "/a", "save": "/b", "step": None, "is_weights_only": False}
    (tmp_path / "conversion.json").write_text(json.dumps(content))
    assert read_record(Conversion, tmp_path / "conversion.json").load == "/a"
    (tmp_path / "conversion.json").write_text(json.dumps(content | change))
    with pytest.raises(ConfigError):
        read_record(Conversion, tmp_path / "conversion.json")
