"""A measured job is priced as what it is, or refused in one line: never as a simpler one."""

from dataclasses import replace
from typing import Any

import pytest

from quartet_plugin.calibration.measured_runs import UNPRICED, measured_run
from quartet_plugin.cost.constants import fitted
from quartet_plugin.cost.devices import device_named
from quartet_plugin.cost.predict import predict
from quartet_plugin.cost.run import FORCED_IMBALANCE, TrainingRun, uniform_cluster_of_device
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.job_description import ExpertCapacity, Experts, LatentAttention
from quartet_plugin.model.layout import Setting
from quartet_plugin.model.packed_lengths import PackedLengths
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.shape import LayerKinds
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.space.plan_space import baseline_plan
from tests.space.jobs import make_job, make_layout, make_nodes, make_shape

EXPERTS = Experts(
    num_experts=8, experts_per_token=2, ffn_hidden_size=512, shared_ffn_hidden_size=256, num_dense_layers=1
)
SETTINGS = (
    Setting(name="expert_tensor_parallel", value=1),
    Setting(name="moe_token_dispatcher", value="allgather"),
    Setting(name="overlap_grad_reduce", value=False),
)
FEATURES = ("moe", "moe_forced_balance", "mtp", "multi_latent_attention")


def job_of(**changes: Any) -> TrainingJob:
    """A report of a model with all parts, on eight devices."""
    layout = make_layout(tensor_parallel=2, data_parallel=2, expert_parallel=2)
    job = make_job(layout=layout, features=FEATURES, experts=EXPERTS)
    return replace(
        job,
        **{
            "precision": "bf16",
            "settings": SETTINGS,
            "latent": LatentAttention(),
            "mtp_layers": 1,
            "normalization": "RMSNorm",
            **changes,
        },
    )


def run_of(job: TrainingJob, plan: Plan | None = None, *, is_single_rank: bool = False) -> TrainingRun:
    cluster = uniform_cluster_of_device(device_named("H100-SXM-80GB"), num_devices=16)
    return measured_run(
        job, plan, on_cpu=False, cluster=cluster, where="a job", is_single_rank=is_single_rank
    )


def test_every_part_of_the_model_is_priced() -> None:
    run = run_of(job_of())
    assert (run.experts, run.latent, run.mtp_layers) == (EXPERTS, LatentAttention(), 1)
    assert (run.has_whole_experts, run.imbalance, run.normalization) == (True, FORCED_IMBALANCE, "RMSNorm")
    assert run.software.gathers_tokens
    assert not run.software.has_data_overlap
    assert run.cluster.num_devices == 8
    seconds = predict(run, fitted()).iter_time_s
    removed: list[dict[str, Any]] = [{"experts": None}, {"latent": None}, {"mtp_layers": 0}]
    for without in removed:
        assert predict(replace(run, **without), fitted()).iter_time_s != seconds


def test_a_plans_settings_go_before_the_commands() -> None:
    job = job_of()
    plan = baseline_plan(job, nodes=make_nodes(8), run="r", seed=0)
    plan = replace(plan, layout=plan.layout.with_setting("expert_tensor_parallel", 0))
    run = run_of(job, plan)
    assert not run.has_whole_experts
    assert run.software.gathers_tokens


def test_a_dense_job_is_priced_as_ever() -> None:
    run = run_of(make_job(layout=make_layout(pipeline_parallel=2)))
    assert (run.experts, run.latent, run.mtp_layers, run.has_whole_experts) == (None, None, 0, False)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"experts": None}, r"experts: null; their number and sizes are missing"),
        ({"latent": None}, r"latent: null; the ranks and head sizes"),
        ({"mtp_layers": None}, r"mtp_layers: null; the number of layers"),
        ({"settings": None}, r"settings: null; the experts' dispatcher"),
        ({"split": None}, r"split: null; must be the layers of each stage"),
        *[({"features": (name,)}, f"features: {name}; ") for name in UNPRICED],
    ],
)
def test_a_job_without_a_price_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        run_of(job_of(**changes))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("a job.")


def test_experts_of_a_rank_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"8 experts of 512.*gets no other rank's tokens"):
        run_of(job_of(), is_single_rank=True)
    alone = make_layout(expert_parallel=1, tensor_parallel=1, data_parallel=2)
    assert run_of(job_of(layout=alone), is_single_rank=True).experts == EXPERTS


def test_packed_sequences_are_priced_where_their_documents_were_counted() -> None:
    packed = PackedLengths(tokens_per_sequence=100.0, squares_per_sequence=2000.0)
    job = job_of(features=(*FEATURES, "packing"), packed=packed)
    run = run_of(job)
    assert run.packed == packed
    assert predict(run, fitted()).iter_time_s < predict(replace(run, packed=None), fitted()).iter_time_s


@pytest.mark.parametrize(
    ("capacity", "load"),
    [
        (ExpertCapacity(factor=1.5, is_padded=True), 1.5),
        (ExpertCapacity(factor=1.5), None),
        (ExpertCapacity(factor=1.5, is_padded=True, rank_factor=2.0), None),
        (ExpertCapacity(rank_factor=2.0), None),
        (None, None),
    ],
)
def test_experts_under_a_capacity_are_taken_where_all_get_their_limit(
    capacity: ExpertCapacity | None, load: float | None
) -> None:
    job = job_of(features=(*FEATURES, "moe_capacity"), experts=replace(EXPERTS, capacity=capacity))
    if load is not None:
        assert run_of(job).expert_load == pytest.approx(load, rel=0.01)
        return
    with pytest.raises(ConfigError, match="moe_capacity; the report lacks the number of tokens") as error:
        run_of(job)
    assert "\n" not in str(error.value)


KINDS = LayerKinds(attention=0, mlp=0, experts=0, state_space=0, projected_size=4096).with_pattern("M*-M")


def hybrid_job(kinds: LayerKinds | None, **changes: Any) -> TrainingJob:
    """A report of a hybrid model of four layers without experts."""
    layout = make_layout(pipeline_parallel=1, data_parallel=8)
    return replace(
        make_job(layout=layout, shape=make_shape(num_layers=4, layer_kinds=kinds), features=("hybrid",)),
        split=Split(transformer_layers_per_stage=(4,)),
        precision="bf16",
        settings=SETTINGS,
        **changes,
    )


def test_a_hybrid_model_is_priced_by_its_kinds() -> None:
    run = run_of(hybrid_job(KINDS))
    assert (run.pattern, [kind.letter for kind in run.kinds]) == ("M*-M", ["*", "-", "M"])
    further = run_of(hybrid_job(KINDS, mtp_layers=1, mtp_kinds=KINDS))
    assert further.mtp_depth is not None
    seconds = [predict(each, fitted()).iter_time_s for each in (run, further)]
    assert seconds[0] < seconds[1]


@pytest.mark.parametrize(
    ("job", "rule"),
    [
        (hybrid_job(KINDS.without_pattern), "layer_kinds: no pattern; the order of its layers is missing"),
        (hybrid_job(None), "layer_kinds: no pattern; the order of its layers is missing"),
        (hybrid_job(replace(KINDS, framework_pattern="G*-G")), r"layer_kinds: 'G\*-G'; gated delta nets"),
        (hybrid_job(KINDS, mtp_layers=1), "mtp_kinds: null; the layers of multi-token prediction"),
    ],
)
def test_hybrid_models_whose_layers_are_not_known_are_refused(job: TrainingJob, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        run_of(job)
    assert "\n" not in str(error.value)
