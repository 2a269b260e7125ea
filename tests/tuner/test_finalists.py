"""The final rounds' arithmetic: pairs, intervals and who may win."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.model.plan import Plan, ScheduleChoice, Split
from quartet_plugin.model.tensor_partition import partition_from_label
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.trial.request import Outcome, TrialResult
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.finalists import bootstrap_median, candidates, rank
from quartet_plugin.tuner.run_folder import TuningRun, create_run
from quartet_plugin.tuner.tune_result import TuneResult, command_text, write_best
from quartet_plugin.tuner.winner_choice import FinalistResult
from tests.model.plans import PLAN


def trial(number: int, *, value: float | None, repeats: int | None = None, layers: int = 6) -> FinishedTrial:
    plan = replace(PLAN, split=Split(transformer_layers_per_stage=(layers, 8 - layers)))
    verdict = "measured" if value is not None else "infeasible"
    record = TrialRecord(
        verdict="measured" if value is not None else "infeasible",
        outcome=verdict,
        reason="",
        attempt_id="",
        value=value,
        repeats=repeats,
    )
    return FinishedTrial(number=number, plan=plan, record=record)


def launch(seconds: float) -> TrialResult:
    return TrialResult(
        attempt_id="",
        plan_key=None,
        outcome=Outcome.OK,
        reason="",
        phase="done",
        iteration_s=(seconds, seconds, seconds),
        peak_memory_bytes=7,
        folder=Path(),
    )


def ranked(
    own: list[float], theirs: list[float], *, num_asked: int = 5, failed: Mapping[int, int] | None = None
) -> list[FinalistResult]:
    launches = {
        0: {at: launch(seconds) for at, seconds in enumerate(own)},
        3: {at: launch(seconds) for at, seconds in enumerate(theirs)},
    }
    baseline: Plan = trial(0, value=1.0, layers=4).plan
    return rank(
        [trial(3, value=1.0)],
        baseline=baseline,
        launches=launches,
        objective="tokens_per_s",
        seed=0,
        num_asked=num_asked,
        failed=failed or {},
    )


def test_candidates_are_the_best_plans_once_and_never_the_baseline() -> None:
    trials = [
        trial(0, value=100.0, layers=4),
        trial(1, value=99.0, layers=5),
        trial(2, value=None, layers=6),
        trial(3, value=120.0, layers=7),
        trial(4, value=120.0, layers=7, repeats=3),
        trial(5, value=130.0, layers=4),
        trial(6, value=60.0, layers=8),
        trial(7, value=110.0, layers=3),
    ]
    chosen = candidates(trials, baseline_value=100.0)
    assert [one.number for one in chosen] == [3, 7, 1]


def test_what_more_is_known_of_counts_before_a_lucky_launch() -> None:
    trials = [
        trial(0, value=100.0, layers=4),
        trial(1, value=150.0, layers=5),
        trial(2, value=120.0, layers=6),
        trial(3, value=110.0, layers=7),
    ]
    chosen = candidates(trials, baseline_value=100.0, posterior_means={1: 118.0, 3: 80.0})
    assert [one.number for one in chosen] == [2, 1, 3]


def test_ratios_are_inside_rounds_so_drift_does_not_count() -> None:
    drift = [1.0, 1.5, 2.0, 3.0, 1.2]
    one = ranked(drift, [seconds / 1.2 for seconds in drift])[0]
    assert one.comparison.round_ratios == pytest.approx([1.2] * 5)
    assert one.is_win
    assert one.comparison.speedup.low == pytest.approx(1.2, abs=0.01)
    assert one.comparison.plan.num_launches == 5
    assert one.comparison.plan.num_iterations == 15


def test_one_round_that_went_the_other_way_can_decide() -> None:
    assert not ranked([1.0] * 3, [0.9, 0.9, 1.1])[0].is_win
    assert not ranked([1.0] * 5, [1.0] * 5)[0].is_win


def test_one_slow_launch_takes_more_rounds_to_prove_a_lead() -> None:
    early = ranked([1.0] * 5, [1.1, 0.8, 0.8, 0.8, 0.8])[0]
    assert not early.is_win
    later = ranked([1.0] * 10, [1.1] + [0.8] * 9)[0]
    assert later.proven_after is not None
    assert later.proven_after > 5
    assert later.is_win


def test_a_proof_stays_and_the_interval_agrees_with_it() -> None:
    win = ranked([1.0, 1.01, 0.99, 1.0, 1.0], [0.9, 0.9, 0.91, 0.89, 0.9])[0]
    assert win.proven_after == 3
    assert win.comparison.speedup.low > 1.0
    assert win.comparison.confidence == 0.95


def test_a_finalist_that_failed_after_its_proof_is_not_ranked() -> None:
    assert ranked([1.0] * 4, [0.8] * 3)[0].is_win
    assert ranked([1.0] * 4, [0.8] * 3, failed={3: 3}) == []


def test_two_rounds_are_shown_and_prove_nothing() -> None:
    for own in ([1.0, 1.0], [1.0] * 5):
        few = ranked(own, [0.5, 0.5])[0]
        assert few.comparison.plan.num_launches == 2
        assert not few.is_win
    assert ranked([1.0] * 5, [0.5]) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9), st.integers(0, 100))
def test_intervals_hold_the_median_and_stay_inside_the_values(values: list[float], seed: int) -> None:
    found = bootstrap_median(values, seed=seed, num_resamples=400)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found == bootstrap_median(values, seed=seed, num_resamples=400)


def test_intervals_cover_the_true_median() -> None:
    import random

    generator = random.Random(0)
    hits = 0
    for at in range(200):
        sample = [generator.gauss(1.0, 0.05) for _ in range(10)]
        found = bootstrap_median(sample, seed=at, num_resamples=300)
        hits += found.low <= 1.0 <= found.high
    assert hits >= 175


def a_run(folder: Path, *words: str, device: str = "cpu") -> TuningRun:
    return create_run(
        folder / "r", config=parse_config({"run": "r", "device": device}, where="x"), command=words
    )


@pytest.mark.parametrize(("node_class", "is_named"), [("cpu 2 cores x2", True), ("NVIDIA H200 x2", False)])
def test_a_winner_of_a_machine_without_accelerators_trains_on_its_processor(
    tmp_path: Path, node_class: str, is_named: bool
) -> None:
    nodes = tuple(replace(node, node_class=node_class) for node in PLAN.made_for.nodes)
    plan = replace(PLAN, made_for=replace(PLAN.made_for, nodes=nodes))
    run = a_run(tmp_path, "torchrun", "x.py", device="auto")
    text = command_text(plan, run=run, path=run.folder.best_plan)
    assert ("--device cpu" in text) is is_named


@pytest.mark.parametrize(
    ("launcher", "is_of_slurm"), [("slurm", True), ("slurm-batch", True), ("ssh", False), ("ray", False)]
)
def test_a_winner_trains_through_slurm_only_where_it_was_tuned_there(
    tmp_path: Path, launcher: str, is_of_slurm: bool
) -> None:
    run = a_run(tmp_path, "torchrun", "x.py")
    run = replace(run, config=run.config.model_copy(update={"launcher": launcher}))
    text = command_text(PLAN, run=run, path=run.folder.best_plan)
    assert ("--launcher slurm" in text) is is_of_slurm
    assert ("on every node" in text) is not is_of_slurm


ACCEPTED = ("a.f@0123456789abcdef", "a.g@fedcba9876543210")


def test_a_winner_trains_with_the_changed_sources_that_its_run_accepted(tmp_path: Path) -> None:
    """The script runs in a shell that knows nothing of the search's flag, and accepts no later change."""
    import subprocess

    run = a_run(tmp_path, "torchrun", "x.py")
    layout = replace(
        PLAN.layout,
        tensor_parallel=2,
        pipeline_parallel=1,
        sequence_parallel=True,
        tensor_partition=partition_from_label("rings"),
    )
    split = replace(PLAN.split, transformer_layers_per_stage=(8,))
    plan = replace(PLAN, layout=layout, split=split, schedule=ScheduleChoice(name="no-pipelining"))
    variable = "QUARTET_ACCEPT_CHANGED_SOURCE"
    assert variable not in command_text(plan, run=run, path=run.folder.best_plan)
    event = {"time": 1, "kind": "accepted-source", "functions": ACCEPTED}
    run.folder.events_file.write_text(json.dumps(event) + "\n")
    assert variable not in command_text(PLAN, run=run, path=run.folder.best_plan)
    text = command_text(plan, run=run, path=run.folder.best_plan)
    assert "--accept-changed-source" not in text
    shown = tmp_path / "shown.sh"
    shown.write_text(text.replace("exec quartet", f"exec printenv {variable} #"))
    done = subprocess.run(["sh", str(shown)], capture_output=True, check=True)
    assert done.stdout.decode().strip().split(",") == [*ACCEPTED]


def test_the_launcher_of_the_trials_is_named_with_its_site(tmp_path: Path) -> None:
    """In a comment, whatever the path holds."""
    import subprocess

    run = a_run(tmp_path, "torchrun", "x.py")
    update = {"launcher": "ssh", "site": "a\ntouch owned\n.yaml"}
    run = replace(run, config=run.config.model_copy(update=update))
    text = command_text(PLAN, run=run, path=run.folder.best_plan)
    comments = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    words = shlex.split(
        "\n".join(comments[comments.index(next(w for w in comments if "quartet train" in w)) :])
    )
    assert words[-6:-1] == ["--launcher", "ssh", "--nodes", str(len(PLAN.made_for.nodes)), "--site"]
    assert words[-1] == str(run.cwd / update["site"])
    script = text.replace("exec quartet", "exec true")
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True)
    assert not (run.cwd / "owned").exists()


def test_the_shell_line_says_exactly_the_users_words(tmp_path: Path) -> None:
    import subprocess

    words = ("torchrun", "--nproc-per-node", "2", "a b.py", "--x", "$(touch owned)", "it's", "new\nline", "")
    run = a_run(tmp_path, *words)
    text = command_text(PLAN, run=run, path=run.folder.best_plan)
    shown = tmp_path / "shown.sh"
    shown.write_text(text.replace("exec quartet", "exec printf '%s\\0'"))
    done = subprocess.run(["sh", str(shown)], capture_output=True, check=True)
    given = done.stdout.decode().split("\0")[:-1]
    assert given[given.index("--") + 1 :] == list(words)
    assert given[:5] == ["train", "--plan", str(run.folder.best_plan), "--device", "cpu"]
    assert not Path("owned").exists()


def test_without_a_winner_no_plan_is_left(tmp_path: Path) -> None:
    run = a_run(tmp_path, "python", "x.py")
    win = ranked([1.0] * 5, [0.5] * 5)[0]
    found = TuneResult(
        objective="tokens_per_s", seed=0, baseline=PLAN, trials=(), rankings=(win,), winner=win
    )
    plan = write_best(found, run=run)
    assert plan is not None
    assert plan.measurement == win.comparison
    assert run.folder.best_plan.is_file()
    assert run.folder.best_command.is_file()
    assert write_best(replace(found, winner=None), run=run) is None
    assert not run.folder.best_plan.exists()
    assert not run.folder.best_command.exists()
