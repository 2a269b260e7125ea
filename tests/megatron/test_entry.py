"""The drop-in entry under real torchrun: what passes through, what is measured, what is refused and how."""

import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import PlanError, UsageError
from quartet_plugin.megatron.entry import _runtime, use_cpu
from quartet_plugin.model.plan import write_plan
from quartet_plugin.model.schema import dump
from quartet_plugin.rank.entry_options import EntryOptions, read_command
from quartet_plugin.rank.rendezvous import AgreedRefusalError, RankEnv, Rendezvous
from quartet_plugin.rank.session import Session
from tests.megatron.entry_launch import MEGATRON_FLAGS, ROOT, SHAPE, Launch, launch, make_plan, write_trial
from tests.megatron.runtime.test_plan import custom_plan

PER_RANK = ("-m", "tests.megatron.entry_per_rank")
TROUBLED = ROOT / "tests" / "megatron" / "troubled_pretrain.py"
TINY = [*MEGATRON_FLAGS, "--quartet-device", "cpu"]


def test_words_are_told_apart() -> None:
    command = read_command(
        ["--quartet-device", "cpu", "-m", "a.b", "--x", "--quartet-plan=p", "--", "--quartet-trial", "t"]
    )
    assert command is not None
    assert (command.target, command.is_module) == ("a.b", True)
    assert command.arguments == ("--x", "--", "--quartet-trial", "t")
    assert (command.options.plan, command.options.trial) == (Path("p"), None)
    assert command.options.device == "cpu"
    assert read_command(["--help"]) is None


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no script"),
        (["-m"], "no module"),
        (["--num-layers", "2"], "no script"),
        (["x.py", "--quartet-plan"], "FILE"),
        (["x.py", "--quartet-plan="], "empty"),
        (["x.py", "--quartet-plam", "p"], "--quartet-plam"),
        (["x.py", "--quartet-device", "tpu"], "tpu"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part) as raised:
        read_command(words)
    assert "\n" not in str(raised.value)


def test_other_scripts_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'imported'\n")
    script = tmp_path / "other.py"
    script.write_text(
        "import sys, json, beside\n"
        "print('FOUND ' + json.dumps([__name__, sys.argv[1:], sys.path[0], beside.WORD]))\n"
        "assert 'megatron' not in sys.modules\n"
        "sys.exit(7)\n"
    )
    done = launch(1, ["--a", "--quartet-device", "cuda", "b"], script=script)
    found = next(line for line in done.output.splitlines() if line.startswith("FOUND "))
    assert json.loads(found.removeprefix("FOUND ")) == ["__main__", ["--a", "b"], str(tmp_path), "imported"]
    assert done.code != 0
    assert "exitcode  : 7" in done.output


def test_modules_run_as_python_runs_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys; print([__name__, *sys.argv[1:], 'torch' in sys.modules])\n"
    )
    command = [sys.executable, "-m", "quartet_plugin.megatron", "--quartet-device=cuda", "-m", "mine", "--x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['__main__', '--x', False]\n"


@pytest.mark.parametrize(
    "source", ["def f():\n    raise KeyError('mine')\n\nf()\n", "x = (\n", "import nowhere.at_all\n"]
)
def test_the_scripts_own_error_is_shown_as_python_shows_it(tmp_path: Path, source: str) -> None:
    script = tmp_path / "mine.py"
    script.write_text(source)
    shown = [
        subprocess.run([sys.executable, *ours, str(script)], cwd=ROOT, capture_output=True, text=True).stderr
        for ours in ([], ["-m", "quartet_plugin.megatron", "--quartet-device=cuda"])
    ]
    assert str(script) in shown[0]
    assert shown[1] == shown[0]


def test_help_shows_the_group() -> None:
    done = launch(1, ["--help", "--quartet-device", "cpu"])
    assert done.code == 0
    for word in ("--quartet-plan FILE", "--quartet-trial FILE", "--quartet-device", "--num-layers"):
        assert word in done.output


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """The user's command, measured."""
    folder = tmp_path_factory.mktemp("trial")
    path = write_trial(folder, warmup=1, measure=3)
    saved = folder / "saved"
    side_effects = ["--save", str(saved), "--save-interval=1", "--tensorboard-dir", str(folder / "board")]
    return launch(
        2,
        [*TINY, *side_effects, "--pipeline-model-parallel-size", "2", "--quartet-trial", str(path)],
        folder=folder,
    )


def test_trial_measures_and_leaves(trial: Launch) -> None:
    assert trial.code == 0, trial.output[-2000:]
    assert not trial.failures
    for rank, content in trial.ranks.items():
        assert [step["iteration"] for step in content["iterations"]] == [1, 2, 3, 4]
        assert all(step["iteration_s"] > 0 and not step["skipped"] for step in content["iterations"])
        assert (content["rank"], content["launch_rank"], content["plan_key"]) == (rank, rank, None)
        assert content["device"] == "cpu"
        assert content["peak_memory_bytes"] > 10_000_000
        assert trial.beats[rank]["phase"] == "done"
        assert trial.beats[rank]["iteration"] == 4
    assert [content["iterations"][0]["loss"] is None for content in trial.ranks.values()] == [True, False]
    assert trial.grad_norms()


def test_trial_describes_the_job(trial: Launch) -> None:
    job = trial.ranks[0]["job"]
    assert trial.ranks[1]["job"] is None
    assert job["shape"] == dump(SHAPE)
    assert job["layout"]["pipeline_parallel"] == 2
    assert job["split"] == {"transformer_layers_per_stage": [3, 3]}
    assert job["schedule"] == {"name": "1f1b", "group": None}
    assert (job["global_batch_size"], job["train_iters"], job["precision"]) == (8, 20, "fp32")
    assert job["features"] == []


def test_trial_leaves_out_side_effects(trial: Launch) -> None:
    neutralised = trial.ranks[0]["job"]["neutralised"]
    assert set(neutralised) == {"--save", "--save-interval", "--tensorboard-dir", "--eval-iters"}
    folder = Path(next(word for word in trial.output.split() if word.endswith("trial.json"))).parent
    assert sorted(path.name for path in folder.iterdir()) == [
        *("rank-0.beat.json", "rank-0.json", "rank-1.beat.json", "rank-1.json", "trial.json"),
    ]


def test_out_of_memory_is_recorded_and_raised(tmp_path: Path) -> None:
    path = write_trial(tmp_path)
    flags = [*TINY, "--pipeline-model-parallel-size", "2", "--quartet-trial", str(path)]
    done = launch(2, ["out-of-memory", *flags], script=TROUBLED, folder=tmp_path)
    assert done.code != 0
    failure = done.failures[1]
    assert (failure["kind"], failure["type"]) == ("out-of-memory", "OutOfMemoryError")
    assert failure["wanted_bytes"] == int(2.5 * 2**30)
    assert (failure["iteration"], failure["phase"], failure["exit_code"]) == (2, "measure", 1)
    assert any("out_of_memory" in line for line in failure["traceback"])
    assert "OutOfMemoryError: CUDA out of memory" in done.output


def test_stop_file_ends_all_ranks_alike(tmp_path: Path) -> None:
    path = write_trial(tmp_path, measure=15)
    flags = [*TINY, "--pipeline-model-parallel-size", "2", "--quartet-trial", str(path)]
    done = launch(2, ["stop", *flags], script=TROUBLED, folder=tmp_path)
    assert done.code == 0, done.output[-2000:]
    counts = {len(content["iterations"]) for content in done.ranks.values()}
    assert len(counts) == 1
    assert 3 <= counts.pop() <= 6


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--num-layers", "seven"], "argument --num-layers: invalid int value"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--pipeline-model-parallel-size", "4"], "is not divisible by total_model_size"),
    ],
)
def test_configuration_that_megatron_refuses(flags: list[str], part: str, tmp_path: Path) -> None:
    path = write_trial(tmp_path)
    done = launch(1, [*TINY, *flags, "--quartet-trial", str(path)], folder=tmp_path)
    assert done.code != 0
    assert done.failures[0]["kind"] == "refused", done.failures[0]
    assert part in done.failures[0]["message"]
    assert part in done.output


def test_damaged_plan_is_one_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(make_plan(split=(4, 2), pipeline=2), path=plan)
    plan.write_text(plan.read_text().replace('"num_layers": 6', '"num_layers": 7', 1))
    trial = write_trial(tmp_path)
    done = launch(2, [*TINY, "--quartet-plan", str(plan), "--quartet-trial", str(trial)], folder=tmp_path)
    assert len(done.told) == 1
    assert "digest" in done.told[0]
    assert "AgreedRefusalError" not in done.output
    # torchrun may end a rank before it has written why it refuses.
    assert done.failures
    assert {item["exit_code"] for item in done.failures.values()} == {2}
    assert {item["kind"] for item in done.failures.values()} == {"plan"}


def test_plan_for_another_job_is_refused_with_the_differences(tmp_path: Path) -> None:
    shape = replace(SHAPE, hidden_size=64, kv_channels=16, ffn_hidden_size=256)
    plan = make_plan(
        split=(4, 2),
        pipeline=2,
        data=2,
        shape=shape,
        made_for_shape=shape,
        framework_version="0.19.3",
        global_batch_size=16,
    )
    write_plan(plan, path=tmp_path / "plan.json")
    trial = write_trial(tmp_path)
    flags = [*TINY, "--quartet-plan", str(tmp_path / "plan.json"), "--quartet-trial", str(trial)]
    done = launch(2, flags, folder=tmp_path)
    assert len(done.told) == 1
    for part in (
        "framework_version 0.19.2 (plan: 0.19.3)",
        "world_size 2 (plan: 4)",
        "global_batch_size 8 (plan: 16)",
        "hidden_size 32 (plan: 64)",
    ):
        assert part in done.told[0]
    assert {item["exit_code"] for item in done.failures.values()} == {2}


def test_plan_for_another_vocabulary_is_refused(tmp_path: Path) -> None:
    shape = replace(SHAPE, vocab_size=256)
    write_plan(make_plan(split=(6,), shape=shape, made_for_shape=shape), path=tmp_path / "plan.json")
    done = launch(1, [*TINY, "--quartet-plan", str(tmp_path / "plan.json")])
    assert done.code != 0
    assert done.told == [
        "quartet: the plan was made for another job: vocab_size 128 (plan: 256); make one with `quartet tune`"
    ]


def test_ranks_with_different_plans_are_named(tmp_path: Path) -> None:
    for rank in range(3):
        split = (2, 3, 1) if rank == 1 else (3, 2, 1)
        write_plan(make_plan(split=split, pipeline=3), path=tmp_path / f"plan-{rank}.json")
    trial = write_trial(tmp_path)
    flags = ["--quartet-plan", str(tmp_path / "plan-{rank}.json"), "--quartet-trial", str(trial)]
    done = launch(3, [*TINY, *flags], entry=PER_RANK, folder=tmp_path)
    assert len(done.told) == 1
    assert "ranks 0, 2 digest" in done.told[0]
    assert "but rank 1 has digest" in done.told[0]
    assert {item["exit_code"] for item in done.failures.values()} == {2}


def test_start_without_torchruns_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = RankEnv.of({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(AgreedRefusalError, match="torchrun"):
        Rendezvous.open(place)


def test_layers_are_not_profiled_under_a_custom_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would replace the function that defers weight gradients."""
    command = read_command([*PER_RANK, *TINY])
    assert command is not None
    session = Session(command=command, rank_env=RankEnv.of({}), files=object())
    monkeypatch.setenv("QUARTET_PROFILE", "1")
    with pytest.raises(PlanError, match=r"QUARTET_PROFILE: .*zb-v.*omit --quartet-plan"):
        _runtime(session, custom_plan(), Namespace())
    assert _runtime(session, make_plan(split=(4, 2), pipeline=2), Namespace()) is None
    monkeypatch.delenv("QUARTET_PROFILE")
    assert _runtime(session, custom_plan(), Namespace(inprocess_restart=True)) is None


def test_importing_the_adapter_changes_nothing() -> None:
    code = (
        "import sys; before = list(sys.meta_path)\n"
        "import quartet_plugin.megatron.entry\n"
        "assert sys.meta_path == before and not {'torch', 'megatron', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("device", "is_trial", "is_on_cpu"),
    [("auto", False, False), ("auto", True, True), ("cpu", False, True), ("cuda", True, False)],
)
def test_only_what_trains_nothing_for_good_takes_the_cpu_unasked(
    monkeypatch: pytest.MonkeyPatch, device: Any, is_trial: bool, is_on_cpu: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = EntryOptions(device=device, trial=Path("trial.json") if is_trial else None)
    assert use_cpu(options) == is_on_cpu


def test_a_training_start_without_an_accelerator_is_refused_by_all_ranks_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    write_plan(make_plan(split=(5, 1), pipeline=2), path=tmp_path / "plan.json")
    done = launch(2, [*MEGATRON_FLAGS, "--quartet-plan", str(tmp_path / "plan.json")])
    assert done.code != 0
    lines = [line for line in done.output.splitlines() if "no accelerator is visible here" in line]
    assert len(lines) == 1
    assert "--quartet-device cpu" in lines[0]
