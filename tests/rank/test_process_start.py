"""The process-start hook: which processes it takes for a training, and what it leaves alone."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.schema import dump
from quartet_plugin.protocol.environment import START
from quartet_plugin.protocol.training_start import (
    STARTS_FOLDER,
    ProcessStart,
    absence_of,
    fault_of,
    read_starts,
    words_of,
)
from quartet_plugin.rank.process_start import is_launcher, launch_of, program_index, ranks_of, wrapped
from quartet_plugin.rank.rendezvous import RankEnv
from tests.rank.hooked import environment, make_site, start_file


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, ("RANK", 3, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("RANK", 0, 1)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, ("SLURM_PROCID", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, ("OMPI_COMM_WORLD_RANK", 1, 8)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, ("PMI_RANK", 5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (None, 0, 1)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, (None, 0, 1)),
        ({"RANK": "$(reboot)", "WORLD_SIZE": "4"}, (None, 0, 1)),
        ({"RANK": "1"}, (None, 0, 1)),
        ({}, (None, 0, 1)),
    ],
)
def test_ranks_of_every_starter(environment: dict[str, str], expected: tuple[str | None, int, int]) -> None:
    assert ranks_of(environment) == expected
    env = RankEnv.of(environment)
    assert (env.launch_rank, env.world_size) == expected[1:]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}, "7-3-"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "host@1"}, "host@1"),
        ({"RANK": "3", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, ""),
        ({}, ""),
    ],
)
def test_the_launch_of_every_starter(environment: dict[str, str], expected: str) -> None:
    assert launch_of(environment) == expected
    assert RankEnv.of(environment).launch == expected


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("python train.py --a", "train.py"),
        ("python -u -W ignore -X dev train.py -c 3", "train.py"),
        ("python -Werror -um pkg.train --a", "pkg.train"),
        ("python --check-hash-based-pycs always -m pkg", "pkg"),
        ("python -c pass", None),
        ("python -uc pass", None),
        ("python -", None),
        ("python -m", None),
        ("python", None),
    ],
)
def test_the_program_of_a_command_line(line: str, program: str | None) -> None:
    argv = line.split()
    index = program_index(argv)
    assert (None if index is None else argv[index]) == program


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("python /a/bin/torchrun train.py", True),
        ("python -m torch.distributed.run train.py", True),
        ("python -um torch.distributed.launch train.py", True),
        ("python /a/bin/accelerate launch train.py", True),
        ("python -m accelerate.commands.launch train.py", True),
        ("python /a/bin/ft_launcher train.py", True),
        ("python -u -m deepspeed.launcher.launch train.py", True),
        ("python torch.distributed.run", False),
        ("python train.py torchrun", False),
        ("python -m train", False),
    ],
)
def test_launchers_are_no_trainings(line: str, is_one: bool) -> None:
    argv = line.split()
    index = program_index(argv)
    assert index is not None
    assert is_launcher(argv, index) is is_one


def test_the_entry_goes_before_the_program_and_the_flags_before_a_double_dash() -> None:
    flags = ["--quartet-plan", "/a b/$(touch x);.json"]
    adapter = "quartet_plugin.megatron"
    assert wrapped(["python", "-u", "train.py", "--lr", "1"], adapter=adapter, flags=flags) == [
        sys.executable, "-u", "-m", adapter, "train.py", "--lr", "1", *flags,
    ]  # fmt: skip
    assert wrapped(["python", "-m", "pkg", "a", "--", "b"], adapter=adapter, flags=flags) == [
        sys.executable, "-m", adapter, "-m", "pkg", "a", *flags, "--", "b",
    ]  # fmt: skip


def start_of(**changes: Any) -> ProcessStart:
    values: dict[str, Any] = {
        "pid": 10,
        "host": "h",
        "argv": ("python", "-u", "train.py", "--lr", "1", "--tp", "2"),
        "cwd": "/",
        "framework": "Megatron",
        "ranks_from": "RANK",
        "rank": 0,
        "world_size": 2,
    }
    return ProcessStart(**{**values, **changes})


def test_one_training_is_described() -> None:
    starts = [start_of(), start_of(pid=11, rank=1)]
    assert fault_of(starts) is None
    assert words_of(starts) == "found -u train.py: Megatron, 2 processes, ranks from RANK, 2 flags"
    assert words_of([start_of(framework=None)]) is None


def test_what_is_not_one_training_is_refused_with_what_was_seen() -> None:
    twice = fault_of([start_of(), start_of(pid=11)])
    assert twice is not None
    assert "two trainings" in twice
    assert "process 10 (-u train.py) and process 11" in twice
    restarted = [start_of(), start_of(pid=11, restart=1)]
    assert fault_of(restarted) is None
    changed = fault_of([start_of(), start_of(pid=11, rank=1, world_size=4)])
    assert changed is not None
    assert "of 2 and of 4 ranks" in changed
    assert "was started; install it" in absence_of([])
    assert "(-u train.py)" in absence_of([start_of(framework=None)])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return make_site(tmp_path)


def run(site: Path, words: list[str], more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=environment(site, **more),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=site.parent,
    )


SHOW = "import sys; print(sys.argv, sorted(n for n in sys.modules if n.startswith('quartet')))"


def test_without_its_variable_it_imports_and_prints_nothing(site: Path) -> None:
    done = run(site, ["-c", SHOW], {"RANK": "0", "WORLD_SIZE": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "['-c'] []\n"


@pytest.mark.parametrize("value", ["", "/nonexistent/start.json", "$(touch hostile)", "a\nb"])
def test_a_bad_variable_disturbs_no_process(site: Path, value: str) -> None:
    script = site.parent / "helper.py"
    script.write_text("print('done')\n")
    done = run(site, [str(script)], {START: value})
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
    assert not (site.parent / "hostile").exists()


@pytest.mark.parametrize(
    ("module", "ranks", "adapter"),
    [
        ("megatron.training", {"RANK": "1", "WORLD_SIZE": "2"}, "quartet_plugin.megatron"),
        ("megatron.training", {}, "quartet_plugin.megatron"),
        ("deepspeed", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "quartet_plugin.deepspeed"),
    ],
)
def test_a_training_becomes_the_entry_with_its_own_words(
    site: Path, module: str, ranks: dict[str, str], adapter: str
) -> None:
    name = "train $(touch hostile); 'x'.py"
    (site.parent / name).write_text(f"print('begun')\nimport {module}\nprint('trained')\n")
    words = [name, "--name", "`touch hostile`"]
    start = start_file(site.parent / "attempt", "--quartet-trial", "t.json")
    done = run(site, ["-u", *words], {**ranks, START: str(start)})
    starts = read_starts(start.parent)
    assert [s.framework for s in starts] == ["DeepSpeed" if module == "deepspeed" else "Megatron"]
    assert starts[0].argv[1:] == ("-u", *words)
    assert "begun" in done.stdout
    # The real entry then refuses the trial.json that is not there: it has begun, and nothing was trained.
    assert "t.json" in done.stderr
    assert "trained" not in done.stdout
    assert not (site.parent / "hostile").exists()


@pytest.mark.parametrize("words", [["-m", "deepspeed.launcher.x"], ["look.py"]])
def test_a_process_that_only_looks_for_a_framework_goes_on(site: Path, words: list[str]) -> None:
    text = (
        "import importlib.util as u\nprint(u.find_spec('deepspeed') is not None, u.find_spec('json').name)\n"
    )
    (site.parent / "look.py").write_text(text)
    (site / "deepspeed" / "launcher").mkdir()
    (site / "deepspeed" / "launcher" / "__init__.py").write_text("")
    (site / "deepspeed" / "launcher" / "x.py").write_text(text)
    start = start_file(site.parent / "attempt")
    done = run(site, words, {START: str(start), "RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("True json\n")
    assert [s.framework for s in read_starts(start.parent)] == [None]


def test_the_second_process_of_a_rank_does_not_train(site: Path) -> None:
    start = start_file(site.parent / "attempt")
    (start.parent / "trial.json").write_text("{}")
    record = dump(start_of(pid=2**30, world_size=1))
    (start.parent / STARTS_FOLDER / "h-1.json").write_text(json.dumps(record))
    (site.parent / "train.py").write_text("import megatron.training\nprint('trained')\n")
    done = run(site, ["train.py"], {START: str(start), "RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 2
    assert "trained" not in done.stdout
    assert f"process {2**30} is the same rank of another training" in done.stderr
    fault = fault_of(read_starts(start.parent))
    assert fault is not None
    assert "two trainings" in fault
