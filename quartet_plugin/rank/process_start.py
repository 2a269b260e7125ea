"""The process-start hook: finds the processes that train below any command, and starts them under an entry.

The installed `quartet_plugin_start.pth` calls `watch` in every Python process that inherits QUARTET_START. A
process is one of the training when it imports `megatron.training`, the training loop of Megatron-Bridge or,
with a rank, `deepspeed`; launchers and helpers do none of it. Such a process becomes
`python -m quartet_plugin.ADAPTER SCRIPT ARGS FLAGS`, before a device is touched; its pid stays. It has not
yet imported the framework, of the Bridge only its models. Other processes are never disturbed.
"""

import contextlib
import importlib.abc
import importlib.machinery
import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal, NoReturn

from quartet_plugin.protocol.environment import START, STARTED
from quartet_plugin.protocol.program_words import with_flags

Framework = Literal["Megatron", "Megatron-Bridge", "DeepSpeed"]

# The modules whose import makes a process one of a training: its framework, and the adapter.
_MEGATRON, _DEEPSPEED, _BRIDGE = "megatron.training", "deepspeed", "megatron.bridge.training.pretrain"
_ADAPTERS: Mapping[str, tuple[str, Framework]] = {
    _MEGATRON: ("quartet_plugin.megatron", "Megatron"),
    _DEEPSPEED: ("quartet_plugin.deepspeed", "DeepSpeed"),
    _BRIDGE: ("quartet_plugin.bridge", "Megatron-Bridge"),
}
# Megatron-Bridge itself imports `megatron.training`, also where it converts checkpoints and trains nothing.
_BRIDGE_PACKAGE = "megatron.bridge"
# Programs that start processes and train nothing themselves, by the last parts of their names.
_LAUNCHERS = ("torchrun", "deepspeed", "ds", "accelerate", "ft_launcher", "accelerate-launch")
_LAUNCHER_MODULES = ("torch.distributed.", "deepspeed.launcher.", "accelerate.", "nvidia_resiliency_ext.")
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")
# Rank and number of processes by the variables of the starters, the most certain first.
_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
# What differs from launch to launch, by the variable of the rank.
_LAUNCH_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "OMPI_COMM_WORLD_RANK": ("PMIX_NAMESPACE",),
    "SLURM_PROCID": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
}


def ranks_of(environment: Mapping[str, str]) -> tuple[str | None, int, int]:
    """The variable that holds this process's rank, the rank, and the number of processes.

    One task of several of Slurm or MPI counts; a lone task of them does not, it is a launcher's node.
    """
    for rank_name, size_name in _RANK_VARIABLES:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if not (rank.isdecimal() and size.isdecimal()) or int(rank) >= int(size):
            continue
        if rank_name == "RANK" or int(size) > 1:
            return rank_name, int(rank), int(size)
    return None, 0, 1


def launch_of(environment: Mapping[str, str]) -> str:
    """What the ranks of a launch share and those of the next do not; "" where the starter tells nothing."""
    rank_name, _, _ = ranks_of(environment)
    return "-".join(environment.get(name, "") for name in _LAUNCH_VARIABLES.get(rank_name or "", ()))


def program_index(argv: Sequence[str]) -> int | None:
    """The index of the script or module in Python's own command line; None for -c, stdin or neither."""
    index = 1
    while index < len(argv) and argv[index].startswith("-"):
        word = argv[index]
        if word == "-" or (word[1] != "-" and "c" in word[1:] and word[1] not in "WX"):
            return None
        if word[1] != "-" and word[1] not in "WX" and "m" in word:
            return index + 1 if word.endswith("m") and index + 1 < len(argv) else None
        index += 2 if word in _PYTHON_VALUES else 1
    return index if index < len(argv) else None


def is_launcher(argv: Sequence[str], index: int) -> bool:
    """Whether the program starts processes and trains nothing."""
    program = argv[index]
    if argv[index - 1].startswith("-") and argv[index - 1].endswith("m"):
        return program.startswith(_LAUNCHER_MODULES)
    return program.rpartition("/")[2] in _LAUNCHERS


def watch() -> None:
    """Leave a record of this process, and wait for an import that makes it one of the training."""
    if STARTED in os.environ or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return  # a folder of packages that is listed twice is read twice
    argv = list(sys.orig_argv)
    index = program_index(argv)
    if index is None:
        return
    with contextlib.suppress(Exception):
        _leave_record(argv, framework=None)
    if not is_launcher(argv, index):
        has_rank = ranks_of(os.environ)[0] is not None
        sys.meta_path.insert(0, _Finder(_ADAPTERS if has_rank else (_MEGATRON, _BRIDGE)))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Starts the training when one of `names` is loaded; a mere search for a module has no effect."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._names or (fullname == _MEGATRON and _BRIDGE_PACKAGE in sys.modules):
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        for finder in others:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = self
                return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        try:
            begin_training(spec.name)
        except Exception as error:
            # Without its flags a trial would train for good, checkpoints and all.
            _refuse(f"the training cannot be started with the plugin: {error}")
        raise AssertionError(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        raise AssertionError(module.__name__)


def begin_training(module: str) -> NoReturn:
    """Become the adapter's entry with this process's program. Raises OSError, ConfigError or ValueError."""
    from quartet_plugin.protocol.attempt_files import read_shared
    from quartet_plugin.protocol.training_start import StartFile

    start = Path(os.environ[START])
    argv = list(sys.orig_argv)
    other = _other_training(start.parent)
    adapter, framework = _ADAPTERS[module]
    _leave_record(argv, framework=framework)
    if other is not None:
        _refuse(f"process {other} is the same rank of another training of this command")
    words = wrapped(argv, adapter=adapter, flags=read_shared(StartFile, start).flags)
    environment = {name: value for name, value in os.environ.items() if name != START}
    environment[STARTED] = str(start.parent)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, words, environment)  # noqa: S606 - the same program


def _refuse(reason: str) -> NoReturn:
    from quartet_plugin.protocol.terminal import terminal_line

    sys.stdout.flush()
    print(f"quartet: {terminal_line(reason)}", file=sys.stderr, flush=True)
    os._exit(2)


def _other_training(folder: Path) -> int | None:
    """The pid of a process that has this rank already: in a trial ever, else one that still runs here."""
    from quartet_plugin.protocol.attempt_files import TRIAL_FILE
    from quartet_plugin.protocol.training_start import read_starts

    _, rank, _ = ranks_of(os.environ)
    is_trial = (folder / TRIAL_FILE).exists()
    for start in read_starts(folder):
        is_rank = start.framework is not None and start.rank == rank and start.restart == _restart()
        if is_rank and start.pid != os.getpid() and (is_trial or Path(f"/proc/{start.pid}").exists()):
            return start.pid
    return None


def _restart() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def wrapped(argv: Sequence[str], *, adapter: str, flags: Sequence[str]) -> list[str]:
    """Python's command line with the adapter's entry before the program, and `flags` among its arguments."""
    index = program_index(argv)
    if index is None:
        raise ValueError("no script")
    is_module = argv[index - 1].startswith("-") and argv[index - 1].endswith("m") and index > 1
    head = list(argv[1:index]) if is_module else [*argv[1:index], "-m"]
    program = ["-m", argv[index]] if is_module else [argv[index]]
    return [sys.executable, *head, adapter, *program, *with_flags(argv[index + 1 :], flags)]


def _leave_record(argv: Sequence[str], *, framework: Framework | None) -> None:
    from quartet_plugin.model.files import write_json_atomic
    from quartet_plugin.protocol.masking import collect_secrets, masked_argv
    from quartet_plugin.protocol.training_start import STARTS_FOLDER

    name, rank, world_size = ranks_of(os.environ)
    collect_secrets(argv)
    folder = Path(os.environ[START]).parent / STARTS_FOLDER
    host = socket.gethostname()
    write_json_atomic(
        folder / f"{host}-{os.getpid()}.json",
        {
            "schema_version": 1,
            "pid": os.getpid(),
            "host": host,
            "argv": masked_argv(argv),
            "cwd": str(Path.cwd()),
            "framework": framework,
            "ranks_from": name,
            "rank": rank,
            "world_size": world_size,
            "restart": _restart(),
        },
    )
