"""Checkpoints under plans: every stage has its own files, and loads its own state or is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.model.plan import Plan, write_plan
from tests.deepspeed.support import layout, plan, run_ranks
from tests.deepspeed.test_errors import refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The slots of RANKs 0 to 3: processes 0 and 1 are each the first of its stage's group and of its replica.
MIXED = (0, 2, 3, 1)
Options = dict[str, Any]


def planned(folder: Path, split: Sequence[int], *, pipeline: int = 2, world: int = 4, **more: Any) -> Options:
    """The `quartet` section of a plan, written down; `more`: of `plan`, `zero`, `tied`."""
    is_sharded, is_tied = more.pop("zero", 0) == 1, more.pop("tied", False)
    own = layout(pipeline, world=world, is_sharded=is_sharded)
    chunked = replace(own, virtual_stages=len(split) // pipeline)
    made: Plan = plan(split, planned=chunked, own=own, batch=8 * world // pipeline, **more)
    if is_tied:
        shape = replace(made.shape, tied_embeddings=True)
        made = replace(made, shape=shape, made_for=replace(made.made_for, shape=shape))
    path = folder / f"plan-{len(list(folder.iterdir()))}.json"
    write_plan(made, path=path)
    return {"quartet": {"plan": str(path)}}


def jobs(folder: Path) -> dict[str, Options]:
    """What one start of four processes does, in this order."""

    def saved(name: str) -> Options:
        return {"save": str(folder / "saved" / name)}

    def resumed(name: str) -> Options:
        return {"load": str(folder / "saved" / name), "steps": 2}

    def of(split: Sequence[int], **more: Any) -> Options:
        return planned(folder, split, **more)

    sharded, four, tied = {"zero": 1}, {"stages": 4}, {"tied": True}
    clipped = {"clipping": 0.05}
    half = {**sharded, "precision": "bf16"}
    weights = {"how": {"load_module_only": True}, "first": 2}
    mixed, mixed_1 = of((2, 2), order=MIXED), of((2, 2), order=MIXED, zero=1)
    other, other_1 = of((1, 3), order=MIXED), of((1, 3), zero=1)
    # Both devices have as many parameters as before, but other layers.
    chunks_1 = of((1, 1, 1, 1), order=MIXED, zero=1, group=2)
    return {
        "stock": {**clipped, **saved("stock")},
        "stock 1": {**sharded, **saved("stock 1")},
        "stock 4": {**four, **sharded, **saved("stock 4")},
        "stock tied": {**tied, **saved("stock tied")},
        "mixed": {**mixed, **clipped, **saved("mixed")},
        "mixed 1": {**mixed_1, **sharded, **saved("mixed 1")},
        "mixed half": {**mixed_1, **half, **saved("mixed half")},
        "mixed again": {**mixed, **clipped, **resumed("mixed")},
        "mixed 1 again": {**mixed_1, **sharded, **resumed("mixed 1")},
        "mixed half again": {**mixed_1, **half, **resumed("mixed half")},
        "stock to mixed": {**mixed, **clipped, **resumed("stock")},
        "stock 1 to mixed": {**mixed_1, **sharded, **resumed("stock 1")},
        "stock to mixed, entry": {**mixed, **clipped, **resumed("stock"), "start": "entry"},
        "mixed 1 to stock, entry": {**sharded, **resumed("mixed 1"), "start": "entry"},
        "stock 4 to mixed": {
            **four,
            **of((1, 1, 1, 1), pipeline=4, order=(0, 2, 1, 3), zero=1),
            **sharded,
            **resumed("stock 4"),
        },
        "stock to other": {**other, **resumed("stock")},
        "stock to other, entry": {**other, **resumed("stock"), "start": "entry"},
        "stock 1 to other": {**other_1, **sharded, **resumed("stock 1")},
        "mixed 1 to chunks": {**chunks_1, **sharded, **resumed("mixed 1")},
        "stock 4 to two": {**mixed_1, **sharded, **resumed("stock 4")},
        "stock 1 to other, weights": {**other_1, **sharded, **resumed("stock 1"), **weights},
        "stock 4 to two, weights": {**mixed_1, **sharded, **resumed("stock 4"), **weights},
        "tied": {**of((2, 2), order=(2, 3, 0, 1), tied=True), **tied, **resumed("stock tied")},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of the module's trainings are in its folder `saved`."""
    return tmp_path_factory.mktemp("checkpoints")


def start(
    folder: Path,
    words: Sequence[str],
    options: Sequence[Options],
    *,
    processes: int,
    behind: Sequence[str] = (),
    **environment: str,
) -> tuple[int, str, list[list[Options]]]:
    """Run the options in `processes` processes: exit code, output, and what every process saw of each."""
    number = len(list(folder.iterdir()))
    given, output = folder / f"options-{number}.json", folder / f"output-{number}.json"
    given.write_text(json.dumps(list(options)), encoding="utf-8")
    starter = [f"--nproc-per-node={processes}", "--rdzv-endpoint=localhost:0", "-m", *words]
    words = [*starter, str(given), str(output), *behind]
    code, said = run_ranks(words, log=folder / f"log-{number}", **environment)
    return code, said, json.loads(output.read_text(encoding="utf-8")) if output.exists() else []


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, list[Options]]:
    """What every process saw of every job."""
    options = jobs(folder)
    code, said, results = start(
        folder, ["tests.deepspeed.checkpoint_rank"], list(options.values()), processes=4
    )
    assert code == 0, said[-4000:]
    return dict(zip(options, results, strict=True))


def files(folder: Path, name: str, ending: str) -> set[str]:
    (checkpoint,) = (folder / "saved" / name).glob("global_step*")
    return {path.name for path in checkpoint.glob(f"*{ending}.pt") if not path.name.startswith("layer_")}


def test_every_stage_has_its_own_files(folder: Path, found: dict[str, list[Options]]) -> None:
    shards = {
        f"zero_pp_rank_{shard}_mp_rank_0{stage}_optim_states.pt" for shard in (0, 1) for stage in (0, 1)
    }
    models = {f"mp_rank_0{stage}_model_states.pt" for stage in (0, 1)}
    for name in ("mixed 1", "stock 1"):
        assert files(folder, name, "optim_states") == shards, name
    assert files(folder, "mixed half", "optim_states") == {f"bf16_{shard}" for shard in shards}
    for name in ("mixed", "mixed 1", "mixed half", "stock"):
        assert files(folder, name, "model_states") == models, name
    assert [one["stage"] for one in found["mixed"]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "resumed"),
    [
        ("mixed", "mixed again"),
        ("mixed 1", "mixed 1 again"),
        ("mixed half", "mixed half again"),
        ("stock", "stock to mixed"),
        ("stock 1", "stock 1 to mixed"),
        ("stock", "stock to mixed, entry"),
        ("mixed 1", "mixed 1 to stock, entry"),
        ("stock 4", "stock 4 to mixed"),
        ("stock tied", "tied"),
    ],
)
def test_the_same_stages_go_on_as_without_a_stop(
    found: dict[str, list[Options]], name: str, resumed: str
) -> None:
    for whole, rest in zip(found[name], found[resumed], strict=True):
        assert "error" not in rest, rest
        assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=1e-6)
        assert rest["client"] == ["epoch"]


@pytest.mark.parametrize("name", ["mixed", "mixed 1"])
def test_a_mapping_alone_trains_as_the_launchers_order(found: dict[str, list[Options]], name: str) -> None:
    """Clipping too: in fp32 with ZeRO 0 it is by the first stage's norm, whatever process that is."""
    stock = found["stock" if name == "mixed" else "stock 1"]
    assert found[name][0]["losses"] == pytest.approx(stock[0]["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("stock to other", ["it does not record them", "resume without the plan"]),
        ("stock to other, entry", ["it does not record them", "resume without the plan"]),
        ("stock 1 to other", ["it does not record them", "resume without the plan"]),
        (
            "mixed 1 to chunks",
            ["(PP2 entries 3+3)", "PP2 entries 2+1+1+2 placed on 0,1,0,1; resume with those stages"],
        ),
        ("stock 4 to two", ["it does not record them", "(PP2 entries 3+3)"]),
    ],
)
def test_other_stages_are_refused_on_every_rank(
    found: dict[str, list[Options]], name: str, words: list[str]
) -> None:
    (said,) = {one["error"] for one in found[name]}
    assert {one["exit_code"] for one in found[name]} == {2}
    for word in ("global_step2: its optimizer state", "load_module_only=True", *words):
        assert word in said
    assert "\n" not in said


@pytest.mark.parametrize("name", ["stock 1 to other, weights", "stock 4 to two, weights"])
def test_weights_alone_load_onto_other_stages(found: dict[str, list[Options]], name: str) -> None:
    assert {distance for one in found[name] for distance in one["distances"].values()} == {0.0}
    assert len({file for one in found[name] for file in one["distances"]}) == 6


def test_weights_alone_leave_the_moments(found: dict[str, list[Options]]) -> None:
    whole, rest = found["stock 1"][0]["losses"][2:], found["stock 1 to other, weights"][0]["losses"]
    assert rest[0] == pytest.approx(whole[0], rel=1e-6)
    assert rest[1] != pytest.approx(whole[1], rel=1e-6)


def test_a_tied_weight_is_that_of_its_first_stage(found: dict[str, list[Options]]) -> None:
    assert [one["stage"] for one in found["tied"]] == [1, 1, 0, 0]
    for one in found["tied"]:
        assert set(one["distances"].values()) == {0.0}
    assert "layer_00-model_states.pt" in found["tied"][2]["distances"]


@pytest.mark.usefixtures("found")
def test_a_refusal_under_the_entry_is_one_line(folder: Path) -> None:
    config, errors = folder / "ds.json", folder / "errors"
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    config.write_text(json.dumps({**sizes, **planned(folder, (1, 3), world=2)}), encoding="utf-8")
    errors.mkdir()
    load = {"load": str(folder / "saved" / "stock"), "steps": 2, "start": "script"}
    entry = ["quartet_plugin.deepspeed", "--quartet-device", "cpu", "-m", "tests.deepspeed.checkpoint_rank"]
    behind = ["--deepspeed_config", str(config)]
    code, said, _ = start(folder, entry, [load], processes=2, behind=behind, QUARTET_ERRORS=str(errors))
    records = {path.name: json.loads(path.read_text()) for path in errors.glob("rank-*.err.json")}
    refused(code, said, records, "global_step2: its optimizer state", "load_module_only=True")
