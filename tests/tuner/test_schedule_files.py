"""`search.schedule` with a file: refused before a launch where the flags tell, offered, measured and kept."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.files import read_json
from quartet_plugin.schedule.files import read_schedule
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.run_folder import RunFolder
from quartet_plugin.tuner.schedule_files import (
    check_schedule_files,
    keep_schedule_files,
    kept_schedules,
    schedule_files_of,
)
from tests.space.jobs import make_job, make_layout
from tests.space.test_written_schedules import NAME, by_hand, edited, saved
from tests.tuner.fakes import FakeMachine, tune
from tests.tuner.fakes import begin_with_journal as begin

COMMAND = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 8 --micro-batch-size 8 --global-batch-size 32"
)


def search_of(**search: Any) -> Any:
    return parse_config({"search": search}, where="test").search


def check(folder: Path, command: str = COMMAND, **search: Any) -> None:
    search = {"schedule": ["1f1b", NAME], **search}
    check_schedule_files(search_of(**search), command=parse_command(command.split()), cwd=folder)


def test_a_schedule_is_a_name_or_a_file() -> None:
    assert search_of(schedule="a/b.json").schedule == ("a/b.json",)
    for wrong in ("a/b.csv", "zb-w", 3):
        with pytest.raises(ConfigError, match=r"search\.schedule"):
            search_of(schedule=wrong)
    with pytest.raises(ConfigError, match=r"search\.forbid"):
        search_of(forbid={"schedule": NAME})


def test_two_files_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"mine\.json: two files of this name"):
        schedule_files_of(search_of(schedule=["a/mine.json", "b/mine.json"]), cwd=Path())


@pytest.mark.parametrize(
    ("command", "search", "words"),
    [
        (
            COMMAND.replace("--num-layers 8", "--num-layers 9"),
            {},
            "layers_per_stage: sums to 10; must be the 9",
        ),
        (COMMAND.replace("node 2", "node 3"), {}, "num_devices: 2; must divide the 3 processes"),
        (
            COMMAND.replace("size 32", "size 6"),
            {},
            "num_microbatches: 4; must divide the command's global batch",
        ),
        (COMMAND, {"pipeline_parallel": 1}, "num_devices: 2; must be one of search.pipeline_parallel, 1"),
        (COMMAND, {"virtual_stages": [1, 4]}, "placement: 2 a device; must be one of search.virtual_stages"),
    ],
)
def test_what_the_flags_tell_is_refused_before_a_launch(
    tmp_path: Path, command: str, search: dict[str, Any], words: str
) -> None:
    saved(tmp_path)
    check(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, command, **search)
    assert str(caught.value).startswith(f"search.schedule: {NAME}: {words}")


def test_the_command_refuses_it_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path)
    Path("q.yaml").write_text(f"search: {{schedule: {NAME}}}")
    words = ["tune", "--config", "q.yaml", "--", "python", "-m", "torch.distributed.run", "--nproc-per-node"]
    assert main([*words, "2", __file__, "--num-layers", "7"]) == 2
    assert "layers_per_stage: sums to 10; must be the 7 layers" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_file_is_measured_behind_the_gate_and_a_resumed_run_reads_its_copy(tmp_path: Path) -> None:
    path = saved(tmp_path, edited(by_hand()))
    machine = FakeMachine(job=make_job(layout=make_layout(micro_batch_size=8)))
    run = begin(tmp_path / "r", search={"schedule": NAME, "mapping": "stock"}, study={"trials": 2})
    keep_schedule_files(run.config.search, cwd=tmp_path, folder=run.folder)
    expected = read_schedule(path)
    path.unlink()
    assert read_json(run.folder.schedules / NAME)["num_microbatches"] == 4
    result = tune(run, machine)
    plans = [trial.plan for trial in result.trials[1:] if trial.record.verdict == "measured"]
    assert {plan.split.transformer_layers_per_stage for plan in plans} == {(3, 1, 2, 2)}
    assert [plan.key for plan in machine.checked] == [plans[0].key]
    custom = plans[0].schedule.custom
    assert custom is not None
    assert custom.orders is not None
    assert [len(row) for row in custom.orders] == [len(order) for order in expected.orders]


def test_a_run_without_files_keeps_none(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    keep_schedule_files(search_of(), cwd=tmp_path, folder=folder)
    assert kept_schedules(search_of(schedule="1f1b"), folder=folder) == {}
    assert not folder.schedules.exists()
