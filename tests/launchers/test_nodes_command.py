"""The user's command on several nodes, and where a run's trials start."""

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.nodes_command import on_nodes
from quartet_plugin.launchers.placement import Placement


def test_torchrun_is_one_training_of_all_nodes() -> None:
    parsed = parse_command(["torchrun", "--nproc-per-node", "4", "train.py"], environment={})
    spanned = on_nodes(parsed, num_nodes=3)
    assert (spanned.num_nodes, spanned.num_processes) == (3, 12)
    # The words stay: the nodes are joined by variables, and by the port that all of them are given.
    assert spanned.wrapped(port=1234)[:6] == [
        "torchrun",
        "--nproc-per-node",
        "4",
        "--master-port",
        "1234",
        "-m",
    ]


def test_a_command_that_names_the_nodes_itself_stays() -> None:
    parsed = parse_command(["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "train.py"], environment={})
    assert on_nodes(parsed, num_nodes=2) == parsed


def test_a_program_that_is_not_read_starts_on_each_node() -> None:
    spanned = on_nodes(parse_command(["bash", "train.sh"], environment={}), num_nodes=2)
    assert (spanned.num_nodes, spanned.num_processes) == (2, None)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["torchrun", "--nnodes", "4", "t.py"], r"--nnodes 4, and trial.nodes is 2; omit --nnodes"),
        (["torchrun", "--nnodes", "1:4", "t.py"], "a range of nodes"),
        (
            ["torchrun", "--nnodes", "1", "t.py"],
            r"--nnodes 1: stays on one node, and trial.nodes is 2; omit it",
        ),
        (["torchrun", "--standalone", "t.py"], "torchrun --standalone: stays on one node"),
        (["env", "PET_STANDALONE=1", "torchrun", "t.py"], "torchrun --standalone: stays on one node"),
        (["torchrun", "--rdzv-backend", "c10d", "t.py"], "torchrun --rdzv-backend c10d: stays on one node"),
        (["torchrun", "--node_rank=0", "t.py"], "torchrun --node-rank 0: stays on one node"),
        (["torchrun", "--master-addr", "localhost", "t.py"], "--master-addr localhost: stays on one node"),
        (["python", "t.py"], "starts one process: write it with torchrun"),
        (["deepspeed", "t.py", "--deepspeed_config", "d"], "write the command with torchrun"),
    ],
)
def test_what_cannot_span_the_nodes_is_refused_with_the_fix(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        on_nodes(parse_command(words, environment={}), num_nodes=2)


@pytest.mark.parametrize(
    "options", [["--nnodes", "1"], ["--standalone"], ["--rdzv-backend", "c10d"], ["--node-rank", "0"]]
)
def test_an_option_for_one_node_is_right_on_one_node(options: list[str]) -> None:
    parsed = parse_command(["torchrun", *options, "t.py"], environment={})
    assert on_nodes(parsed, num_nodes=1).num_nodes == 1


@pytest.mark.parametrize(
    "options", [["--rdzv-backend", "c10d", "--rdzv-endpoint", "head:1"], ["--master-addr", "h"]]
)
def test_a_place_that_all_nodes_reach_joins_them(options: list[str]) -> None:
    parsed = parse_command(["torchrun", *options, "t.py"], environment={})
    assert on_nodes(parsed, num_nodes=2).num_nodes == 2


def test_this_machine_is_one_node() -> None:
    parsed = parse_command(["torchrun", "t.py"], environment={})
    assert Placement().command(parsed) is parsed
    with pytest.raises(ConfigError, match="this machine is one node: choose a launcher"):
        Placement(num_nodes=2).command(parsed)


def test_the_device_is_said_where_trials_run_elsewhere() -> None:
    with pytest.raises(ConfigError, match=r"write `device: cuda`, or cpu, into a q.yaml .* --config q.yaml"):
        Placement(launcher="slurm").slices(at_once=1, device="auto")


def test_a_misspelt_launcher_is_named_before_the_device() -> None:
    with pytest.raises(ConfigError, match=r"launcher: 'slurm_batch'; .*did you mean slurm-batch\?"):
        Placement(launcher="slurm_batch").slices(at_once=1, device="auto")
