"""Whatever starts a training, its processes are found with their ranks, and its helpers are not."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quartet_plugin.launchers.command import parse_command
from quartet_plugin.protocol.environment import START
from quartet_plugin.protocol.training_start import read_starts
from tests.rank.hooked import assert_found, environment, make_site, start_file

RELEASES = Path(__file__).parents[2] / ".venv" / "releases"
FAKE_TORCHRUN = Path(__file__).parents[1] / "faults" / "torchrun.py"
# Stands in for mpirun and srun, which start one task a device and say its rank in variables of their own.
TASKS = """#!/bin/sh
# $1 of the number of tasks, then the command
n=$1; shift; r=0
while [ $r -lt $n ]; do env {rank}=$r {size}=$n "$@" & r=$((r+1)); done
wait
"""
# How a program is started, the processes that it has, and the variable that their ranks come from.
STARTERS: dict[str, tuple[str, int, str | None]] = {
    "bash": ("bash train.sh", 2, "RANK"),
    "function": ("bash -c 'set -e; train() {{ {torchrun} train.py --lr 1; }}; train'", 2, "RANK"),
    "make": ("make train", 2, "RANK"),
    "python launcher": ("{python} launch.py", 2, "RANK"),
    "mpirun": ("./mpirun 3 {python} train.py", 3, "OMPI_COMM_WORLD_RANK"),
    "pmi": ("./pmirun 2 {python} train.py", 2, "PMI_RANK"),
    "srun": ("./srun 2 {python} -u train.py", 2, "SLURM_PROCID"),
    "srun of torchrun": ("./srun 1 {torchrun} train.py", 2, "RANK"),
    "accelerate": ("./accelerate launch train.py --lr 1", 2, "RANK"),
    "ft_launcher": ("./ft_launcher train.py", 2, "RANK"),
    "background": ("bash -c '{torchrun} train.py & wait'", 2, "RANK"),
}
REAL = {
    "torch.distributed.run": ("{python} -m torch.distributed.run --nproc-per-node 2 train.py", 2, "RANK"),
    "torch.distributed.launch": (
        "{python} -m torch.distributed.launch --nproc-per-node 2 train.py",
        2,
        "RANK",
    ),
    "accelerate launch": (
        "{python} -m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
        "--mixed_precision no --dynamo_backend no train.py",
        2,
        "RANK",
    ),
    "ft_launcher": (
        "{python} -m nvidia_resiliency_ext.fault_tolerance.launcher --nproc-per-node 2 "
        "--rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
        2,
        "RANK",
    ),
    "mpirun": (
        "mpirun --allow-run-as-root --oversubscribe -n 2 {python} -u train.py",
        2,
        "OMPI_COMM_WORLD_RANK",
    ),
}
# accelerate is beside Megatron-Bridge, of which it is a requirement.
PACKAGES = [RELEASES / "megatron-bridge", RELEASES / "launchers"]


def prepare(folder: Path) -> dict[str, str]:
    """The programs of the table, and the values of its templates."""
    (folder / "train.py").write_text("import sys\nimport megatron.training\nprint('trained', sys.argv)\n")
    (folder / "helper.py").write_text("print('helped')\n")
    torchrun = f"{sys.executable} {FAKE_TORCHRUN} --nproc-per-node 2"
    (folder / "train.sh").write_text(
        f"set -e\n{sys.executable} helper.py\n{torchrun} train.py --lr 1 > log 2>&1\n"
    )
    (folder / "Makefile").write_text(f"train:\n\t{torchrun} train.py\n")
    words = shlex.split(torchrun)
    (folder / "launch.py").write_text(
        "import subprocess\nsubprocess.run(['./torchrun', '--nproc-per-node', '2', 'train.py'])\n"
    )
    (folder / "torchrun").write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE_TORCHRUN} "$@"\n')
    (folder / "torchrun").chmod(0o755)
    for name, prefix, size in (
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("pmirun", "PMI_RANK", "PMI_SIZE"),
        ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        (folder / name).write_text(TASKS.format(rank=prefix, size=size))
        (folder / name).chmod(0o755)
    for name in ("accelerate", "ft_launcher"):
        # Launchers may load a framework themselves, to ask for its version.
        (folder / name).write_text(
            f"#!{sys.executable}\nimport subprocess, sys\nimport megatron.training, deepspeed\n"
            f"end = [word for word in sys.argv[1:] if word != 'launch']\nsubprocess.run({words!r} + end)\n"
        )
        (folder / name).chmod(0o755)
    return {"python": sys.executable, "torchrun": torchrun}


def check(
    row: tuple[str, int, str | None], folder: Path, monkeypatch: pytest.MonkeyPatch, *, timeout_s: float
) -> None:
    """Start a row of the table in a folder as the tuner would."""
    line, world_size, variable = row
    monkeypatch.chdir(folder)
    words = shlex.split(line.format(**prepare(folder)))
    assert parse_command(words, environment={}).starter == "other" or row in REAL.values()
    site = make_site(folder)
    start = start_file(folder / "attempt", "--quartet-trial", "missing.json")
    variables = environment(site, **{START: str(start)})
    packages = os.pathsep.join([variables["PYTHONPATH"], *map(str, PACKAGES)])
    assert_found(
        words,
        folder,
        {**variables, "PYTHONPATH": packages},
        world_size=world_size,
        variable=variable,
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("name", sorted(STARTERS))
def test_a_training_is_found_below_any_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(STARTERS[name], tmp_path, monkeypatch, timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REAL))
def test_a_training_is_found_below_the_real_launchers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(REAL[name], tmp_path, monkeypatch, timeout_s=200)


@pytest.mark.slow
def test_the_deepspeed_launcher_is_no_training_and_its_ranks_are(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    # The real package: the launcher is a part of it.
    for file in (site / "deepspeed").iterdir():
        file.unlink()
    (site / "deepspeed").rmdir()
    (tmp_path / "train.py").write_text("import deepspeed\nprint('trained')\n")
    start = start_file(tmp_path / "attempt", "--quartet-trial", "missing.json")
    script = Path(sys.executable).parent / "deepspeed"
    subprocess.run(
        [str(script), "--num_accelerators", "2", "--master_port", "29613", "train.py", "--lr", "1"],
        env=environment(site, **{START: str(start), "DS_ACCELERATOR": "cpu"}),
        cwd=tmp_path,
        capture_output=True,
        timeout=200,
        check=False,
    )
    training = [start for start in read_starts(start.parent) if start.framework is not None]
    assert training
    assert {start.framework for start in training} == {"DeepSpeed"}
    assert {(start.ranks_from, start.world_size) for start in training} == {("RANK", 2)}
    assert all("train.py" in start.argv for start in training)
