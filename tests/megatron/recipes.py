"""The axes that are tuned of public performance recipes, as the real parser and the space say it.

    python -m tests.megatron.recipes RECIPES.json

Exit code 1: more than a tenth of the recipes have fewer than three axes.

RECIPES.json has `recipes`, each with `model`, `gpus`, degrees, batch and `knobs`, settings of
Megatron-Bridge. A table turns these into Megatron's flags and the model's name into its shape. An axis counts
where the space of the command has two legal values of it; an order of ranks only where it is not another
numbering of the replicas.

Recipes do not say the routers' loss. Each has `seq_aux_loss`, which keeps nothing; with `--published-losses`
it is that of the model's provider in Megatron-Bridge, some of which keep degrees and micro-batch.
"""

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from quartet_plugin.errors import QuartetError
from quartet_plugin.mapping.exchanges import exchanged
from quartet_plugin.mapping.orders import first_equal
from quartet_plugin.model.huggingface import model_section
from quartet_plugin.model.layout import Layout
from quartet_plugin.planner.model_presets import preset_named
from quartet_plugin.space.features import Axis
from quartet_plugin.space.plan_space import Space
from tests.megatron.test_production_commands import ProductionCommand, hopper, job_of, space_of

# The presets whose shapes stand for the recipes' models, which Qwen3.5-VL, GLM and DeepSeek-V4 borrow of
# models of alike size; the others are in SHAPES and HYBRIDS, or no language model.
MODELS = {
    "llama3_8b": "llama3-8b",
    "llama3_70b": "llama3-70b",
    "llama31_405b": "llama3.1-405b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "qwen3_235b_a22b": "qwen3-235b-a22b",
    "qwen3_vl_235b_a22b": "qwen3-235b-a22b",
    "qwen35_vl_35b_a3b": "qwen3-30b-a3b",
    "qwen35_vl_122b_a10b": "qwen3-235b-a22b",
    "qwen35_vl_397b_a17b": "qwen3-235b-a22b",
    "deepseek_v3": "deepseek-v3",
    "deepseek_v4_flash": "deepseek-v3",
    "glm51": "deepseek-v3",
    "glm52": "deepseek-v3",
    "kimi_k2": "kimi-k2",
}
_GPT_OSS = model_section(Path(__file__).parents[1] / "model" / "configs" / "gpt-oss" / "config.json")
# Models without a preset, by their own config.json or Megatron-Bridge (models/qwen/qwen_provider.py).
SHAPES: dict[str, dict[str, Any]] = {
    "gpt_oss_120b": _GPT_OSS,
    "gpt_oss_20b": {**_GPT_OSS, "num_layers": 24, "num_experts": 32},
    "qwen3_next_80b_a3b": {
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 5120,
        "num_attention_heads": 16,
        "num_query_groups": 2,
        "kv_channels": 256,
        "vocab_size": 151_936,
        "gated_ffn": True,
        "num_experts": 512,
        "experts_per_token": 10,
        "expert_ffn_hidden_size": 512,
        "shared_expert_ffn_hidden_size": 512,
    },
}
# The losses of routers in Megatron-Bridge, by the beginning of the model's name; the others' have no part in
# what microbatches hold.
PUBLISHED_LOSSES = {
    "qwen3_next": "global_aux_loss",
    "qwen35_vl": "global_aux_loss",
    "qwen3": "aux_loss",
}
_NEMOTRON_3_NANO = {
    "pattern": "MEMEM*E" + "MEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
    "hidden_size": 2688,
    "ffn_hidden_size": 1856,
    "num_attention_heads": 32,
    "num_query_groups": 2,
    "kv_channels": 128,
    "mamba_num_heads": 64,
    "mamba_state_dim": 128,
    "vocab_size": 131_072,
    "num_experts": 128,
    "experts_per_token": 6,
    "expert_ffn_hidden_size": 1856,
    "shared_expert_ffn_hidden_size": 3712,
}
# Hybrid models, by Megatron-Bridge (models/nemotronh/nemotron_h_provider.py); `further` is the pattern of a
# further token.
HYBRIDS: dict[str, dict[str, Any]] = {
    "nemotronh_56b": {
        "pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        "hidden_size": 8192,
        "ffn_hidden_size": 32_768,
        "num_attention_heads": 64,
        "num_query_groups": 8,
        "mamba_num_heads": 256,
        "mamba_state_dim": 256,
        "vocab_size": 131_072,
    },
    "nemotron_3_nano": _NEMOTRON_3_NANO,
    "nemotron_3_5_lightning": {**_NEMOTRON_3_NANO, "further": "*E"},
    "nemotron_3_super": {
        **_NEMOTRON_3_NANO,
        "pattern": "MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E" + "MEMEMEME",
        "further": "*E",
        "hidden_size": 4096,
        "ffn_hidden_size": 2688,
        "mamba_num_heads": 128,
        "num_experts": 512,
        "experts_per_token": 22,
        "expert_ffn_hidden_size": 2688,
        "shared_expert_ffn_hidden_size": 5376,
    },
}
# Linear attention in three layers of four.
LINEAR_ATTENTION = ("qwen35_vl", "qwen3_next")
# A recipe with fewer tuned axes is hardly tuned, and the share of recipes that may be.
LEAST_AXES = 3
GOAL = 0.1
_COMMON = shlex.split(
    "--use-mcore-models --transformer-impl transformer_engine --bf16 --lr 3e-4 --train-iters 100 --mock-data "
    "--tokenizer-type NullTokenizer --eval-iters 1 --position-embedding-type rope --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --use-distributed-optimizer "
    "--attention-dropout 0.0 --hidden-dropout 0.0"
)
_SWITCHES = {
    "sequence_parallel": "--sequence-parallel",
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "overlap_param_gather": "--overlap-param-gather",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
    "moe_a2a_overlap": "--overlap-moe-expert-parallel-comm",
    "delay_wgrad": "--delay-wgrad-compute",
    "moe_router_force_load_balancing": "--moe-router-force-load-balancing",
}


def words_of(recipe: Mapping[str, Any], *, has_published_loss: bool = False) -> list[str]:
    """The command's flags. Raises KeyError for a model whose shape is not known."""
    knobs, name = recipe["knobs"], recipe["model"]
    model = HYBRIDS.get(name) or SHAPES.get(name)
    losses = [loss for begin, loss in PUBLISHED_LOSSES.items() if name.startswith(begin)]
    loss = losses[0] if losses and has_published_loss else "seq_aux_loss"
    if model is None:
        model = preset_named(MODELS[recipe["model"]])
    return [
        *_COMMON,
        *_texts(_shape(model, seq_length=knobs.get("seq_length") or model["seq_length"])),
        *(_texts(_pattern(model, mtp=knobs.get("mtp_num_layers") or 0)) if "pattern" in model else []),
        *_texts(_layout(recipe)),
        *(flag for name, flag in _SWITCHES.items() if knobs.get(name) is True),
        *(_texts(_experts(model, knobs, loss=loss)) if "num_experts" in model else []),
        *(["--swiglu"] if model.get("gated_ffn") else []),
        *(["--multi-latent-attention"] if "latent_attention" in model else []),
        *_precision(recipe["precision_and_variant"]),
        *(["--ckpt-format", "fsdp_dtensor"] if knobs.get("use_megatron_fsdp") else []),
        *([] if "pattern" in model else _ends(recipe, num_layers=model["num_layers"])),
    ]


def _ends(recipe: Mapping[str, Any], *, num_layers: int) -> list[str]:
    """Embedding and head counted as layers, where only that divides; a recipe's model sets it by itself."""
    stages = (recipe["pp"] or 1) * (recipe["vpp"] or 1)
    names = [f"account_for_{end}_in_pipeline_split" for end in ("embedding", "loss")]
    is_stated = any(recipe["knobs"].get(name) for name in names)
    if is_stated or num_layers % stages == 0 or (num_layers + 2) % stages:
        return []
    return [_SWITCHES[name] for name in names]


def _texts(flags: Mapping[str, Any]) -> list[str]:
    given = {flag: value for flag, value in flags.items() if value is not None}
    return [word for flag, value in given.items() for word in (*flag.split(), str(value))]


def _shape(model: Mapping[str, Any], *, seq_length: int) -> dict[str, Any]:
    flags = {
        "--num-layers": model.get("num_layers"),
        "--hidden-size": model["hidden_size"],
        "--ffn-hidden-size": model["ffn_hidden_size"],
        "--num-attention-heads": model["num_attention_heads"],
        "--seq-length": seq_length,
        "--max-position-embeddings": seq_length,
        "--vocab-size": model["vocab_size"],
    }
    if "pattern" not in model and "kv_channels" in model:
        flags["--kv-channels"] = model["kv_channels"]
    for name, value in (model.get("latent_attention") or {}).items():
        flags[f"--{name.replace('_', '-')}"] = value
    return flags


def _pattern(model: Mapping[str, Any], *, mtp: int) -> dict[str, Any]:
    return {
        "--hybrid-layer-pattern": model["pattern"] + mtp * f"/{model.get('further')}",
        "--group-query-attention --num-query-groups": model["num_query_groups"],
        "--kv-channels": model.get("kv_channels"),
        "--mamba-num-heads": model["mamba_num_heads"],
        "--mamba-state-dim": model["mamba_state_dim"],
    }


def _layout(recipe: Mapping[str, Any]) -> dict[str, Any]:
    knobs, pipeline = recipe["knobs"], recipe["pp"] or 1
    layout = knobs.get("pp_layout")
    is_uneven = layout is None and recipe["model"].startswith(("deepseek", "kimi", "glm"))
    if is_uneven and pipeline > 1:
        layout = _deepseek_layout(pipeline * (recipe["vpp"] or 1), mtp=knobs.get("mtp_num_layers") or 0)
    chunks = (recipe["vpp"] or 1) if pipeline > 1 and layout is None else 1
    recompute = knobs.get("recompute_granularity")
    return {
        "--tensor-model-parallel-size": recipe["tp"] or 1,
        "--pipeline-model-parallel-size": pipeline,
        "--context-parallel-size": recipe["cp"] or 1,
        "--expert-model-parallel-size": recipe["ep"] or 1,
        "--micro-batch-size": recipe["mbs"],
        "--global-batch-size": recipe["gbs"],
        "--num-virtual-stages-per-pipeline-rank": chunks if chunks > 1 else None,
        "--pipeline-model-parallel-layout": layout,
        "--mtp-num-layers": knobs.get("mtp_num_layers") or None,
        "--recompute-granularity": recompute,
        "--recompute-method": "uniform" if recompute == "full" else None,
        "--recompute-num-layers": 1 if recompute == "full" else None,
    }


def _deepseek_layout(num_stages: int, *, mtp: int) -> str:
    """61 layers, the last stage with the head and few of them."""
    each = -(-64 // num_stages)
    counts = [each] * (num_stages - 1)
    while sum(counts) > 61:
        counts[counts.index(max(counts))] -= 1
    stages = "|".join("t" * count for count in (*counts, 61 - sum(counts)))
    return f"E{stages}{'m' * mtp}L"


def _experts(model: Mapping[str, Any], knobs: Mapping[str, Any], *, loss: str) -> dict[str, Any]:
    flags = {
        "--num-experts": model["num_experts"],
        "--moe-router-topk": model["experts_per_token"],
        "--moe-ffn-hidden-size": model["expert_ffn_hidden_size"],
        "--moe-shared-expert-intermediate-size": model.get("shared_expert_ffn_hidden_size"),
        "--moe-router-load-balancing-type": loss,
        "--moe-aux-loss-coeff": 1e-4,
        "--moe-token-dispatcher-type": knobs.get("moe_token_dispatcher_type") or "alltoall",
        "--expert-tensor-parallel-size": knobs.get("expert_tensor_parallel_size"),
    }
    if dense := model.get("num_dense_layers"):
        flags["--moe-layer-freq"] = f"([0]*{dense}+[1]*{model['num_layers'] - dense})"
    return flags


def _precision(words: str) -> list[str]:
    return ["--fp8-format", "hybrid"] if "fp8" in words or "fp4" in words else []


def features_beside(recipe: Mapping[str, Any]) -> Iterator[str]:
    """What the flags above leave out, as features: an accelerator's kernels decide their validity."""
    knobs = recipe["knobs"]
    if knobs.get("cuda_graph_impl", "none") != "none":
        yield "cuda_graphs"
    if knobs.get("tp_comm_overlap") and (recipe["tp"] or 1) > 1:
        yield "tp_comm_overlap"
    if knobs.get("fine_grained_activation_offloading"):
        yield "activation_offload"
    if knobs.get("moe_expert_rank_capacity_factor"):
        yield "moe_capacity"
    if recipe["model"].startswith(LINEAR_ATTENTION):
        yield "attention_variant"


def axes_of(space: Space) -> set[Axis]:
    """The axes that have two legal values."""
    layouts = [layout for kept in space.layouts.values() for layout in kept]
    degrees = {(layout.degrees[:3], layout.expert_parallel) for layout in layouts}
    orders = {
        (layout.virtual_stages, name)
        for shape, kept in space.layouts.items()
        for layout in kept
        for name in space.schedules_of(layout, shape=shape)
    }
    has = {
        Axis.DEGREES: len(degrees) > 1,
        Axis.MICRO_BATCH: len({layout.micro_batch_size for layout in layouts}) > 1,
        Axis.SCHEDULE: len(orders) > 1,
        Axis.SPLIT: any(layout.num_stages > 1 for layout in layouts),
        Axis.MAPPING: Axis.MAPPING not in space.locked and has_orders(space),
    }
    return {axis for axis, is_there in has.items() if is_there and axis not in space.locked}


def has_orders(space: Space) -> bool:
    """Whether a layout of the space has two physical arrangements: an exchange of runs makes the second."""
    degrees = {layout.degrees: layout for kept in space.layouts.values() for layout in kept}
    return any(_has_orders(space, layout) for layout in degrees.values())


def _has_orders(space: Space, layout: Layout) -> bool:
    orders = space.orders_of(layout)
    if len(orders) > 1:
        return True
    slots = orders[0].mapping.slots
    arrangement = first_equal(slots, layout=layout)
    for length in space.run_lengths_of(layout):
        num_runs = layout.world_size // length
        for first in dict.fromkeys((0, 1, num_runs // 2)):
            for second in range(first + 1, num_runs):
                pairs = [(first, second)]
                other = exchanged(slots, pairs, length=length, layout=layout, rules=space.order_rules)
                if other != slots and first_equal(other, layout=layout) != arrangement:
                    return True
    return False


def axes_of_recipe(recipe: Mapping[str, Any], *, has_published_loss: bool = False) -> set[Axis] | str:
    """The tuned axes of a recipe, or why it is not read."""
    from dataclasses import replace

    try:
        words = tuple(words_of(recipe, has_published_loss=has_published_loss))
    except KeyError as error:
        return f"model {error}"
    # Hopper GPUs want one connection where layers are shared, and several with FSDP.
    is_shared = (recipe["tp"] or 1) * (recipe["cp"] or 1) > 1
    connections = "1" if is_shared and not recipe["knobs"].get("use_megatron_fsdp") else "32"
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    command = ProductionCommand(recipe["recipe"], words, recipe["gpus"], environment)
    with mock.patch.dict(os.environ, command.environment), hopper(command):
        try:
            job = job_of(command)
        except (AssertionError, ValueError, RuntimeError, SystemExit, OSError, QuartetError) as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:120]
        job = replace(job, features=tuple(sorted({*job.features, *features_beside(recipe)})))
        return axes_of(space_of(command, job, {}))


def is_hardly_tuned(axes: set[Axis] | str) -> bool:
    """Whether a recipe has too few tuned axes, or none because it is not read."""
    return isinstance(axes, str) or len(axes) < LEAST_AXES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", type=Path)
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    parser.add_argument("--published-losses", action="store_true", help="the routers' losses of the models")
    options = parser.parse_args()
    kinds: Counter[tuple[str, str]] = Counter()
    num_few = num_all = 0
    for recipe in json.loads(options.recipes.read_text())["recipes"]:
        if options.only not in recipe["recipe"]:
            continue
        axes = axes_of_recipe(recipe, has_published_loss=options.published_losses)
        num_all += 1
        num_few += is_hardly_tuned(axes)
        text = (
            axes
            if isinstance(axes, str)
            else ", ".join(axis.value for axis in Axis if axis in axes) or "none"
        )
        kinds[recipe["model"], text] += 1
    for (model, text), count in sorted(kinds.items()):
        print(f"{count:4}  {model:22} {text}")
    print(
        f"{num_few} of {num_all} recipes ({num_few / max(1, num_all):.0%}) have fewer than {LEAST_AXES} axes"
    )
    return int(num_few > GOAL * num_all)


if __name__ == "__main__":
    sys.exit(main())
