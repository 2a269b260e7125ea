"""The options of torchrun, deepspeed and python: which take a value, so that the script can be located."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_plugin.errors import ConfigError

# "other" is any program that in the end starts a training: its options are its own.
Starter = Literal["torchrun", "python", "deepspeed", "other"]

# Torchrun 2.11's options without and with a value, by their spelling -> their name. A contract test
# compares both tables with torch's own parser.
_TORCHRUN_FLAG_NAMES = (
    "help", "standalone", "module", "no_python", "run_path", "virtual_local_rank", "use_env",
)  # fmt: skip
_TORCHRUN_VALUE_NAMES = (
    "nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts",
    "monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee",
    "local_ranks_filter", "duplicate_stdout_filters", "duplicate_stderr_filters", "node_rank",
    "master_addr", "master_port", "local_addr", "logs_specs", "numa_binding", "signals_to_handle",
)  # fmt: skip


def _spelled(names: Sequence[str], *, with_dashes: bool = False) -> dict[str, str]:
    """The long options of names; with `with_dashes` also with dashes for underscores."""
    dashes = {f"--{name.replace('_', '-')}": name for name in names if with_dashes}
    return {f"--{name}": name for name in names} | dashes


TORCHRUN_FLAGS = {"-h": "help", "-m": "module", **_spelled(_TORCHRUN_FLAG_NAMES, with_dashes=True)}
TORCHRUN_VALUES = {"-r": "redirects", "-t": "tee", **_spelled(_TORCHRUN_VALUE_NAMES, with_dashes=True)}
# DeepSpeed 0.19's launcher; a contract test compares both tables with its own parser.
_DEEPSPEED_FLAG_NAMES = (
    "help", "module", "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "save_pid",
    "bind_cores_to_rank", "quiet",
)  # fmt: skip
_DEEPSPEED_VALUE_NAMES = (
    "hostfile", "include", "exclude", "num_nodes", "num_gpus", "num_accelerators", "master_port",
    "master_addr", "node_rank", "launcher", "launcher_args", "enable_each_rank_log", "autotuning",
    "bind_core_list", "ssh_port", "venv_script", "log_level",
)  # fmt: skip
DEEPSPEED_FLAGS = {"-h": "help", "-q": "quiet", **_spelled(_DEEPSPEED_FLAG_NAMES)}
DEEPSPEED_VALUES = {
    "-H": "hostfile",
    "-i": "include",
    "-e": "exclude",
    **_spelled(_DEEPSPEED_VALUE_NAMES),
}
PYTHON_FLAGS: dict[str, str] = {f"-{letter}": letter for letter in "bBdEhiIOPqsSuvVx?"}
PYTHON_VALUES: dict[str, str] = {
    "-W": "warning",
    "-X": "implementation",
    "--check-hash-based-pycs": "check_hash_based_pycs",
}


# The options without and with a value of each starter.
_OPTIONS: dict[Starter, tuple[dict[str, str], dict[str, str]]] = {
    "torchrun": (TORCHRUN_FLAGS, TORCHRUN_VALUES),
    "deepspeed": (DEEPSPEED_FLAGS, DEEPSPEED_VALUES),
    "python": (PYTHON_FLAGS, PYTHON_VALUES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOptions:
    """Options by name with their last value ("" for a flag); `end` is the index of the word behind them."""

    values: Mapping[str, str]
    end: int


def read_options(words: Sequence[str], start: int, *, program: Starter) -> ParsedOptions:
    """Read the options of `program` from `words[start]` up to the first word that is none.

    Unambiguous abbreviations of long options are read as argparse does, but not python's. Raises ConfigError
    for an option that is not known, or lacks its value: the script cannot be found behind it for certain.
    """
    flags, values = _OPTIONS[program]
    read: dict[str, str] = {}
    index = start
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-", "--"):
        word = words[index]
        if program == "python" and word in ("-m", "-c"):
            read["module" if word == "-m" else "command"] = ""
            index += 1
            break  # what follows is the program, and its arguments
        spelling, inline = _spelling(word, program=program)
        for option in spelling[:-1]:
            read[flags[option]] = ""
        last = spelling[-1]
        if last in flags:
            read[flags[last]] = ""
        elif inline is not None:
            read[values[last]] = inline
        else:
            index += 1
            if index >= len(words):
                raise ConfigError(f"command {program} {word}: its value is missing")
            read[values[last]] = words[index]
        index += 1
    return ParsedOptions(values=read, end=index)


def _spelling(word: str, *, program: Starter) -> tuple[tuple[str, ...], str | None]:
    """The options in one word (several for `-uB`) and the value the last one holds in it."""
    flags, values = _OPTIONS[program]
    if word in flags or word in values:
        return (word,), None
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if name not in flags and name not in values and program != "python":
            every = {**flags, **values}
            matches = [option for option in every if option.startswith(name)]
            name = matches[0] if len({every[option] for option in matches}) == 1 else name
        if name in values or (name in flags and not equals):
            return (name,), value if equals else None
    else:
        for end in range(1, len(word)):
            option = f"-{word[end]}"
            if option in values:
                head = tuple(f"-{letter}" for letter in word[1:end])
                rest = word[end + 1 :]
                return (*head, option), rest or None
            if option not in flags or flags[option] == "module":
                break
        else:
            return tuple(f"-{letter}" for letter in word[1:]), None
    raise ConfigError(
        f"command {program} {word}: not a known option, so the script after it cannot be found; "
        f"see {program} --help"
    )
