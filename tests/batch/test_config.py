"""JOBS.yaml: what is read, and what is refused in one line."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.batch.config import Batch, Job, parse_batch, read_batch
from quartet_plugin.batch.job_words import minutes_of, num_trials_of, tune_words
from quartet_plugin.errors import ConfigError
from quartet_plugin.tuner.config import parse_config

COMMAND = ["torchrun", "x.py"]
HERE = Path("/jobs")


def parse(*jobs: Any, **sections: Any) -> Batch:
    return parse_batch({"jobs": list(jobs), **sections}, where="J.yaml", folder=HERE)


def refusal(*jobs: Any, **sections: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        parse(*jobs, **sections)
    message = str(refused.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(
        "config: q.yaml\n"
        "jobs:\n"
        "- {name: a, command: \"torchrun x.py --name 'two words'\", priority: 3, max_minutes: 20}\n"
        "- {name: b, command: [torchrun, x.py, $(id)], like: a, config: other.yaml, trials: 4}\n"
        "- {name: c, job: JOB.yaml}\n"
        "limits: {jobs_at_once: 2, minutes: 60, max_minutes: 30, trials: 10}\n"
    )
    batch = read_batch(tmp_path / "sweep.yaml")
    first, second, third = batch.jobs
    assert (batch.name, batch.num_at_once, batch.max_minutes, batch.max_trials) == ("sweep", 2, 60, 10)
    assert first.words == ("torchrun", "x.py", "--name", "two words")
    assert (first.priority, first.max_minutes, first.config) == (3, 20, tmp_path / "q.yaml")
    assert second.words[-1] == "$(id)"
    assert (second.like, second.trials, second.max_minutes) == ("a", 4, 30)
    assert second.config == tmp_path / "other.yaml"
    assert (third.kind, third.described) == ("plan", tmp_path / "JOB.yaml")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"name": "a", "command": COMMAND, "priorty": 1}, "did you mean priority?"),
        ({"name": "a", "comand": COMMAND}, "did you mean command?"),
        ({"name": "a"}, "neither command nor job"),
        ({"name": "a", "command": []}, "must have a program"),
        ({"name": "a", "command": ["torchrun", 8]}, "put it in quotes"),
        ({"name": "a", "command": "torchrun 'x.py"}, "cannot be split into words"),
        ({"name": "a", "command": "torchrun x.py | tee log"}, "no shell runs the command"),
        ({"name": "a", "command": "cd /x && torchrun x.py"}, "no shell runs the command"),
        ({"name": "a", "command": COMMAND, "max_minutes": 0}, "greater than or equal to 0.1"),
        ({"name": "a", "command": COMMAND, "trials": 0}, "greater than or equal to 1"),
        ({"name": "a", "command": COMMAND, "priority": True}, "valid integer"),
        ({"name": "a", "command": COMMAND, "like": "b"}, "no such job"),
        ({"name": "a", "command": COMMAND, "like": "a"}, "a -> a: forms a cycle"),
    ],
)
def test_what_no_job_can_be_is_refused(job: dict[str, Any], says: str) -> None:
    assert says in refusal(job)


def test_keys_of_the_whole_file_are_checked() -> None:
    job = {"name": "a", "command": COMMAND}
    assert "did you mean limits?" in refusal(job, limit={})
    assert "did you mean jobs_at_once?" in refusal(job, limits={"jobs_at_onc": 2})
    assert "jobs: none" in refusal()
    assert "the name is used twice" in refusal(job, {**job, "name": "A"})


def first_of(job: dict[str, Any]) -> Job | None:
    """The job; None where it is refused in one printable line."""
    message = ""
    with contextlib.suppress(ConfigError):
        try:
            return parse(job).jobs[0]
        except ConfigError as error:
            message = str(error)
            raise
    assert message
    assert message.isprintable()
    return None


# What must never reach a shell, a path or a terminal as anything but itself.
HOSTILE = (
    "a\nb",
    "a'b",
    'a"b',
    "$(touch x)",
    "`touch x`",
    "-rf",
    "--config",
    "a\0b",
    "a" * 40_000,
    "ünicode",
    "..",
    "../up",
    "/etc/passwd",
    "a b",
    "{axis}",
    "{{ jinja }}",
    "\x1b[31m",
    "\u202egnp",
    "",
    ".hidden",
)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_are_refused(text: str) -> None:
    job = {"name": "b", "command": COMMAND}
    for sections in ({"batch": text}, {}):
        jobs = (job,) if sections else ({"name": text, "command": COMMAND},)
        assert "letters, digits" in refusal(*jobs, **sections)
    assert refusal({**job, "like": text})


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_words_are_refused_or_stay_one_word(text: str) -> None:
    for words in ([text, "x.py"], ["torchrun", text], ["torchrun", "x.py", "--flag", text]):
        job = first_of({"name": "a", "command": words, "config": "q.yaml"})
        if job is None:
            continue
        started = tune_words(
            job,
            config=parse_config({}, where="q"),
            runs=Path("/runs"),
            max_trials=None,
            minutes=None,
            started_from=None,
            is_begun=False,
        )
        assert started[started.index("--") + 1 :] == words
        assert started.index("--") == 4


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_file_names_are_refused_or_stay_values_of_their_option(text: str) -> None:
    job = first_of({"name": "a", "command": COMMAND, "config": text})
    if job is None:
        return
    words = tune_words(
        job,
        config=parse_config({}, where="q"),
        runs=Path("/runs"),
        max_trials=None,
        minutes=None,
        started_from=None,
        is_begun=False,
    )
    assert f"--config={HERE / text}" in words


def test_the_words_of_a_job_that_goes_on() -> None:
    job = parse({"name": "a", "command": COMMAND, "trials": 50, "max_minutes": 9}).jobs[0]
    config = parse_config({"study": {"trials": 30}}, where="q")
    words = tune_words(
        job,
        config=config,
        runs=Path("/runs"),
        max_trials=40,
        minutes=minutes_of(job, spent=3.0, left=100.0),
        started_from="b",
        is_begun=True,
        takes_over=True,
    )
    assert words == [
        *("tune", "--run-dir=/runs", "--name=a", "--trials=40", "--max-minutes=6.000"),
        *("--from=b", "--resume", "--takeover", "--", *COMMAND),
    ]
    # A run that goes on would keep a number that an earlier limit gave it.
    usual = parse_config({}, where="q")
    plain = parse({"name": "a", "command": COMMAND}).jobs[0]
    for is_begun in (False, True):
        words = tune_words(
            plain,
            config=usual,
            runs=Path("/runs"),
            max_trials=None,
            minutes=None,
            started_from=None,
            is_begun=is_begun,
        )
        assert (f"--trials={usual.study.trials}" in words) == is_begun
    assert num_trials_of(job, config=config, max_trials=None) == 50
    assert minutes_of(job, spent=20.0, left=None) == 0.1
    assert minutes_of(job, spent=0.0, left=2.0) == 2.0
