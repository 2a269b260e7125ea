"""The plan file: exact round trips, and refusals in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError, PlanError, QuartetError
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.job_description import Experts, LatentAttention
from quartet_plugin.model.measurement import Comparison, Interval, Measurement, Prediction
from quartet_plugin.model.plan import (
    Mapping,
    NodeInfo,
    Plan,
    ScheduleChoice,
    Slot,
    Split,
    read_plan,
    write_plan,
)
from quartet_plugin.model.schema import dump
from tests.model.plans import LAYOUT, MADE_FOR, PLAN, plan_with

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.json"
MEASURED = Measurement(
    iteration_s=Interval(median=0.41, low=0.4, high=0.43),
    tokens_per_s=19980.5,
    model_flops_per_s_per_device=1.1e10,
    peak_memory_bytes=812_000_000,
    num_launches=5,
    num_iterations=50,
)
WHOLE = plan_with(
    prediction=Prediction(iteration_s=None, relative_cost=0.93, peak_memory_bytes=None),
    measurement=Comparison(
        objective="tokens_per_s",
        plan=MEASURED,
        baseline=replace(MEASURED, tokens_per_s=15200.25),
        speedup=Interval(median=1.31, low=1.24, high=1.37),
    ),
)


def test_the_golden_plan_reads_and_writes_to_the_byte(tmp_path: Path) -> None:
    assert read_plan(GOLDEN) == WHOLE
    write_plan(WHOLE, path=tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == GOLDEN.read_bytes()


BUCKETED = plan_with(
    made_for=replace(MADE_FOR, framework="deepspeed", framework_version="0.19.8"),
    layout=replace(
        LAYOUT, distributed_optimizer=True, reduce_bucket_size=50_000_000, allgather_bucket_size=20_000_000
    ),
)


def test_the_golden_plan_with_bucket_sizes_reads_and_writes_to_the_byte(tmp_path: Path) -> None:
    golden = GOLDEN.with_name("plan_deepspeed.json")
    assert read_plan(golden) == BUCKETED
    write_plan(BUCKETED, path=tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduce_bucket_size": 3}, "even number"),
        ({"allgather_bucket_size": 2**41}, "even number"),
        ({"reduce_bucket_size": 4, "distributed_optimizer": False}, "distributed_optimizer"),
    ],
)
def test_bucket_sizes_that_nothing_could_use(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(LAYOUT, **{"distributed_optimizer": True, **changes})


def test_digests_of_a_plan_are_taken_once_and_are_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, provenance=replace(PLAN.provenance, trial=7))
    key, execution = plan.key, plan.execution
    assert (plan, hash(plan), dump(plan)) == (replace(plan), hash(replace(plan)), dump(replace(plan)))
    monkeypatch.setattr("quartet_plugin.model.plan.digest", lambda content: "taken again")
    assert (plan.key, plan.execution) == (key, execution)
    assert replace(plan).key == "taken again"


def test_the_key_ignores_where_a_plan_came_from() -> None:
    assert WHOLE.key == PLAN.key
    assert WHOLE.digest != PLAN.digest
    assert plan_with(split=Split(transformer_layers_per_stage=(5, 3))).key != PLAN.key


def test_what_a_run_says_of_its_model_is_in_the_file_and_not_in_the_key(tmp_path: Path) -> None:
    experts = Experts(num_experts=8, experts_per_token=2, ffn_hidden_size=64)
    made_for = replace(MADE_FOR, precision="fp8", experts=experts, latent_attention=LatentAttention())
    made = plan_with(made_for=made_for)
    assert made.key == PLAN.key
    assert made.digest != PLAN.digest
    write_plan(made, path=tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").made_for == made_for
    assert made_for.peak_precision == "fp8"
    assert MADE_FOR.peak_precision == "bf16"


def test_multi_token_prediction_may_lie_before_a_head_alone(tmp_path: Path) -> None:
    made_for = replace(MADE_FOR, mtp_layers=2)
    texts = {None: "Etttttttt|mmL", True: "Ettttttttmm|L"}
    for is_before_last, text in texts.items():
        split = Split(transformer_layers_per_stage=(8, 0), mtp_before_last=is_before_last)  # type: ignore[arg-type]
        assert split.layout_text(mtp_layers=2) == text
        plan = plan_with(made_for=made_for, split=split)
        write_plan(plan, path=tmp_path / "plan.json")
        assert read_plan(tmp_path / "plan.json") == plan
        assert ("mtp_before_last" in dump(plan)["split"]) == bool(is_before_last)
    inner = replace(LAYOUT, pipeline_parallel=4)
    with pytest.raises(PlanError, match="only the first and the last stage may hold no layer"):
        plan_with(made_for=made_for, layout=inner, split=Split(transformer_layers_per_stage=(4, 4, 0, 0)))
    for counts, layers in (((6, 2), 2), ((8, 0), None)):
        with pytest.raises(PlanError, match=r"split\.mtp_before_last: .*; needs layers of multi-token"):
            plan_with(
                made_for=replace(MADE_FOR, mtp_layers=layers),
                split=Split(transformer_layers_per_stage=counts, mtp_before_last=True),
            )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pipeline = draw(st.integers(1, 4))
    tensor, data = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    virtual = draw(st.integers(1, 2)) if pipeline > 1 else 1
    world = pipeline * tensor * data
    stages = pipeline * virtual
    counts = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    split_at = draw(st.integers(1, world))
    sizes = [split_at, world - split_at] if split_at < world else [world]
    nodes = tuple(NodeInfo(host=f"n{i}", node_class="cpu", num_slots=size) for i, size in enumerate(sizes))
    slots = [Slot(node=i, local=j) for i, size in enumerate(sizes) for j in range(size)]
    order = [slots[0], *draw(st.permutations(slots[1:]))]
    shape = replace(MADE_FOR.shape, num_layers=sum(counts))
    batch = data * draw(st.integers(pipeline, 12))
    name = "no-pipelining" if pipeline == 1 else "interleaved" if virtual > 1 else "1f1b"
    layout = replace(
        LAYOUT,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel=data,
        virtual_stages=virtual,
        micro_batch_size=1,
    )
    return Plan(
        made_for=replace(MADE_FOR, world_size=world, nodes=nodes, global_batch_size=batch),
        shape=shape,
        layout=layout,
        split=Split(transformer_layers_per_stage=tuple(counts)),
        schedule=ScheduleChoice(
            name=name,  # type: ignore[arg-type]
            group=draw(st.integers(pipeline, batch // data)) if name == "interleaved" else None,
        ),
        mapping=Mapping(slots=tuple(order)),
        provenance=PLAN.provenance,
    )


@settings(deadline=None, max_examples=60)
@given(plan=plans())
def test_every_plan_survives_the_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(plan, path=path)
    assert read_plan(path) == plan


def edited(*keys: str | int, value: Any) -> dict[str, Any]:
    """The golden plan's data with one value replaced and the digest made right again."""
    data: dict[str, Any] = json.loads(GOLDEN.read_text())
    inner: Any = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    data.pop("digest")
    return {**data, "digest": digest(data)}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (edited("layout", "tensor_parallel", value="2"), "layout.tensor_parallel"),
        (edited("layout", "extra_flag", value="--exec"), "layout.extra_flag"),
        (edited("argv", value=["--load", "x"]), "argv"),
        (edited("schema_version", value=2), "schema_version"),
        (edited("layout", "tensor_parallel", value=0), "layout.tensor_parallel"),
        (edited("layout", "tensor_parallel", value=10**9), "layout.tensor_parallel"),
        (edited("layout", "tensor_parallel", value=True), "layout.tensor_parallel"),
        (edited("layout", "micro_batch_size", value=5), "multiple of"),
        (edited("split", "transformer_layers_per_stage", value=[8]), "split"),
        (edited("split", "transformer_layers_per_stage", value=[9, -1]), "split"),
        (edited("split", "transformer_layers_per_stage", value=[6, 3]), "split"),
        (edited("schedule", "name", value="zb-v"), "schedule.name"),
        (edited("schedule", "name", value="interleaved"), "schedule.name"),
        (edited("schedule", "group", value=2), "schedule.group"),
        (edited("mapping", "slots", value=[{"node": 0, "local": 1}] * 2), "mapping.slots"),
        (edited("mapping", "slots", value=[]), "mapping.slots"),
        (edited("made_for", "world_size", value=4), "made_for"),
        (edited("shape", "num_layers", value=10**12), "shape.num_layers"),
        (edited("shape", "num_layers", value=2**31), "shape.num_layers: 2147483648; must be from 1 to 16384"),
        (edited("shape", "hidden_size", value=2**31), "shape.hidden_size"),
        (edited("shape", "max_position_embeddings", value=-1), "shape.max_position_embeddings"),
        (edited("made_for", "global_batch_size", value=10**400), "made_for.global_batch_size: 1000"),
        (edited("made_for", "global_batch_size", value=2**40), "made_for.global_batch_size: 1099511627776"),
        (edited("made_for", "nodes", 0, "num_slots", value=-2), "made_for.nodes[0].num_slots: -2"),
        (edited("split", "transformer_layers_per_stage", value=[2**31, 8 - 2**31]), "split"),
        (edited("schedule", "group", value=2**40), "schedule.group: 1099511627776"),
        (edited("provenance", "seed", value=10**30), "provenance.seed"),
        (edited("shape", "num_query_groups", value=3), "num_query_groups"),
        (edited("shape", value=None), "shape"),
        ([1, 2], "object"),
        ("__import__('os')", "object"),
    ],
)
def test_a_bad_plan_is_refused_in_one_line(data: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(QuartetError) as caught:
        read_plan(path)
    assert isinstance(caught.value, PlanError)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_damaged_plan_never_passes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(GOLDEN.read_bytes())
    start = data.draw(st.integers(0, len(content) - 1))
    content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=20))
    path = tmp_path_factory.mktemp("damaged") / "plan.json"
    path.write_bytes(bytes(content))
    try:
        plan = read_plan(path)
    except PlanError as error:
        lines = str(error).splitlines()
    else:
        assert plan == WHOLE  # only white space can have changed
        lines = []
    assert len(lines) <= 1


def test_rank_zero_stays_on_the_masters_node() -> None:
    made_for = replace(
        MADE_FOR,
        nodes=(
            NodeInfo(host="a", node_class="cpu", num_slots=1),
            NodeInfo(host="b", node_class="cpu", num_slots=1),
        ),
    )
    with pytest.raises(PlanError, match="RANK 0"):
        plan_with(made_for=made_for, mapping=Mapping(slots=(Slot(node=1, local=0), Slot(node=0, local=0))))


def test_a_mapping_numbers_the_slots_of_nodes_and_misses_none() -> None:
    mapping = Mapping(slots=(Slot(node=0, local=1), Slot(node=1, local=0), Slot(node=0, local=0)))
    assert mapping.indices((2, 1)) == (1, 2, 0)
    assert [mapping.indices(nodes) for nodes in ((1, 2), (2, 2), (3,), (2, 1, 1))] == [None] * 4
    first = mapping.slots[0]
    assert Mapping(slots=(first, first, mapping.slots[1])).indices((2, 1)) is None


def test_mappings_have_one_key_as_far_as_they_are_equal() -> None:
    slots = tuple(Slot(node=node, local=local) for node in range(2) for local in range(12))
    mapping, other = Mapping(slots=slots), Mapping(slots=(slots[1], slots[0], *slots[2:]))
    assert mapping.key == Mapping(slots=slots).key != other.key
    assert (mapping.is_stock, other.is_stock) == (True, False)
    fresh = Mapping(slots=slots)
    assert (mapping, hash(mapping), dump(mapping)) == (fresh, hash(fresh), dump(fresh))
