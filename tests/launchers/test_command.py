"""The user's command is read as torchrun and python read it, and wrapped without touching its words."""

import ast
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import Command, parse_command
from quartet_plugin.launchers.starter_options import (
    DEEPSPEED_FLAGS,
    DEEPSPEED_VALUES,
    PYTHON_FLAGS,
    TORCHRUN_FLAGS,
    TORCHRUN_VALUES,
)


def parse(text: str, **environment: str) -> Command:
    """A command line, as a shell splits it."""
    return parse_command(shlex.split(text), environment=environment)


def wrapped(text: str, *flags: str, port: int | None = None) -> str:
    """The wrapped command line."""
    return shlex.join(parse(text).wrapped(flags, port=port))


@pytest.mark.parametrize(
    ("given_words", "expected"),
    [
        (
            "torchrun --nproc-per-node 2 a.py --x 1",
            "torchrun --nproc-per-node 2 -m quartet_plugin.megatron a.py --x 1 --quartet-plan p",
        ),
        (
            "/opt/v/bin/torchrun --standalone -r3 -t 3 --nproc_per_node=2 a.py",
            "/opt/v/bin/torchrun --standalone -r3 -t 3 --nproc_per_node=2 -m quartet_plugin.megatron a.py "
            "--quartet-plan p",
        ),
        (
            "torchrun --nproc-per-node 2 -m pkg.mod -m --nproc-per-node 3",
            "torchrun --nproc-per-node 2 -m quartet_plugin.megatron -m pkg.mod -m --nproc-per-node 3 "
            "--quartet-plan p",
        ),
        (
            "torchrun -m --nproc-per-node 2 pkg.mod",
            "torchrun -m --nproc-per-node 2 quartet_plugin.megatron -m pkg.mod --quartet-plan p",
        ),
        ("python -u a.py -u", "python -u -m quartet_plugin.megatron a.py -u --quartet-plan p"),
        (
            "python3.12 -uB -X dev a.py",
            "python3.12 -uB -X dev -m quartet_plugin.megatron a.py --quartet-plan p",
        ),
        ("python -m pkg.mod x", "python -m quartet_plugin.megatron -m pkg.mod x --quartet-plan p"),
        (
            "python -m torch.distributed.run --nproc-per-node 4 a.py",
            "python -m torch.distributed.run --nproc-per-node 4 -m quartet_plugin.megatron a.py "
            "--quartet-plan p",
        ),
        (
            "env A=b C= torchrun a.py",
            "env A=b C= torchrun -m quartet_plugin.megatron a.py --quartet-plan p",
        ),
        (
            "torchrun -m quartet_plugin.megatron a.py --x",
            "torchrun -m quartet_plugin.megatron a.py --x --quartet-plan p",
        ),
        (
            "torchrun a.py --save c -- key=value",
            "torchrun -m quartet_plugin.megatron a.py --save c --quartet-plan p -- key=value",
        ),
        (
            "python -m quartet_plugin.megatron -m pkg.mod",
            "python -m quartet_plugin.megatron -m pkg.mod --quartet-plan p",
        ),
    ],
)
def test_wrapping_adds_our_words_and_leaves_the_users(given_words: str, expected: str) -> None:
    assert wrapped(given_words, "--quartet-plan", "p") == expected


@pytest.mark.parametrize(
    ("text", "port_words"),
    [
        ("torchrun a.py", "--master-port 7"),
        ("torchrun --rdzv-backend c10d a.py", "--rdzv-endpoint localhost:7"),
        ("torchrun --master-port 29500 a.py", ""),
        ("torchrun --master_port=29500 a.py", ""),
        ("torchrun --standalone a.py", ""),
        ("torchrun --rdzv-endpoint h:1 a.py", ""),
        ("torchrun --nnodes 2 a.py", ""),
        ("torchrun --nnodes 1:2 a.py", ""),
        ("torchrun --rdzv-backend etcd a.py", ""),
        ("env PET_MASTER_PORT=4 torchrun a.py", ""),
        ("env PET_STANDALONE=1 torchrun a.py", ""),
        ("python a.py", ""),
    ],
)
def test_a_free_port_is_named_only_where_the_user_named_none(text: str, port_words: str) -> None:
    with_port = parse(text).wrapped((), port=7)
    without = parse(text).wrapped(())
    added = [word for word in with_port if word not in without]
    assert " ".join(added) == port_words
    assert (parse(text).port_flag is None) == (port_words == "")


@pytest.mark.parametrize(
    ("text", "processes", "nodes"),
    [
        ("torchrun a.py", 1, 1),
        ("torchrun --nproc-per-node 4 a.py", 4, 1),
        ("torchrun --nproc-per-node=4 --nnodes 2 a.py", 8, 2),
        ("torchrun --nnodes 2:2 a.py", 2, 2),
        ("torchrun --nnodes 1:4 a.py", None, None),
        ("torchrun --nproc-per-node auto a.py", None, 1),
        ("torchrun --nproc-per-node gpu a.py", None, 1),
        ("env PET_NPROC_PER_NODE=3 torchrun a.py", 3, 1),
        ("torchrun --nproc 2 a.py", 2, 1),
        ("python a.py", 1, 1),
    ],
)
def test_the_number_of_processes(text: str, processes: int | None, nodes: int | None) -> None:
    command = parse(text)
    assert (command.num_processes, command.num_nodes) == (processes, nodes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("deepspeed --num_gpus 2", ("no script",)),
        ("deepspeed --num_gpus two a.py", ("'two'", "number above 0")),
        ("deepspeed --no_python a.sh", ("--no_python", "Python script")),
        ("deepspeed --autotuning tune a.py", ("--autotuning", "not supported")),
        ("sbatch job.sh", ("sbatch", "only queues a job")),
        ("ipython a.py", ("ipython", "use python")),
        ("dir/", ("'dir/'", "no program")),
        ("A=b torchrun a.py", ("A=b", "env A=")),
        ("env -i torchrun a.py", ("env -i", "NAME=VALUE")),
        ("env A=b", ("no program",)),
        ("python -c pass", ("python -c", "script")),
        ("python -", ("python", "script")),
        ("python", ("no script",)),
        ("torchrun --nproc-per-node 2", ("no script",)),
        ("torchrun --nproc-per-node", ("value is missing",)),
        ("torchrun --nproc-per-node two a.py", ("'two'", "number above 0")),
        ("torchrun --nproc-per-node 0 a.py", ("'0'", "number above 0")),
        ("torchrun --nnodes 0 a.py", ("--nnodes", "'0'")),
        ("torchrun --frobnicate 1 a.py", ("--frobnicate",)),
        ("torchrun --r a.py", ("--r",)),
        ("torchrun --no-python ./a.out", ("--no-python", "Python script")),
        ("torchrun --run-path /a.py", ("--run-path",)),
        ("torchrun --help", ("--help",)),
        ("torchrun -- a.py", ("--", "script")),
        ("torchrun -m quartet_plugin.megatron", ("no script",)),
        ("torchrun -m quartet_plugin.megatron --x", ("no script",)),
    ],
)
def test_what_is_not_supported_is_named_in_one_line(text: str, words: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_an_empty_command_and_nul_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        parse_command([])
    with pytest.raises(ConfigError, match="NUL"):
        parse_command(["torchrun", "a\0b"])


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


@settings(deadline=None, max_examples=200)
@given(
    options=st.lists(
        st.sampled_from(
            ["--standalone", "--tee 3", "-r 3", "--nproc_per_node=2", "--role=x", "--max-restarts 0"]
        ),
        max_size=5,
    ),
    is_module=st.booleans(),
    arguments=st.lists(WORDS, max_size=6),
    flags=st.lists(WORDS, max_size=3),
    port=st.none() | st.integers(1, 65535),
)
def test_the_users_words_stay_in_order(
    options: list[str], is_module: bool, arguments: list[str], flags: list[str], port: int | None
) -> None:
    before = [word for option in options for word in option.split()]
    words = ["torchrun", *before, *(["-m", "pkg.mod"] if is_module else ["a.py"]), *arguments]
    argv = parse_command(words, environment={}).wrapped(flags, port=port)
    assert argv[len(argv) - len(flags) :] == flags
    rest = iter(argv[: len(argv) - len(flags)])
    assert all(word in rest for word in words), "a word is missing, or out of order"
    again = parse_command(argv[: len(argv) - len(flags)], environment={})
    assert again.is_wrapped
    assert again.wrapped(()) == argv[: len(argv) - len(flags)]


@pytest.mark.parametrize(
    "text",
    [
        "bash train.sh --lr 1",
        "env A=b bash -c 'torchrun a.py'",
        "./train.sh",
        "make train",
        "srun --ntasks 8 python a.py",
        "mpirun -n 2 python a.py",
        "accelerate launch a.py",
        "ft_launcher --nproc-per-node 2 a.py",
        "python -m accelerate.commands.launch a.py",
        "python -m torch.distributed.launch --nproc-per-node 2 a.py",
    ],
)
def test_other_programs_are_started_as_they_are(text: str) -> None:
    command = parse(text)
    assert (command.starter, command.num_processes, command.num_nodes) == ("other", None, 1)
    assert command.words == tuple(shlex.split(text))
    assert (command.arguments, command.port_flag) == ((), None)
    assert command.program == shlex.split(text)[2 if text.startswith("env") else 0]


@pytest.mark.parametrize(
    ("code", "is_launcher"),
    [
        ("import subprocess\nsubprocess.run(['torchrun', 'train.py'])\n", True),
        ("os.system('A=1 exec /opt/bin/torchrun --nproc-per-node 2 train.py')", True),
        ("os.system(f'torchrun --nproc-per-node {n} train.py')", True),
        ("subprocess.run([sys.executable, '-m', 'torch.distributed.run', 'train.py'])", True),
        ("os.system('python -u -m torch.distributed.launch train.py')", True),
        ("from torch.distributed.run import main", True),
        ("from torch.distributed import launch", True),
        ("import deepspeed.launcher.runner", True),
        ("from megatron.training import pretrain", False),
        (
            '"""Run it with `torchrun train.py`.\n\n    torchrun train.py\n"""\n# torchrun\nimport torch',
            False,
        ),
        ("def f():\n    'torchrun train.py'\n", False),
        ("raise SystemExit('start this script with torchrun')", False),
        ("import torch.distributed as dist", False),
        ("torchrun = 1", False),
        ("this is no Python: torchrun", False),
    ],
)
def test_a_python_script_that_starts_torchrun_is_a_launcher(
    tmp_path: Path, code: str, is_launcher: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
    assert parse(f"python -u {script}").starter == ("other" if is_launcher else "python")


def test_a_script_is_read_from_the_folder_that_the_command_starts_in(tmp_path: Path) -> None:
    (tmp_path / "bridge.py").write_text("from megatron.bridge import AutoBridge")
    (tmp_path / "start.py").write_text("import subprocess\nsubprocess.run(['torchrun', 'x.py'])")
    assert parse_command(["torchrun", "bridge.py"], cwd=tmp_path).entry == "quartet_plugin.bridge"
    assert parse_command(["deepspeed", "x.py"], cwd=tmp_path).entry == "quartet_plugin.deepspeed"
    assert parse_command(["python", "start.py"], cwd=tmp_path).starter == "other"


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        WORDS | st.sampled_from(["torchrun", "python", "-m", "env", "--", "-c", "A=b", "a.py"]), max_size=6
    )
)
@example(["deepspeed", "0"])
def test_any_words_are_a_command_or_one_line(words: list[str]) -> None:
    try:
        command = parse_command(words, environment={})
    except ConfigError as error:
        message = str(error)
    else:
        message = "-"
        assert command.words == tuple(words)
        assert command.starter == "other" or command.entry in command.wrapped(())
    assert len(message.splitlines()) == 1


def test_the_table_is_torchruns_own() -> None:
    """In a process of its own: torch takes seconds to import and this room does without it."""
    program = (
        "import json\nfrom torch.distributed.run import get_args_parser\n"
        "print(json.dumps([[a.option_strings, a.dest, a.nargs == 0] for a in get_args_parser()._actions]))"
    )
    ran = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    flags: dict[str, str] = {}
    values: dict[str, str] = {}
    for spellings, name, is_flag in json.loads(ran.stdout.splitlines()[-1]):
        (flags if is_flag else values).update(dict.fromkeys(spellings, name))
    ours = {one: name for one, name in TORCHRUN_FLAGS.items() if name != "use_env"}
    assert ours == flags
    assert values == TORCHRUN_VALUES


@pytest.mark.parametrize("flag", sorted(set(PYTHON_FLAGS) - {"-?", "-h", "-V", "-i", "-x"}))
def test_pythons_flags_take_no_value(flag: str) -> None:
    ran = subprocess.run(
        [sys.executable, flag, "-c", "print('ran')"], capture_output=True, text=True, check=False
    )
    assert "ran" in ran.stdout


@pytest.mark.parametrize(
    ("text", "processes", "wrapped"),
    [
        (
            "deepspeed --num_gpus 2 a.py --x",
            2,
            "deepspeed --num_gpus 2 --master_port 1 --module quartet_plugin.deepspeed a.py --x --y",
        ),
        (
            "deepspeed --master_port 7 --module pkg.train --x",
            None,
            "deepspeed --master_port 7 --module quartet_plugin.deepspeed -m pkg.train --x --y",
        ),
        (
            "torchrun --nproc-per-node 2 a.py --deepspeed_config ds.json",
            2,
            "torchrun --nproc-per-node 2 --master-port 1 -m quartet_plugin.deepspeed "
            "a.py --deepspeed_config ds.json --y",
        ),
        (
            "deepspeed --num_nodes 2 --num_gpus 4 a.py",
            8,
            "deepspeed --num_nodes 2 --num_gpus 4 --module quartet_plugin.deepspeed a.py --y",
        ),
    ],
)
def test_deepspeed_commands_are_wrapped_for_its_adapter(
    text: str, processes: int | None, wrapped: str
) -> None:
    command = parse(text)
    assert command.num_processes == processes
    assert command.wrapped(["--y"], port=1) == shlex.split(wrapped)
    again = parse(shlex.join(command.wrapped()))
    assert again.is_wrapped
    assert again.wrapped(["--y"]) == [*command.wrapped(), "--y"]


def test_the_options_of_the_deepspeed_launcher_are_its_own() -> None:
    parser_source = importlib.util.find_spec("deepspeed")
    assert parser_source is not None
    assert parser_source.origin is not None
    source = (
        Path(parser_source.origin).with_name("launcher").joinpath("runner.py").read_text(encoding="utf-8")
    )
    tree = ast.parse(source)
    spellings = {
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("-")
    }
    assert spellings | {"-h", "--help"} == set(DEEPSPEED_FLAGS) | set(DEEPSPEED_VALUES)
