"""`quartet tune --dry-run`: told, not started."""

import json
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from quartet_plugin.launchers import nemo_run
from quartet_plugin.launchers.megatron_words import arguments_in
from quartet_plugin.model.megatron_arguments import features_of
from quartet_plugin.tuner.config import TuneConfig, parse_config
from quartet_plugin.tuner.run_folder import create_run
from tests.cli.tuning import prepare


def dry_run(folder: Path, *flags: str, config: str = "run: fake\n", options: tuple[str, ...] = ()) -> int:
    words, command = prepare(folder, config=config)
    return main([*words, "--dry-run", *options, "--", *command, *flags])


def test_nothing_is_started_and_nothing_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "run: fake\nsearch: {tensor_parallel: [1, 2], schedule: zb-h1}\nstudy: {trials: 7, top_k: 2}\n"
    assert dry_run(tmp_path, "--secret-token", "abcdefgh", config=config) == 0
    text = capsys.readouterr().out
    for words in (
        "would be created",
        "-m quartet_plugin.megatron",
        "at most 7 plans, each 1 to 10 + 4 to 10 iterations",
        "15 launches: 2 plans and your command, in 5 rounds",
        "tensor_parallel 1, 2: devices that share each layer",
        "schedule zb-h1",
        "pipeline_parallel auto",
        "nothing was started",
    ):
        assert words in " ".join(text.split())
    assert "abcdefgh" not in text
    names = [line[10:].split(" ")[0] for line in text[text.index("\nsearch ") :].splitlines()]
    assert set(type(TuneConfig().search).model_fields) <= set(names)
    assert not (tmp_path / "runs").exists()


def test_programs_get_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = "run: fake\nsearch: {tensor_parallel: [1, 2]}\nstudy: {trials: 7, top_k: 2}\n"
    router = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01")
    flags = ("--num-experts", "4", *router, "--secret-token", "abcdefgh")
    assert dry_run(tmp_path, *flags, config=config, options=("--json",)) == 0
    text = capsys.readouterr().out
    assert "abcdefgh" not in text
    content = json.loads(text)
    assert content["schema_version"] == 1
    assert (content["state"], content["run"]) == ("new", str(tmp_path / "runs" / "fake"))
    assert (content["num_trials"], content["num_finalists"], content["num_final_launches"]) == (7, 2, 15)
    assert content["warmup"] == [1, 10]
    assert content["measure"] == [4, 10]
    assert content["is_local"]
    assert content["longest_s"] == content["deadline_s"] * (8 + content["max_final_launches"])
    axes = {axis["name"]: axis for axis in content["search"]}
    assert set(axes) == set(type(TuneConfig().search).model_fields)
    assert axes["tensor_parallel"]["choices"] == "1, 2"
    assert axes["tensor_parallel"]["meaning"].startswith("devices that share each layer")
    assert axes["micro_batch_size"]["kept_because"] == "moe_microbatch_loss"
    assert axes["pipeline_parallel"]["kept_because"] is None
    assert not (tmp_path / "runs").exists()


def test_a_search_itself_prints_no_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, command = prepare(tmp_path)
    assert main([*words, "--json", "--", *command]) == 2
    assert "--json: needs --dry-run" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_feature_that_keeps_an_axis_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    router = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", "0.01")
    assert dry_run(tmp_path, "--num-experts", "4", *router, "--mtp-num-layers", "1") == 0
    lines = {line[10:].split()[0]: line for line in capsys.readouterr().out.splitlines() if line[10:].strip()}
    assert "because of moe_microbatch_loss" in lines["micro_batch_size"]
    assert "because of mtp_tied_head" in lines["split"]
    assert "because" not in lines["forbid"]
    assert (
        dry_run(tmp_path, "--num-experts", "4", *router, config="run: fake\nsearch: {change_class: C}\n") == 0
    )
    lines = {line[10:].split()[0]: line for line in capsys.readouterr().out.splitlines() if line[10:].strip()}
    assert "because" not in lines["micro_batch_size"]


def test_features_are_read_from_flags_alone() -> None:
    flags = [
        "--num-experts",
        "4",
        "--mtp-num-layers",
        "0",
        "--fp8-format",
        "hybrid",
        "--context-parallel-size=2",
    ]
    assert features_of(arguments_in([*flags, "--dataloader-type", "cyclic"])) == [
        "context_parallel",
        "cyclic_data",
        "fp8",
        "moe",
        "moe_linear_bias",
    ]
    bare = features_of(arguments_in(["--num-experts", "4", "--disable-bias-linear"]))
    assert bare == ["moe", "no_linear_bias"]
    assert features_of(arguments_in(["--lr", "1e-4"])) == []


def test_a_run_to_resume_is_told_as_it_was_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, command = prepare(tmp_path)
    words = ["tune", "--run-dir", str(tmp_path / "runs"), "--name", "fake", "--resume"]
    assert main([*words, "--dry-run", "--", *command]) == 2
    assert "no run to resume; omit --resume" in capsys.readouterr().err
    begun = parse_config({"search": {"tensor_parallel": 1}, "study": {"trials": 7}}, where="q.yaml")
    create_run(tmp_path / "runs" / "fake", config=begun, command=command)
    config = (tmp_path / "runs/fake/config.json").read_bytes()
    for options, num_plans in ([], 7), (["--trials", "9"], 9):
        assert main([*words, "--dry-run", *options, "--", *command]) == 0
        text = capsys.readouterr().out
        assert "would be resumed" in text
        assert f"at most {num_plans} plans" in text
        assert "tensor_parallel" in text
        assert " 1: devices that share each layer" in text
    assert main([*words, "--dry-run", "--", *command, "--lr", "1"]) == 2
    assert "another command" in capsys.readouterr().err
    assert (tmp_path / "runs/fake/config.json").read_bytes() == config


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--launcher", "ssh", "--site", "s.yaml", "--trial-nodes", "2"],
            "trial.nodes: 2; the run was started",
        ),
        (["--launcher", "slurm"], "launcher: slurm; the run was started with local"),
        (["--site", "s.yaml"], "site: s.yaml; the run was started with None"),
        (["--nodes", "4"], "nodes: 4; the run was started with None"),
    ],
)
@pytest.mark.parametrize("start", [["--dry-run"], []])
def test_options_that_a_run_was_not_begun_with_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str, start: list[str]
) -> None:
    _, command = prepare(tmp_path)
    create_run(tmp_path / "runs" / "fake", config=TuneConfig(), command=command)
    words = ["tune", "--run-dir", str(tmp_path / "runs"), "--name", "fake", "--resume", *start]
    assert main([*words, *options, "--", *command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_only_a_run_with_measurements_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One whose baseline has only failed begins anew, as the search itself says."""
    folder = tmp_path / "runs" / "fake"
    attempt = folder / "trials" / "000000" / "attempt-1"
    attempt.mkdir(parents=True)
    # Without a result the tuner was killed, and its ranks may live.
    began = (None, "exists", "add --resume")
    for outcome, state, words in (
        began,
        ("CRASH", "new", "would be created"),
        ("OK", "exists", "add --resume"),
    ):
        if outcome is not None:
            (attempt / "result.json").write_text(json.dumps({"outcome": outcome}))
        assert dry_run(tmp_path) == 0
        assert words in capsys.readouterr().out
        assert dry_run(tmp_path, options=("--json",)) == 0
        assert json.loads(capsys.readouterr().out)["state"] == state


def test_what_a_search_refuses_a_dry_run_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run(tmp_path, config="run: fake\nsearch: {tensor_paralel: 2}\n") == 2
    assert "did you mean tensor_parallel" in capsys.readouterr().err
    assert main(["tune", "--dry-run", "--", "sbatch", "train.sh"]) == 2
    assert main(["tune", "--dry-run"]) == 2


def test_of_another_program_only_its_words_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--dry-run", "--", "bash", "train.sh"]) == 0
    shown = capsys.readouterr().out
    assert "baseline  bash train.sh\n" in shown
    assert "what the command's features keep" in shown


def test_a_launchers_line_names_the_first_attempts_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run's own folder, in digits too where an engine puts words together for a shell."""
    monkeypatch.setattr(nemo_run, "find_spec", lambda name: name)
    assert dry_run(tmp_path, config="run: fake\nlauncher: nemo-run\ndevice: cpu\n") == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("launcher"))
    digits = line.split("--hex ")[1].split()[0]
    assert bytes.fromhex(digits).decode() == str(
        tmp_path / "runs" / "fake" / "trials" / "000000" / "attempt-1" / "nodes" / "request.json"
    )
