"""The options of torchrun and python: which take a value, so that the script is found among the words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quartet_plugin.errors import ConfigError

# Torchrun 2.11's options without and with a value, by their spelling -> their name. A contract test
# compares both tables with torch's own parser.
TORCHRUN_FLAGS: dict[str, str] = {
    "-h": "help",
    "--help": "help",
    "--standalone": "standalone",
    "-m": "module",
    "--module": "module",
    "--no-python": "no_python",
    "--no_python": "no_python",
    "--run-path": "run_path",
    "--run_path": "run_path",
    "--virtual-local-rank": "virtual_local_rank",
    "--virtual_local_rank": "virtual_local_rank",
    "--use-env": "use_env",
    "--use_env": "use_env",
}
_TORCHRUN_VALUE_NAMES = (
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
)
TORCHRUN_VALUES: dict[str, str] = {
    **{f"--{name}": name for name in _TORCHRUN_VALUE_NAMES},
    **{f"--{name.replace('_', '-')}": name for name in _TORCHRUN_VALUE_NAMES},
    "-r": "redirects",
    "-t": "tee",
}
# DeepSpeed 0.19's launcher; a contract test compares both tables with its own parser.
DEEPSPEED_FLAGS: dict[str, str] = {
    "-h": "help",
    "--help": "help",
    "--module": "module",
    "--no_python": "no_python",
    "--no_local_rank": "no_local_rank",
    "--no_ssh": "no_ssh",
    "--no_ssh_check": "no_ssh_check",
    "--force_multi": "force_multi",
    "--save_pid": "save_pid",
    "--bind_cores_to_rank": "bind_cores_to_rank",
    "-q": "quiet",
    "--quiet": "quiet",
}
_DEEPSPEED_VALUE_NAMES = (
    "hostfile",
    "include",
    "exclude",
    "num_nodes",
    "num_gpus",
    "num_accelerators",
    "master_port",
    "master_addr",
    "node_rank",
    "launcher",
    "launcher_args",
    "enable_each_rank_log",
    "autotuning",
    "bind_core_list",
    "ssh_port",
    "venv_script",
    "log_level",
)
DEEPSPEED_VALUES: dict[str, str] = {
    **{f"--{name}": name for name in _DEEPSPEED_VALUE_NAMES},
    "-H": "hostfile",
    "-i": "include",
    "-e": "exclude",
}
PYTHON_FLAGS: dict[str, str] = {f"-{letter}": letter for letter in "bBdEhiIOPqsSuvVx?"}
PYTHON_VALUES: dict[str, str] = {
    "-W": "warning",
    "-X": "implementation",
    "--check-hash-based-pycs": "check_hash_based_pycs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOptions:
    """The options that were read: `found[name]` is the last value ("" for a flag), `end` the next word."""

    found: Mapping[str, str]
    end: int


def read_options(
    words: Sequence[str],
    at: int,
    *,
    flags: Mapping[str, str],
    values: Mapping[str, str],
    prefixes: bool,
    program: str,
) -> ParsedOptions:
    """Read options from `words[at]` up to the first word that is none.

    `prefixes` allows unambiguous abbreviations of long options, as argparse does. Raises ConfigError for
    an option that is not known, or lacks its value: the script cannot be found behind it for certain.
    """
    found: dict[str, str] = {}
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        word = words[at]
        if program == "python" and word in ("-m", "-c"):
            found["module" if word == "-m" else "command"] = ""
            at += 1
            break  # what follows is the program, and its arguments
        spelling, inline = _spelling(word, flags=flags, values=values, prefixes=prefixes, program=program)
        for one in spelling[:-1]:
            found[flags[one]] = ""
        last = spelling[-1]
        if last in flags:
            found[flags[last]] = ""
        elif inline is not None:
            found[values[last]] = inline
        else:
            at += 1
            if at >= len(words):
                raise ConfigError(f"command {program} {word}: its value is missing")
            found[values[last]] = words[at]
        at += 1
    return ParsedOptions(found=found, end=at)


def _spelling(
    word: str, *, flags: Mapping[str, str], values: Mapping[str, str], prefixes: bool, program: str
) -> tuple[tuple[str, ...], str | None]:
    """The options in one word (several for `-uB`) and the value the last one holds in it."""
    if word in flags or word in values:
        return (word,), None
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        if name not in flags and name not in values and prefixes:
            every = {**flags, **values}
            matches = [one for one in every if one.startswith(name)]
            name = matches[0] if len({every[one] for one in matches}) == 1 else name
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
        f"command {program} {word}: not an option that is known here, so the script cannot be found behind "
        f"it; see {program} --help"
    )
