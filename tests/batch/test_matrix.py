"""The product form: names, placeholders and what is left out."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.batch.config import Batch, parse_batch
from quartet_plugin.errors import ConfigError

MODELS = [
    {"name": "small", "flags": ["--num-layers", "8"], "gpus": 2},
    {"name": "large", "flags": ["--num-layers", "96"], "gpus": 8},
]


def expand(**matrix: Any) -> Batch:
    return parse_batch({"matrix": matrix}, where="J.yaml", folder=Path("/jobs"))


def refusal(**matrix: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        expand(**matrix)
    assert str(refused.value).isprintable()
    return str(refused.value)


def test_models_by_sizes() -> None:
    batch = expand(
        axes={"model": MODELS, "batch": [64, 128]},
        command="torchrun --nproc-per-node {model.gpus} x.py {model.flags} --global-batch-size={batch}",
        config="q-{model}.yaml",
        priority=2,
        exclude=[{"model": "large", "batch": 128}],
    )
    assert [job.name for job in batch.jobs] == ["small-64", "small-128", "large-64"]
    assert batch.jobs[2].words == (
        *("torchrun", "--nproc-per-node", "8", "x.py", "--num-layers", "96", "--global-batch-size=64"),
    )
    assert batch.jobs[2].config == Path("/jobs/q-large.yaml")
    assert {job.priority for job in batch.jobs} == {2}


def test_described_jobs_keep_numbers() -> None:
    batch = expand(
        axes={"cluster": [{"name": "h100", "device": "H100-SXM-80GB", "nodes": 2}], "batch": [64, 128]},
        job={
            "model": {"name": "llama3-8b"},
            "cluster": {"device": "{cluster.device}", "num_nodes": "{cluster.nodes}", "devices_per_node": 8},
            "batch": {"global_batch_size": "{batch}"},
        },
    )
    described = [job.described for job in batch.jobs if isinstance(job.described, dict)]
    assert [sections["batch"]["global_batch_size"] for sections in described] == [64, 128]
    assert described[0]["cluster"]["num_nodes"] == 2
    assert batch.jobs[0].kind == "plan"


@pytest.mark.parametrize("value", ["$(id)", "a b", "'", '"', "; rm x", "a\nb", "{other}", "-x", "é"])
def test_a_value_stays_inside_of_its_word(value: str) -> None:
    batch = expand(
        axes={"text": [{"name": "t", "value": value}]},
        command="torchrun x.py --text={text.value} {text.value}",
    )
    assert batch.jobs[0].words == ("torchrun", "x.py", f"--text={value}", value)


def test_braces_are_doubled() -> None:
    batch = expand(axes={"n": [1]}, command=["torchrun", "x.py", '--json={{"a": {n}}}'])
    assert batch.jobs[0].words[-1] == '--json={"a": 1}'


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        ({"axes": {}}, "axes"),
        ({"axes": {"model": []}}, "axes.model"),
        ({"axes": {"a-b": [1]}}, "axes"),
        ({"axes": {"n": [True]}}, "axes.n"),
        ({"axes": {"n": [{"flags": ["x"]}]}}, "must have a `name`"),
        ({"axes": {"n": list(range(100)), "m": list(range(11))}}, "100 x 11 jobs; must be at most 1000"),
        ({"axes": {"model": ["a"]}, "command": "torchrun {modl}"}, "did you mean model?"),
        ({"axes": {"model": MODELS}, "command": "torchrun x{model.flags}"}, "a list of words"),
        ({"axes": {"model": MODELS}, "name": "{model}/x", "command": "x"}, "letters, digits"),
        (
            {"axes": {"model": MODELS, "n": [1, 2]}, "name": "{model}", "command": "x"},
            "the name is used twice",
        ),
        ({"axes": {"n": [1]}, "command": "x", "exclude": [{"m": 1}]}, "unknown key"),
        ({"axes": {"n": [1]}, "command": "x", "exclude": [{"n": 2}]}, "none of 1"),
        ({"axes": {"n": [1]}, "command": "x", "exclude": [{}]}, "every job"),
        ({"axes": {"n": [1]}, "command": "x", "exclud": []}, "did you mean exclude?"),
        ({"axes": {"n": [1]}}, "neither command nor job"),
    ],
)
def test_what_cannot_be_expanded_is_refused(matrix: dict[str, Any], says: str) -> None:
    assert says in refusal(**matrix)
