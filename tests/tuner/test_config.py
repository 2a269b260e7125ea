"""q.yaml: the three forms of every axis, and one line for whatever else is in the file."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.tuner.config import (
    TuneConfig,
    default_run_name,
    parse_config,
    read_config,
    with_launcher,
)
from quartet_plugin.tuner.run_folder import create_run, resume_run


def read(folder: Path, text: str) -> TuneConfig:
    path = folder / "q.yaml"
    path.write_text(text)
    return read_config(path)


def test_no_file_and_an_empty_file_are_the_defaults(tmp_path: Path) -> None:
    assert read_config(None) == read(tmp_path, "") == TuneConfig()
    defaults = TuneConfig()
    assert (defaults.trial.warmup, defaults.trial.measure, defaults.trial.deadline_s) == (
        "auto",
        "auto",
        600.0,
    )
    assert (defaults.study.trials, defaults.study.top_k, defaults.study.rounds) == (20, 3, 5)
    assert defaults.search.scaling is None


def test_auto_a_literal_and_a_list(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
        run: my-run.1
        search:
          tensor_parallel: auto
          pipeline_parallel: 2
          micro_batch_size: [1, 2, 4]
          split: [6+2, even, stock]
          schedule: 1f1b
          mapping: "1,0"
          scaling: {budget: flops, tolerance: 0.05}
        trial: {deadline_s: 60}
        study: {objective: tokens_per_s}
        device: cpu
        """,
    )
    search = config.search
    assert search.tensor_parallel is None
    assert search.pipeline_parallel == (2,)
    assert search.micro_batch_size == (1, 2, 4)
    assert search.split == ("6+2", "even", "stock")
    assert search.mapping == ("1,0",)
    assert search.scaling is not None
    assert search.scaling.budget == "flops"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("serach: {}", "serach: {}: unknown key; did you mean search?"),
        ("study: {trails: 3}", "study.trails: 3: unknown key; did you mean trials?"),
        (
            "search: {scaling: {tolerence: 0.1}}",
            "search.scaling.tolerence: 0.1: unknown key; did you mean tolerance?",
        ),
        ("search: {zzz: 1}", "search.zzz: 1: unknown key; remove it"),
    ],
)
def test_a_misspelt_key_is_answered_with_the_right_one(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert line in str(caught.value)


@pytest.mark.parametrize("text", ["search: {scaling: }", "search: {scaling: auto}", "search: {scaling: {}}"])
def test_scaling_is_asked_for_by_its_name_alone(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).search.scaling is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo: 1", "foo"),
        ("search: {tensor_paralel: 2}", "search.tensor_paralel"),
        ("search: {tensor_parallel: two}", "search.tensor_parallel"),
        ("search: {tensor_parallel: 0}", "greater than or equal to 1"),
        ("search: {tensor_parallel: true}", "search.tensor_parallel"),
        ("search: {tensor_parallel: 1.5}", "search.tensor_parallel"),
        ("search: {tensor_parallel: []}", "must have 1 to 64 entries"),
        ("search: {tensor_parallel: [2, 2]}", "must not repeat an entry"),
        ("search: {tensor_parallel: {a: 1}}", "search.tensor_parallel"),
        ("search: {split: 6-2}", "counts like 6+2"),
        ("search: {split: [auto, even]}", "counts like 6+2"),
        ("search: {schedule: dualpipe}", "search.schedule"),
        ("search: {mapping: '1;0'}", "slots like 1,0"),
        ("search: {mapping: [tp-pp-dp, tp-dp-pp]}", "or slots like 1,0; did you mean tp-pp-dp?"),
        ("search: {forbid: {mapping: nonsense}}", "pipeline-reversed"),
        ("search: {scaling: {budget: time}}", "search.scaling.budget"),
        ("search: {scaling: {tolerance: .nan}}", "search.scaling.tolerance"),
        ("search: 3", "search"),
        ("study: {trials: true}", "study.trials"),
        ("study: {trials: 0}", "study.trials"),
        ("study: {rounds: 2}", "study.rounds"),
        ("study: {storage: pickle}", "study.storage"),
        ("trial: {deadline_s: -1}", "trial.deadline_s"),
        ("trial: {deadline_s: .inf}", "trial.deadline_s"),
        ("device: tpu", "device"),
        ("run: ../x", "run"),
        ("run: ''", "run"),
        ("run: a\nrun: b", "appears twice"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("!!python/object/apply:os.system ['x']", "safe to read"),
        ("run: !!python/name:os.system", "safe to read"),
        ("- 1", "a mapping of sections"),
        ("just words", "a mapping of sections"),
        ("a: [", "q.yaml:1:"),
        ("? {a: 1}\n: 2", "safe to read"),
        ("1: 2", "keys should be strings"),
        ("run: \x00", "safe to read"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert says in message
    assert "q.yaml" in message
    assert len(message.splitlines()) == 1


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "big.yaml").write_text("#" * (1 << 20) + "\nrun: a")
    with pytest.raises(ConfigError, match="longer than"):
        read_config(tmp_path / "big.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(ConfigError):
        read_config(tmp_path / "binary.yaml")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_SECTIONS = st.dictionaries(
    st.sampled_from(["run", "search", "trial", "study", "device", "other"]),
    _JSON | st.dictionaries(st.sampled_from(["split", "mapping", "scaling", "trials", "warmup"]), _JSON),
)


@settings(max_examples=200, deadline=None)
@given(_SECTIONS)
def test_any_data_is_a_configuration_or_one_line(data: dict[str, object]) -> None:
    said = ""
    try:
        parse_config(data, where="here")
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("torchrun", "--nproc-per-node", "2", "dir/pretrain_gpt.py", "--lr", "1"), "pretrain_gpt"),
        (("python", "-m", "my.module"), "my"),
        (("python", "..."), "run"),
        ((), "run"),
        (("torchrun", "a b;c.py"), "a-b-c"),
    ],
)
def test_a_run_is_named_after_the_script(command: tuple[str, ...], name: str) -> None:
    assert default_run_name(command) == name


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--recipe", "llama3_8b", "train.train_iters=10"), "llama3_8b"),
        (("train.train_iters=10", "--recipe=llama3_8b"), "llama3_8b"),
        (("--recipe",), "quartet_plugin.bridge"),
        ((), "quartet_plugin.bridge"),
    ],
)
def test_a_run_of_a_recipe_is_named_after_the_recipe(arguments: tuple[str, ...], name: str) -> None:
    assert default_run_name(("quartet_plugin.bridge.recipe",), arguments=arguments) == name
    assert default_run_name(("train.py",), arguments=arguments) == "train"


def test_options_change_nothing_else_of_a_file() -> None:
    """Neither `auto`, which a file of data has no null for, nor the password that is never written down."""
    file = {
        "search": {"recompute": "auto", "sequence_parallel": "auto", "tensor_partition": "auto"},
        "study": {"storage": "postgresql://u:hunter22@h/d"},
        "trial": {"crop": "none"},
    }
    config = parse_config(file, where="q.yaml")
    asked = with_launcher(config, launcher="slurm", trial_nodes=2, site="site.yaml", nodes=4)
    assert (asked.launcher, asked.site, asked.nodes, asked.trial.nodes) == ("slurm", "site.yaml", 4, 2)
    assert asked.trial == config.trial.model_copy(update={"nodes": 2})
    assert (asked.search, asked.study) == (config.search, config.study)
    with pytest.raises(ConfigError, match=r"options: trial\.nodes: 0: should be greater than or equal to 1"):
        with_launcher(config, launcher=None, trial_nodes=0, site=None)


def test_a_run_is_resumed_as_it_was_begun(tmp_path: Path) -> None:
    config = parse_config(
        {"run": "r", "search": {"split": ["6+2", "even"], "scaling": {}}, "study": {"trials": 5}}, where="x"
    )
    words = ("torchrun", "train.py", "--name", 'a "b"')
    begun = create_run(tmp_path / "r", config=config, command=words)
    again = resume_run(tmp_path / "r", config=None, command=words)
    assert again == begun
    more = config.model_copy(update={"study": config.study.model_copy(update={"trials": 9})})
    assert resume_run(tmp_path / "r", config=more, command=words).config.study.trials == 9
    assert resume_run(tmp_path / "r", config=None, command=words).config.study.trials == 9
    other = config.model_copy(update={"study": config.study.model_copy(update={"seed": 9})})
    with pytest.raises(ConfigError, match=r"study\.seed: 9; the run was started with 0"):
        resume_run(tmp_path / "r", config=other, command=words)
    with pytest.raises(ConfigError, match=r"another command: it has `--name .* where this one has `--name`;"):
        resume_run(tmp_path / "r", config=None, command=words[:-1])
    with pytest.raises(ConfigError, match=r"has `torchrun train\.py --name` .* `torchrun x\.py --name`"):
        resume_run(tmp_path / "r", config=None, command=("torchrun", "x.py", *words[2:]))
    with pytest.raises(ConfigError, match="no run to resume"):
        resume_run(tmp_path / "s", config=None, command=words)


def test_a_run_of_an_earlier_release_is_resumed_with_its_secrets(tmp_path: Path) -> None:
    """Its config.json has another mark in the place of a secret, and passwords of URLs as they were."""
    words = ("env", "HF_TOKEN=abc", "torchrun", "t.py", "--api-key", "abc", "--data", "s3://u:p@h/d")
    config = parse_config({"run": "r"}, where="x")
    run = create_run(tmp_path / "r", config=config, command=words)
    written = read_json(run.folder.config_file)
    assert written["command"] == [
        *("env", "HF_TOKEN=***", "torchrun", "t.py", "--api-key", "***", "--data", "s3://u:***@h/d")
    ]
    earlier = ["env", "HF_TOKEN=<redacted>", "torchrun", "t.py", "--api-key", "<redacted>", *words[6:]]
    write_json_atomic(run.folder.config_file, {**written, "command": earlier})
    assert resume_run(tmp_path / "r", config=None, command=words).command == words
    assert not {"p", "abc"} & set(resume_run(tmp_path / "r", config=None, command=None).command)
    with pytest.raises(ConfigError, match=r"it has `--data 's3://u:\*\*\*@h/d'` where this one has"):
        resume_run(tmp_path / "r", config=None, command=(*words[:-1], "s3://u:p@h/other"))


@pytest.mark.parametrize("content", ["", "[]", '{"command": []}', '{"command": ["a"], "cwd": 3}'])
def test_a_damaged_config_file_is_one_line(tmp_path: Path, content: str) -> None:
    create_run(tmp_path / "r", config=TuneConfig(), command=("python", "x.py"))
    (tmp_path / "r" / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        resume_run(tmp_path / "r", config=None, command=None)
