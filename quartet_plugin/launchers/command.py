"""The user's training command: its starter, its script, and the places where the plugin's words go in.

Read are `torchrun`, `python -m torch.distributed.run`, `deepspeed` and plain `python`, each with a script
or `-m MODULE`, behind an optional `env NAME=VALUE ...`. The user's words are never edited: wrapping puts
`-m quartet_plugin.megatron` before the script, or `-m quartet_plugin.deepspeed` where `deepspeed` starts it
or its arguments name a ds_config, or `-m quartet_plugin.bridge` where it imports Megatron-Bridge, and the
plugin's flags behind the user's.

Any other program (`bash train.sh`, `make train`, `srun`, `mpirun`, `accelerate`, a Python launcher) is
started as it is: its training processes find themselves, see `rank.process_start`.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.script_imports import starts_launcher, trains_with_bridge
from quartet_plugin.launchers.starter_options import ParsedOptions, Starter, read_options
from quartet_plugin.protocol.program_words import with_flags

ENTRY_MODULE = "quartet_plugin.megatron"
DEEPSPEED_MODULE = "quartet_plugin.deepspeed"
BRIDGE_MODULE = "quartet_plugin.bridge"
_BRIDGE_MODULES = ("quartet_plugin.bridge.", "megatron.bridge.")
MAX_WORDS = 100_000

Assignments = tuple[tuple[str, str], ...]
PortFlag = Literal["--master-port", "--rdzv-endpoint", "--master_port"]

_SUPPORTED = "torchrun, deepspeed or python must be followed by a script"
_DS_CONFIG = re.compile(r"--deepspeed[_-]config(=.*)?", re.DOTALL)
_PYTHON = re.compile(r"python(\d(\.\d+)?)?(\.exe)?")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=", re.ASCII)
_MACHINE_COUNTS = ("auto", "cpu", "gpu", "xpu")
_RUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_LAUNCHER_MODULES = ("accelerate.", "deepspeed.launcher.", "nvidia_resiliency_ext.")
_ADVICE = {
    "sbatch": "it only queues a job; write the command that the job script starts, or `bash` and the script",
    "ipython": "use python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A parsed command. `words` are the user's, all of them and in order.

    `words[:before]` start the processes (with `has_module_flag`, a `-m` is among them);
    `words[target_index:]` are the script (with `is_module`, the module) and its arguments. `num_processes` is
    None where only the machine itself knows (`auto`, `gpu`, `cpu`), `num_nodes` where it is a range.
    `port_flag` is the option that may name a free port, None where the user named a place. `entry` is the
    adapter's module. `pinned` is the option that keeps torchrun on one node whatever its environment says,
    None without one. With the starter "other" nothing but the program is known before it has
    run. Its trials have the command's global batch over `batch_divisor`, where they have fewer nodes than its
    training.
    """

    words: tuple[str, ...]
    starter: Starter
    before: int
    target_index: int
    has_module_flag: bool
    is_module: bool
    is_wrapped: bool
    environment: Assignments
    num_processes: int | None
    num_nodes: int | None
    port_flag: PortFlag | None
    entry: str = ENTRY_MODULE
    batch_divisor: int = 1
    pinned: str | None = None

    @property
    def program(self) -> str:
        """The program that starts the processes: torchrun or a python."""
        is_env = self.words[0].rpartition("/")[2] == "env"
        return self.words[1 + len(self.environment) if is_env else 0]

    @property
    def target(self) -> str:
        """The script or module that trains."""
        return self.words[self.target_index]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The training program's own arguments; none are known where another program starts it."""
        if self.starter == "other":
            return ()
        return self.words[self.target_index + 1 :]

    def wrapped(self, extra_flags: Sequence[str] = (), *, port: int | None = None) -> list[str]:
        """The argv that runs the same under the adapter, with `extra_flags` behind the user's options.

        `port` is named to torchrun only where the user left the choice open (`port_flag`). Not for a command
        that another program starts.
        """
        assert self.starter != "other", "its training processes find themselves"
        argv = list(self.words[: self.before])
        if port is not None and self.port_flag is not None:
            place = f"localhost:{port}" if self.port_flag == "--rdzv-endpoint" else str(port)
            index = len(argv) - (argv[-1] in ("-m", "--module"))
            argv[index:index] = [self.port_flag, place]
        flag = "--module" if self.starter == "deepspeed" else "-m"
        argv += [self.entry] if self.has_module_flag else [flag, self.entry]
        if self.is_module:
            argv.append("-m")
        return [*argv, *with_flags(self.words[self.target_index :], extra_flags)]

    def __str__(self) -> str:
        """The command as one types it."""
        return shlex.join(self.words)


def parse_command(
    words: Sequence[str], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Command:
    """Read the user's command, the words after `--`.

    `environment` (default: this process's) is where torchrun looks for options that are not given, `cwd`
    (default: this process's) the folder that the command starts in, from which its script is read.
    Raises ConfigError, naming the word, for a command that cannot be wrapped.
    """
    words = tuple(words)
    if not words:
        raise ConfigError(f"the command after -- is empty; {_SUPPORTED}")
    if len(words) > MAX_WORDS or any("\0" in word for word in words):
        raise ConfigError(f"the command after --: at most {MAX_WORDS} words, without NUL characters")
    assignments, first = _environment_words(words)
    known = {**(os.environ if environment is None else environment), **dict(assignments)}
    folder = Path() if cwd is None else cwd
    program = _program(words[first])
    if program == "torchrun":
        return _torchrun(words, first + 1, assignments, known, folder)
    if program == "deepspeed":
        return _deepspeed(words, first + 1, assignments, folder)
    if is_starter(program):
        return _python(words, first + 1, assignments, known, folder)
    if not program:
        raise ConfigError(f"command {words[first]!r}: names no program; write what starts the training")
    if program in _ADVICE:
        raise ConfigError(f"command {words[first]!r}: not supported: {_ADVICE[program]}")
    return _other(words, first, assignments)


def _other(words: tuple[str, ...], first: int, assignments: Assignments) -> Command:
    """A command whose program is not read: all its words start the processes."""
    return Command(
        words=words,
        starter="other",
        before=len(words),
        target_index=first,
        has_module_flag=False,
        is_module=False,
        is_wrapped=False,
        environment=assignments,
        num_processes=None,
        num_nodes=1,
        port_flag=None,
    )


def is_starter(word: str) -> bool:
    """Whether a word names a program that a training command may begin with."""
    program = _program(word)
    return program in ("torchrun", "deepspeed") or _PYTHON.fullmatch(program) is not None


def _program(word: str) -> str:
    return word.replace("\\", "/").rpartition("/")[2]


def _environment_words(words: tuple[str, ...]) -> tuple[Assignments, int]:
    """The assignments of a leading `env`, and where the program is."""
    if _ASSIGNMENT.match(words[0]):
        raise ConfigError(
            f"command {words[0]!r}: no shell runs here; write `env {words[0].partition('=')[0]}=... torchrun`"
        )
    if words[0].rpartition("/")[2] != "env":
        return (), 0
    first = 1
    while first < len(words) and _ASSIGNMENT.match(words[first]):
        first += 1
    if first == len(words):
        raise ConfigError(f"command `env`: no program follows; {_SUPPORTED}")
    if words[first].startswith("-"):
        raise ConfigError(f"command env {words[first]}: options of env are not supported, only NAME=VALUE")
    pairs = (word.partition("=") for word in words[1:first])
    return tuple((name, value) for name, _, value in pairs), first


def _torchrun(
    words: tuple[str, ...], first: int, assignments: Assignments, environment: Mapping[str, str], cwd: Path
) -> Command:
    options = read_options(words, first, program="torchrun")
    for flag in ("help", "no_python", "run_path"):
        if flag in options.values or (flag != "help" and _is_set(environment, flag)):
            raise ConfigError(
                f"torchrun --{flag.replace('_', '-')}: not supported; torchrun must start a Python script"
            )
    if _is_set(environment, "module") and "module" not in options.values:
        raise ConfigError("PET_MODULE: not supported; write torchrun -m MODULE")
    count = _setting(options, environment, "nproc_per_node")
    per_node = _number("1" if count is None else count, "torchrun --nproc-per-node", words=_MACHINE_COUNTS)
    num_nodes = _num_nodes(options, environment)
    return _command(
        words,
        options,
        starter="torchrun",
        assignments=assignments,
        num_processes=None if per_node is None or num_nodes is None else per_node * num_nodes,
        num_nodes=num_nodes,
        port_flag=_port_flag(options, environment, num_nodes),
        cwd=cwd,
        pinned=_pinned(options, environment) if num_nodes == 1 else None,
    )


def _deepspeed(words: tuple[str, ...], first: int, assignments: Assignments, cwd: Path) -> Command:
    options = read_options(words, first, program="deepspeed")
    for flag in ("help", "no_python", "autotuning"):
        if flag in options.values:
            raise ConfigError(f"deepspeed --{flag}: not supported; deepspeed must start a Python script")
    values = options.values
    spans_nodes = any(name in values for name in ("hostfile", "include", "exclude", "force_multi"))
    num_nodes = None if spans_nodes else _number(values.get("num_nodes", "1"), "deepspeed --num_nodes")
    devices = values.get("num_gpus", values.get("num_accelerators"))
    per_node = None if devices in (None, "-1") else _number(str(devices), "deepspeed --num_gpus")
    is_free = num_nodes == 1 and "master_port" not in values
    return _command(
        words,
        options,
        starter="deepspeed",
        assignments=assignments,
        num_processes=None if per_node is None or num_nodes is None else per_node * num_nodes,
        num_nodes=num_nodes,
        port_flag="--master_port" if is_free else None,
        cwd=cwd,
    )


def _number(text: str, name: str, *, words: Sequence[str] = ()) -> int | None:
    """A number above 0; None for one of `words`, whose number only the machine knows."""
    if text in words:
        return None
    if not re.fullmatch(r"[0-9]{1,7}", text, re.ASCII) or int(text) < 1:
        others = f" or one of {', '.join(words)}" if words else ""
        raise ConfigError(f"{name}: {text!r}; must be a number above 0{others}")
    return int(text)


def _python(
    words: tuple[str, ...], first: int, assignments: Assignments, environment: Mapping[str, str], cwd: Path
) -> Command:
    options = read_options(words, first, program="python")
    if "command" in options.values:
        raise ConfigError("python -c: not supported; put the program into a script")
    start = _target_index(words, options, program="python")
    if "module" in options.values and words[start] in _RUN_MODULES:
        if words[start] == "torch.distributed.launch" and not {"--use-env", "--use_env"} & set(words):
            return _other(words, first - 1, assignments)  # the script gets its local rank as an argument
        return _torchrun(words, start + 1, assignments, environment, cwd)
    if _is_launcher(words[start], is_module="module" in options.values, cwd=cwd):
        return _other(words, first - 1, assignments)
    if words[start] in ("-", "--"):
        raise ConfigError(f"python {words[start]}: a script or -m MODULE is needed")
    return _command(
        words,
        options,
        starter="python",
        assignments=assignments,
        num_processes=1,
        num_nodes=1,
        port_flag=None,
        cwd=cwd,
    )


def _is_launcher(target: str, *, is_module: bool, cwd: Path) -> bool:
    """Whether a Python program starts the processes that train, by its module's name or its own words."""
    if is_module:
        return target.startswith(_LAUNCHER_MODULES)
    return starts_launcher(cwd / target)


def _command(
    words: tuple[str, ...],
    options: ParsedOptions,
    *,
    starter: Starter,
    assignments: Assignments,
    num_processes: int | None,
    num_nodes: int | None,
    port_flag: PortFlag | None,
    cwd: Path,
    pinned: str | None = None,
) -> Command:
    before = start = _target_index(words, options, program=starter)
    has_module_flag = is_module = "module" in options.values
    is_wrapped = False
    entry = ENTRY_MODULE
    if starter == "deepspeed" or any(_DS_CONFIG.fullmatch(word) for word in words[start + 1 :]):
        entry = DEEPSPEED_MODULE
    elif words[start].startswith(_BRIDGE_MODULES) if is_module else trains_with_bridge(cwd / words[start]):
        entry = BRIDGE_MODULE
    if is_module and words[start] in (ENTRY_MODULE, DEEPSPEED_MODULE, BRIDGE_MODULE):
        entry = words[start]
        is_wrapped, is_module, start = True, False, start + 1
        if start < len(words) and words[start] == "-m":
            is_module, start = True, start + 1
        if start >= len(words) or words[start].startswith("-"):
            raise ConfigError(f"-m {entry}: no script follows")
    return Command(
        words=words,
        starter=starter,
        before=before,
        has_module_flag=has_module_flag,
        target_index=start,
        is_module=is_module,
        is_wrapped=is_wrapped,
        environment=assignments,
        num_processes=num_processes,
        num_nodes=num_nodes,
        port_flag=port_flag,
        entry=entry,
        pinned=pinned,
    )


def _target_index(words: tuple[str, ...], options: ParsedOptions, *, program: str) -> int:
    if options.end >= len(words):
        raise ConfigError(f"command {program}: no script follows; {_SUPPORTED}")
    target = words[options.end]
    if not target or target == "--":
        raise ConfigError(f"command {program} {target!r}: a script or -m MODULE is needed there")
    return options.end


def _setting(options: ParsedOptions, environment: Mapping[str, str], name: str) -> str | None:
    """An option as torchrun resolves it: given, else from the environment's PET_NAME."""
    return options.values.get(name, environment.get(f"PET_{name.upper()}"))


def _is_set(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(f"PET_{name.upper()}", "0") not in ("", "0")


def _num_nodes(options: ParsedOptions, environment: Mapping[str, str]) -> int | None:
    text = _setting(options, environment, "nnodes") or "1"
    counts = text.split(":")
    if len(counts) > 2 or not all(re.fullmatch(r"[0-9]{1,7}", c, re.ASCII) and int(c) for c in counts):
        raise ConfigError(f"torchrun --nnodes: {text!r}; must be a number above 0, or MIN:MAX")
    return int(counts[0]) if int(counts[0]) == int(counts[-1]) else None


def _pinned(options: ParsedOptions, environment: Mapping[str, str]) -> str | None:
    """The option that keeps torchrun on one node: it goes before the variables that join nodes."""
    if "standalone" in options.values or _is_set(environment, "standalone"):
        return "--standalone"
    for name in ("nnodes", "node_rank"):
        if name in options.values:
            return f"--{name.replace('_', '-')} {options.values[name]}"
    if _setting(options, environment, "rdzv_backend") == "c10d":
        return None if _setting(options, environment, "rdzv_endpoint") else "--rdzv-backend c10d"
    if options.values.get("master_addr") in ("localhost", "127.0.0.1", "::1"):
        return f"--master-addr {options.values['master_addr']}"
    return None


def _port_flag(
    options: ParsedOptions, environment: Mapping[str, str], num_nodes: int | None
) -> PortFlag | None:
    """What may name a free port: nothing where the user named a place, or several nodes must agree."""
    if num_nodes != 1 or "standalone" in options.values or _is_set(environment, "standalone"):
        return None
    if _setting(options, environment, "rdzv_endpoint"):
        return None
    backend = _setting(options, environment, "rdzv_backend") or "static"
    if backend == "c10d":
        return "--rdzv-endpoint"
    if backend != "static" or _setting(options, environment, "master_port") is not None:
        return None
    return "--master-port"
