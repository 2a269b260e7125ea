"""The request that no layout can have: the same answer as by the product of all options, for less work."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.model.frameworks import capabilities
from quartet_plugin.model.job_description import Experts
from quartet_plugin.model.layout import Layout, Setting
from quartet_plugin.model.plan import STOCK
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.knobs.knob import KnobContext, LayoutKnob, SettingKnob
from quartet_plugin.space.knobs.offload_modules import SETS as OFFLOADED
from quartet_plugin.space.knobs.recompute_modules import SETS as REPEATED
from quartet_plugin.space.knobs.registry import LAYOUT_KNOBS, OPTIONS
from quartet_plugin.space.layouts import chosen_layouts, legal_layouts, unused_request
from quartet_plugin.space.rules import LayoutRules
from quartet_plugin.tuner.config import parse_config
from tests.space.jobs import make_job, make_layout, make_nodes

EXPERTS = Experts(
    num_experts=8, experts_per_token=2, ffn_hidden_size=96, shared_ffn_hidden_size=96, num_dense_layers=1
)
# Values of every kind of request, some of which few layouts have, or none.
REQUESTS: dict[str, list[Any]] = {
    "tensor_parallel": [1, 2, 4],
    "pipeline_parallel": [1, 2],
    "context_parallel": [1, 2],
    "micro_batch_size": [1, 2, 3],
    "sequence_parallel": [True, False],
    "distributed_optimizer": [True, False],
    "recompute": ["none", "selective", "full"],
    "zero_stage": [1],
    "reduce_bucket_size": [1000],
    "expert_tensor_parallel": [0, 1],
    "moe_token_dispatcher": ["allgather", "alltoall"],
    "moe_shared_expert_overlap": [True, False],
    "overlap_moe_expert_parallel_comm": [True, False],
    "delay_wgrad_compute": [True, False],
    "moe_grouped_gemm": [True, False],
    "cuda_graph_modules": ["attn", "mlp"],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": [True, False],
    "ddp_bucket_size": [2, 4, 1000],
    "optimizer_cpu_offload": [True, False],
    "cp_comm_type": ["p2p", "a2a"],
    "offload_modules": [*OFFLOADED],
    "recompute_method": ["uniform", "block"],
    "recompute_num_layers": [1, 2, 7],
    "recompute_modules": [*REPEATED],
    "use_megatron_fsdp": [True, False],
}
COMMAND = {
    "ddp_bucket_size": 0,
    "overlap_grad_reduce": True,
    "overlap_param_gather": False,
    "recompute_method": "uniform",
    "recompute_modules": "core_attn",
    "recompute_num_layers": 1,
    "offload_modules": "none",
    "cp_comm_type": "p2p",
    "use_megatron_fsdp": False,
}
COMMAND_OF_EXPERTS = {
    **COMMAND,
    "expert_tensor_parallel": 0,
    "moe_token_dispatcher": "alltoall",
    "moe_shared_expert_overlap": False,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "moe_grouped_gemm": False,
}
FEATURES = ("no_linear_bias", "fp8", "multi_latent_attention", "moe_capacity", "mtp", "overlap_moe")

type Layouts = Mapping[ModelShape, Sequence[Layout]]


def rules_of(
    search: dict[str, Any],
    *,
    features: tuple[str, ...] = (),
    command: Mapping[str, Any] = COMMAND,
    impl: str = "transformer_engine",
    num_devices: int = 4,
    **layout: Any,
) -> LayoutRules:
    job = make_job(
        layout=make_layout(**{"pipeline_parallel": 1, "data_parallel": num_devices, **layout}),
        features=features,
        experts=EXPERTS if "moe" in features else None,
    )
    stated = tuple(Setting(name=name, value=value) for name, value in command.items())
    return LayoutRules(
        job=replace(job, settings=stated or None, layer_impl=impl, precision="bf16"),
        nodes=make_nodes(num_devices),
        search=parse_config({"search": search}, where="q.yaml").search,
    )


def layouts_of(rules: LayoutRules) -> Layouts:
    shape = rules.job.shape
    return {shape: legal_layouts(shape, rules=rules)}


def unused_by_product(layouts: Layouts, *, rules: LayoutRules) -> str | None:
    """The definition: an option is tried after every combination of all options before it."""
    for knob in LAYOUT_KNOBS:
        wanted = [value for value in rules.search.requested(knob.name) or () if value != STOCK]
        is_for_other = isinstance(knob, SettingKnob) and bool(knob.used_by)
        may_stay = knob.kind == "partition" and STOCK in (rules.search.requested(knob.name) or ())
        if not wanted or knob.axis in rules.locked or may_stay or is_for_other:
            continue
        name = f"search.{knob.name}: {knob.request_text(wanted[0])}"
        if not knob.is_of(rules.job.framework):
            return f"{name}; {capabilities(rules.job.framework).title} has no such knob: leave it out"
        before = OPTIONS[: OPTIONS.index(knob)] if knob in OPTIONS else ()
        contexts = [
            KnobContext(layout=layout, shape=shape, rules=rules)
            for shape, kept in layouts.items()
            for layout in chosen_layouts(kept, before, shape, rules)
        ]
        if knob in OPTIONS:
            offered = {value for context in contexts for value in knob.choices(context)}
            offered |= {knob.command_value(context) for context in contexts}
        else:
            offered = {knob.in_layout(context.layout) for context in contexts}
        if offered & set(wanted):
            continue
        if isinstance(knob, SettingKnob) and rules.job.setting(knob.name) is None:
            return f"{name}; the framework did not report the command's own value"
        able = [context for context in contexts if knob.applies(context.layout)]
        if not able:
            free = replace(rules, search=rules.search.model_copy(update={knob.name: None}))
            able = [
                KnobContext(layout=layout, shape=shape, rules=rules)
                for shape in layouts
                for layout in legal_layouts(shape, rules=free)
                if knob.applies(layout)
            ]
        faults = filter(None, (knob.fault(wanted[0], context) for context in able))
        return f"{name}; {next(faults, 'it does nothing in any layout of the search')}"
    return None


def random_rules(seed: int) -> LayoutRules:
    draw = random.Random(seed)
    has_experts = draw.random() < 0.5
    features = [name for name in FEATURES if draw.random() < 0.25]
    known = {}
    if draw.random() < 0.9:
        known = COMMAND_OF_EXPERTS if has_experts else COMMAND
    if has_experts:
        features += ["moe"]
        known = {**known, "moe_grouped_gemm": draw.random() < 0.5} if known else {}
    # Degrees and words of another framework are rare: most such requests end before an option is tried.
    rare = {"tensor_parallel", "pipeline_parallel", "context_parallel", "zero_stage", "reduce_bucket_size"}
    names = [name for name in REQUESTS if draw.random() < (0.03 if name in rare else 0.2)]
    search: dict[str, Any] = {"recompute": [*REQUESTS["recompute"]], "schedule": ["1f1b", "no-pipelining"]}
    for name in names:
        most = min(3, len(REQUESTS[name]))
        chosen = draw.sample(REQUESTS[name], draw.randint(1, most))
        is_setting = name in COMMAND_OF_EXPERTS
        search[name] = chosen + ([STOCK] if is_setting and draw.random() < 0.1 else [])
    return rules_of(
        search,
        features=tuple(features),
        command=known,
        impl=draw.choice(("local", "transformer_engine")),
        num_devices=draw.choice((2, 4)),
    )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**31))
def test_the_answer_is_that_of_the_product_of_all_options(seed: int) -> None:
    rules = random_rules(seed)
    layouts = layouts_of(rules)
    assert unused_request(layouts, rules=rules) == unused_by_product(layouts, rules=rules)


def test_both_answers_are_drawn() -> None:
    """The property holds for requests that each layout has, for unused ones, and for many words of these."""
    answers = [unused_request(layouts_of(rules), rules=rules) for rules in map(random_rules, range(150))]
    assert None in answers
    assert len({answer.split(";")[0].split(":")[0] for answer in answers if answer is not None}) >= 6


def test_megatron_fsdp_that_no_value_of_another_setting_allows_is_unused() -> None:
    search = {"use_megatron_fsdp": [True], "overlap_grad_reduce": [False]}
    rules = rules_of(search, distributed_optimizer=True)
    answer = unused_request(layouts_of(rules), rules=rules)
    assert answer == unused_by_product(layouts_of(rules), rules=rules)
    assert answer == "search.use_megatron_fsdp: on; needs the command's own overlap_grad_reduce"
    rules = rules_of({**search, "overlap_grad_reduce": [True, False]}, distributed_optimizer=True)
    assert unused_request(layouts_of(rules), rules=rules) is None


@pytest.fixture
def num_tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the knobs whose choices were asked for, one a call."""
    names: list[str] = []
    for kind in (LayoutKnob, SettingKnob):
        asked = kind.choices

        def counted(knob: Any, context: KnobContext, asked: Any = asked) -> Any:
            names.append(knob.name)
            return asked(knob, context)

        monkeypatch.setattr(kind, "choices", counted)
    return names


MANY: dict[str, Any] = {
    "recompute": ["none", "selective", "full"],
    "expert_tensor_parallel": [0, 1],
    "moe_token_dispatcher": ["allgather", "alltoall"],
    "moe_shared_expert_overlap": [True, False],
    "overlap_moe_expert_parallel_comm": [True, False],
    "delay_wgrad_compute": [True, False],
    "moe_grouped_gemm": [True, False],
    "overlap_grad_reduce": [True, False],
    "overlap_param_gather": [True, False],
    "ddp_bucket_size": [500, 1000, 2000],
    "offload_modules": ["none", "moe_act", "qkv_linear"],
}


def test_a_request_of_many_settings_is_tried_in_few_combinations(num_tried: list[str]) -> None:
    rules = rules_of(MANY, features=("moe", "no_linear_bias"), command=COMMAND_OF_EXPERTS, expert_parallel=2)
    layouts = layouts_of(rules)
    num_tried.clear()
    assert unused_request(layouts, rules=rules) is None
    # The product of their values alone is hundreds of times more.
    assert len(num_tried) < 20 * sum(map(len, layouts.values()))


def test_an_unused_value_of_many_settings_costs_a_few_tries_a_layout(num_tried: list[str]) -> None:
    search = {**MANY, "recompute_modules": ["mla_up_proj"]}
    rules = rules_of(
        search, features=("moe", "no_linear_bias"), command=COMMAND_OF_EXPERTS, expert_parallel=2
    )
    layouts = layouts_of(rules)
    num_tried.clear()
    answer = unused_request(layouts, rules=rules)
    assert answer is not None
    assert answer.startswith("search.recompute_modules: mla_up_proj; mla_up_proj: needs --multi-latent")
    assert len(num_tried) < 40 * sum(map(len, layouts.values()))
