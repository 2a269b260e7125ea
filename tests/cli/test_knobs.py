"""`quartet knobs`: every knob in general, for a command's flags, and for a run."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.space import knob_table
from quartet_plugin.space.knobs.registry import KNOBS
from tests.space.knobs.made_up import ROPE_FUSION

DENSE = """
    --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --vocab-size 512 --micro-batch-size 2 --global-batch-size 16
"""
EXPERTS = f"""
    {DENSE} --num-experts 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
"""
RUN = Path(__file__).parents[1] / "golden" / "run_0.1.0"


def test_every_knob_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["knobs"]) == 0
    shown = capsys.readouterr().out
    for knob in KNOBS:
        assert f"{knob.name} (class {knob.change_class}; " in shown
        assert knob.meaning in shown
    assert "--overlap-grad-reduce" in shown


def test_flags_of_a_command_are_read_and_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--tensor-model-parallel-size=2", "--micro-batch-size", "4", "--overlap-grad-reduce"]
    flags += ["--ddp-bucket-size", "4000", "--moe-token-dispatcher-type", "alltoall"]
    assert main(["knobs", "--json", "--", "torchrun", "--nproc-per-node", "2", "none.py", *flags]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["knobs"]}
    assert rows["tensor_parallel"]["value"] == "2"
    assert rows["micro_batch_size"]["value"] == "4"
    assert rows["overlap_grad_reduce"]["value"] == "on"
    assert rows["overlap_param_gather"]["value"] == "off"
    assert rows["ddp_bucket_size"]["value"] == "4000"
    assert rows["moe_token_dispatcher"]["value"] == "alltoall"
    assert rows["split"]["value"] is None


@pytest.mark.parametrize(("flags", "value"), [([], "on"), (["--no-rope-fusion"], "off")])
def test_a_flag_may_turn_a_switch_off(
    flags: list[str], value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(knob_table, "KNOBS", (ROPE_FUSION,))
    assert main(["knobs", "--json", "--", "torchrun", "none.py", *flags]) == 0
    (row,) = json.loads(capsys.readouterr().out)["knobs"]
    assert row["value"] == value


def test_a_command_has_its_choices_and_why_a_value_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    flags = shlex.split(EXPERTS)
    command = ["torchrun", "--nproc-per-node", "4", "none.py", *flags]
    assert main(["knobs", "--json", "--", *command]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["knobs"]}
    assert (rows["pipeline_parallel"]["value"], rows["data_parallel"]["value"]) == ("1", "4")
    assert rows["pipeline_parallel"]["choices"] == ["1", "2", "4"]
    assert rows["micro_batch_size"]["state"] == "kept: moe_microbatch_loss"
    assert "Transformer Engine" in rows["context_parallel"]["state"]
    assert main(["knobs", "--json", "--", *command, "--hybrid-layer-pattern", "M*E*"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["knobs"]}
    # Every device needs a layer with experts whose losses are logged.
    assert rows["pipeline_parallel"]["choices"] == ["1"]
    assert main(["knobs", "--", *command, "--hybrid-layer-pattern", "MG"]) == 0
    shown = capsys.readouterr().out
    assert "known after the baseline of a run (`quartet knobs RUN`): --hybrid-layer-pattern: 'MG'" in shown


def test_a_command_that_its_stages_do_not_divide_has_its_flags_values_and_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = shlex.split(DENSE.replace("--num-layers 8", "--num-layers 7"))
    command = ["torchrun", "--nproc-per-node", "4", "none.py", *flags, "--pipeline-model-parallel-size", "2"]
    assert main(["knobs", "--", *command]) == 0
    shown = capsys.readouterr().out
    assert "shape, now 7 (class D; " in shown
    assert "(`quartet knobs RUN`): 7 layers cannot be divided evenly over 2 stages" in shown


def test_a_run_has_its_values_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    assert main(["knobs", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "pipeline_parallel, now 2 (class A; tuned: 1, 2)" in shown
    assert "overlap_grad_reduce, now - (class B; kept: the framework did not report it)" in shown
    assert "zero_stage" not in shown


def test_a_run_and_a_command_are_one_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["knobs", str(RUN), "--", "torchrun", "none.py"]) == 2
    assert "both a run and a command are given; give only one" in capsys.readouterr().err
