"""How tests start real Megatron: a free port, torchrun, tiny flags, a deadline, and nothing left behind."""

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.protocol.environment import CPU_SETTINGS
from tests import warm_ranks
from tests.ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN_SCRIPT = REPOSITORY / "examples" / "pretrain_gpt.py"
PREPARE_SCRIPT = REPOSITORY / "examples" / "prepare_data.py"
_RANK_PROGRAM, _SAVING_PROGRAM = "tests.megatron.rank_on_cpu", "tests.megatron.rank_saving_weights"

# Small enough for a test and large enough that all of Megatron's paths are taken; 4 layers split over up to
# 4 stages. Dropout is off: masks would depend on the layout. The small dataset is all for training: Megatron
# counts for ever over a split that got no document.
MODEL_FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--tokenizer-type NullTokenizer --null-tokenizer-eod-id 256 --vocab-size 1000 "
    "--attention-dropout 0 --hidden-dropout 0"
)
TRAINING_FLAGS = shlex.split(
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --split 100,0,0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What `train_step` returned, as floats; `loss` is None on ranks that do not compute it."""

    loss: float | None
    grad_norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished training run: its steps by rank, its exit code and what it printed."""

    exit_code: int
    output: str
    steps: Mapping[int, Sequence[Step]]

    def losses(self) -> list[float]:
        """The loss of each step; every rank that has one must have the same."""
        return [
            self._agreed([steps[index].loss for steps in self.steps.values()]) for index in self._indices()
        ]

    def grad_norms(self) -> list[float]:
        """The gradient norm of each step, before clipping; every rank must have the same."""
        return [
            self._agreed([steps[index].grad_norm for steps in self.steps.values()])
            for index in self._indices()
        ]

    def _indices(self) -> range:
        counts = {len(steps) for steps in self.steps.values()}
        assert len(counts) == 1, f"ranks made different numbers of steps: {counts}"
        return range(counts.pop())

    @staticmethod
    def _agreed(values: Sequence[float | None]) -> float:
        present = {value for value in values if value is not None}
        assert len(present) == 1, f"ranks disagree: {present}"
        return present.pop()


def largest_deviation(run: Run, reference: Run) -> tuple[float, float]:
    """The largest relative difference of the losses and of the gradient norms, over all steps."""
    assert len(run.losses()) == len(reference.losses()), "the runs differ in length"

    def largest(values: Sequence[float], expected: Sequence[float]) -> float:
        return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))

    return largest(run.losses(), reference.losses()), largest(run.grad_norms(), reference.grad_norms())


@functools.cache
def dataset(folder: Path, *, max_mb: float = 0.5) -> Path:
    """The prefix of a small dataset made by `examples/prepare_data.py` in `folder`."""
    prefix = folder / "stdlib"
    subprocess.run(
        [sys.executable, str(PREPARE_SCRIPT), str(prefix), "--max-mb", str(max_mb)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return prefix


def train(
    folder: Path,
    *flags: str,
    num_processes: int,
    data: Path,
    train_iters: int = 3,
    script: Path = PRETRAIN_SCRIPT,
    program: str = _RANK_PROGRAM,
    timeout_s: float = 150.0,
) -> Run:
    """Train the tiny GPT under torchrun on the CPU device; `flags` come last, so they win.

    `folder` gets the ranks' records and must be new. A run that exceeds `timeout_s` is killed and fails.
    """
    folder.mkdir(parents=True)
    arguments = [
        *MODEL_FLAGS, *TRAINING_FLAGS, "--train-iters", str(train_iters), "--data-path", str(data), *flags,
    ]  # fmt: skip
    exit_code, output = run_ranks(
        num_processes,
        program,
        str(folder),
        str(script),
        *arguments,
        timeout_s=timeout_s,
        log=folder / "log",
    )
    return Run(exit_code=exit_code, output=output, steps=read_steps(folder))


def torchrun(num_processes: int, *program: str) -> list[str]:
    """The argv that starts `program`, a script and its arguments, in `num_processes` ranks on a free port."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes),
        "--master-port", str(free_port()), *program,
    ]  # fmt: skip


def rank_environment() -> dict[str, str]:
    """This environment with what the CPU device's ranks need, and with the repository importable."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**own_environment(), **CPU_SETTINGS, "PYTHONPATH": path}


def own_environment() -> dict[str, str]:
    """This environment without the name of the test, so that tests share a trial server."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def launch_environment() -> dict[str, str]:
    """What a user starts a training with: its ranks on the CPU device set the rest themselves."""
    return {**own_environment(), "OMP_NUM_THREADS": "1"}


def run_processes(
    command: Sequence[str], *, timeout_s: float, log: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a launcher to its end; returns its exit code and output (also in `log`).

    Raises TimeoutError after `timeout_s`. Whatever happens, the launcher and all it started are gone then.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment or rank_environment(),
            cwd=REPOSITORY,
        )
    return _await_end(process, timeout_s=timeout_s, log=log), log.read_text(errors="replace")


def run_ranks(
    num_processes: int,
    *program: str,
    timeout_s: float,
    log: Path,
    framework: warm_ranks.Framework = warm_ranks.MEGATRON,
) -> tuple[int, str]:
    """The same for torchrun with ranks of `program`, a module and its arguments, which are forked."""
    command = torchrun(num_processes, "-m", *program)
    return run_forked(command, launch_environment(), timeout_s=timeout_s, log=log, framework=framework)


def run_forked(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    log: Path,
    framework: warm_ranks.Framework = warm_ranks.MEGATRON,
) -> tuple[int, str]:
    """Run a command line of torchrun, whose ranks on the CPU device are forked."""
    process = warm_ranks.start(command, environment=environment, log=log, framework=framework)
    return _await_end(process, timeout_s=timeout_s, log=log), log.read_text(errors="replace")


def run_cold(
    command: Sequence[str], environment: Mapping[str, str], *, timeout_s: float, log: Path
) -> tuple[int, str]:
    """The same with ranks that are started anew."""
    return run_processes(command, environment=environment, timeout_s=timeout_s, log=log)


def _await_end(process: Handle, *, timeout_s: float, log: Path) -> int:
    """The exit code of a launcher, after whose end all that it has started is gone."""
    started = Descendants(process.pid)
    deadline_s = time.monotonic() + timeout_s
    try:
        while (code := process.poll()) is None:
            started.look()
            if time.monotonic() > deadline_s:
                tail = log.read_text(errors="replace")[-3000:]
                raise TimeoutError(f"the run did not end within {timeout_s:g} s:\n{tail}")
            time.sleep(0.1)
    finally:
        started.kill()
        while (code := process.poll()) is None:
            time.sleep(0.02)
    return code


class Descendants:
    """The processes below one process, remembered by pid and start time: a launcher's death orphans them."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen = {self._root}

    def look(self) -> None:
        """Remember those that exist now."""
        unseen = list(self._seen)
        while unseen:
            new = _children(unseen.pop().pid) - self._seen
            unseen += new
            self._seen |= new

    def kill(self) -> None:
        """End those that still run. psutil compares the start time, so a reused pid is not hit."""
        self.look()
        alive = [process for process in self._seen if process.is_running()]
        for process in alive:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=10)


def _children(pid: int) -> set[psutil.Process]:
    """The children of a process, from the system's own lists: psutil would read all processes each time."""
    children = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for word in task.read_text().split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    children.add(psutil.Process(int(word)))
    return children


def read_steps(folder: Path) -> dict[int, list[Step]]:
    """The steps that each rank recorded in `folder`."""
    return {
        int(path.stem.removeprefix("rank-")): [
            Step(loss=step["loss"].get("lm loss"), grad_norm=step["grad_norm"])
            for step in json.loads(path.read_text())
        ]
        for path in sorted(folder.glob("rank-*.json"))
        if path.stem.removeprefix("rank-").isdecimal()
    }


def save_weights(folder: Path, *flags: str, data: Path) -> tuple[str, ...]:
    """Make a weights-only torch_dist checkpoint in `folder`; returns the flags that start a run from it.

    Megatron seeds every stage differently: only a loaded checkpoint gives all layouts the same weights. The
    one iteration that is needed before Megatron saves changes nothing at a learning rate of 0. `flags` change
    the model.
    """
    weights = str(folder / "weights")
    run = train(
        folder / "save",
        *shlex.split("--lr 0 --min-lr 0 --weight-decay 0 --ckpt-format torch_dist --save-interval 1"),
        *("--no-save-optim", "--no-save-rng", "--save", weights),
        *flags,
        num_processes=1,
        data=data,
        train_iters=1,
        program=_SAVING_PROGRAM,
    )
    assert run.exit_code == 0, run.output[-3000:]
    loading = "--finetune --no-load-optim --no-load-rng --ckpt-format torch_dist --exit-on-missing-checkpoint"
    return (*shlex.split(loading), "--load", weights)
