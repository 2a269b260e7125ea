"""Our rules of what is legal against Megatron's own checks, on random jobs.

    python -m tests.megatron.legality [--plans N] [--seed N]

For every random command the space offers plans, all of which Megatron must accept. Then a value of a plan is
replaced by one that our rules refuse for a rule of Megatron's, and Megatron must refuse it too. Its checks
are the real ones, with the answers of a Hopper GPU: its parser, `validate_args`, the configuration of
its model, its count of microbatches and its process groups, over torch's fake process group.
"""

import argparse
import contextlib
import functools
import itertools
import json
import logging
import os
import random
import shlex
import sys
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from quartet_plugin.megatron.apply import rewrite
from quartet_plugin.megatron.arguments import Flags
from quartet_plugin.megatron.device_connections import set_connections
from quartet_plugin.model.plan import Plan, Split
from quartet_plugin.model.shape import ModelShape
from quartet_plugin.space.knobs.cp_comm_type import CP_COMM_TYPE, HIERARCHICAL_SIZES
from quartet_plugin.space.knobs.expert_overlap import (
    DELAYED_WEIGHT_GRADIENTS,
    EXPERT_OVERLAP,
    SHARED_EXPERT_OVERLAP,
)
from quartet_plugin.space.knobs.expert_parallel import EXPERT_PARALLEL
from quartet_plugin.space.knobs.expert_tensor_parallel import AS_LAYERS, EXPERT_TENSOR_PARALLEL, WHOLE
from quartet_plugin.space.knobs.knob import KnobContext
from quartet_plugin.space.knobs.micro_batch_size import MICRO_BATCH_SIZE
from quartet_plugin.space.knobs.mtp_stage import MTP_STAGE, fault_of_before_last
from quartet_plugin.space.knobs.offload_modules import OFFLOAD_MODULES
from quartet_plugin.space.knobs.optimizer_cpu_offload import OPTIMIZER_CPU_OFFLOAD
from quartet_plugin.space.knobs.overlap_param_gather import OVERLAP_PARAM_GATHER
from quartet_plugin.space.knobs.pipeline_parallel import PIPELINE_PARALLEL
from quartet_plugin.space.knobs.recompute_modules import RECOMPUTE_MODULES
from quartet_plugin.space.knobs.tensor_parallel import TENSOR_PARALLEL
from quartet_plugin.space.knobs.token_dispatcher import TOKEN_DISPATCHER, WITH_BACKENDS
from quartet_plugin.space.knobs.virtual_stages import VIRTUAL_STAGES
from quartet_plugin.space.plan_space import Space
from quartet_plugin.split.layers import is_legal_split
from tests.megatron.native import native_flags
from tests.megatron.test_production_commands import (
    FREE,
    ProductionCommand,
    Sweep,
    hopper,
    job_of,
    space_of,
    validated,
)

PLANS_A_COMMAND = 10
_EVERYWHERE = ("allgather", "alltoall")
# Flex is searched only by name.
_DISPATCHERS = {TOKEN_DISPATCHER.name: ["stock", *_EVERYWHERE, *WITH_BACKENDS]}
_COMMON = shlex.split(
    "--bf16 --lr 1e-4 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --eval-iters 1 "
    "--max-position-embeddings 4096"
)


def random_command(generator: random.Random) -> ProductionCommand:
    """A command of one stage: sizes that several degrees divide and sizes that few do."""
    heads = generator.choice((6, 8, 12, 16, 32))
    sizes = {
        "--num-layers": generator.choice((4, 6, 8, 12, 18, 32, 61)),
        "--hidden-size": heads * generator.choice((16, 64)),
        "--num-attention-heads": heads,
        "--seq-length": generator.choice((96, 1024, 4096)),
        "--micro-batch-size": 1,
        "--vocab-size": generator.choice((1024, 50304, 128256)),
    }
    num_devices = generator.choice((1, 2, 4, 8, 16, 32, 64))
    sizes["--global-batch-size"] = num_devices * generator.choice((1, 2, 3, 6, 8))
    words = [*_COMMON, *(word for name, value in sizes.items() for word in (name, str(value)))]
    pattern = _random_pattern(generator) if generator.random() < 0.2 else None
    words += ["--transformer-impl", generator.choice(("local", "transformer_engine"))]
    if generator.random() < 0.5:
        divisors = [number for number in (1, 2, 4, 8) if heads % number == 0]
        words += ["--group-query-attention", "--num-query-groups", str(generator.choice(divisors))]
    tensor = 1
    if generator.random() < 0.4:
        tensor, more = _random_experts(generator, num_devices)
        words += more
    switches = (
        *("--swiglu", "--untie-embeddings-and-output-weights", "--use-distributed-optimizer"),
        "--disable-bias-linear",
    )
    words += [switch for switch in switches if generator.random() < 0.5]
    if "--use-distributed-optimizer" in words and generator.random() < 0.3:
        words += ["--use-precision-aware-optimizer"]
    if generator.random() < 0.2:
        # Stages of multi-token prediction with a tied head can be made, but not saved.
        words += ["--untie-embeddings-and-output-weights", "--position-embedding-type", "none"]
        depths = generator.choice((1, 2))
        if pattern is None:
            words += ["--mtp-num-layers", str(depths)]
        else:
            pattern += depths * "/*-"
    if pattern is not None:
        # A first letter may be a dash.
        words += [f"--hybrid-layer-pattern={pattern}", *_STATE_SPACE_FLAGS]
    if pattern is None and "transformer_engine" in words and generator.random() < 0.4:
        words += _random_context(generator, sizes["--seq-length"] // tensor, num_devices // tensor)
    if generator.random() < 0.2:
        words += ["--use-tp-pp-dp-mapping"]
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return ProductionCommand("random", tuple(words), num_devices, environment)


_STATE_SPACE_FLAGS = shlex.split(
    "--mamba-num-heads 16 --mamba-head-dim 16 --mamba-num-groups 8 --mamba-state-dim 16"
)


def _random_pattern(generator: random.Random) -> str:
    """A pattern of attention, MLPs, experts and state-space layers without stages.

    Of a model without experts Megatron's checks count an `E` as any other layer.
    """
    letters = generator.choice(("*-", "M*-", "ME*-"))
    return "".join(generator.choice(letters) for _ in range(generator.choice((4, 9, 12, 26))))


def _random_experts(generator: random.Random, num_devices: int) -> tuple[int, list[str]]:
    """TP and flags of routed experts, some of them spread over devices, tensor-parallel ones among them.

    Those of a command with TP are whole.
    """
    num_experts = generator.choice((4, 6, 8, 64))
    spread = [number for number in (1, 2, 4) if num_experts % number == num_devices % number == 0]
    top_k, size = generator.choice((1, 2)), generator.choice(spread)
    tensor = generator.choice((1, 1, 2)) if num_devices > 1 else 1
    flags = {
        "--num-experts": num_experts,
        "--moe-router-topk": top_k,
        "--moe-ffn-hidden-size": generator.choice((96, 512)),
        "--expert-model-parallel-size": size,
        "--moe-router-load-balancing-type": generator.choice(("aux_loss", "seq_aux_loss", "none")),
        "--moe-aux-loss-coeff": generator.choice((0.0, 0.01)),
    }
    # A flex dispatcher needs devices to exchange tokens with.
    kinds = (*_EVERYWHERE, "flex") if size > 1 else _EVERYWHERE
    flags["--moe-token-dispatcher-type"] = generator.choice(kinds)
    if generator.random() < 0.5:
        flags["--moe-shared-expert-intermediate-size"] = 64
    words = [word for name, value in flags.items() for word in (name, str(value))]
    if flags["--moe-token-dispatcher-type"] == "flex":
        words += generator.choice(
            ([], ["--moe-flex-dispatcher-backend", "hybridep"], ["--moe-enable-deepep"])
        )
    # A shared expert has no biases (megatron/core/transformer/moe/shared_experts.py).
    has_biases = "--moe-shared-expert-intermediate-size" not in words and generator.random() < 0.4
    words += [] if has_biases else ["--disable-bias-linear"]
    if tensor > 1:
        words += ["--tensor-model-parallel-size", str(tensor), "--sequence-parallel"]
    if tensor > 1 or generator.random() < 0.5:
        words += ["--expert-tensor-parallel-size", "1"]
    if flags["--moe-token-dispatcher-type"] == "alltoall" and generator.random() < 0.3:
        words += ["--moe-shared-expert-overlap"]
    # TransformerConfig.__post_init__ of every release: "Please use --moe-router-pre-softmax when topk is 1."
    return tensor, [*words, "--moe-router-pre-softmax"] if top_k == 1 else words


def _random_context(generator: random.Random, seq_length: int, num_devices: int) -> list[str]:
    """Flags of devices that share sequences, some of them in a hierarchy."""
    sizes = [size for size in (2, 4) if num_devices % size == seq_length % (2 * size) == 0]
    if not sizes:
        return []
    size = generator.choice(sizes)
    words = ["--context-parallel-size", str(size)]
    types = ["p2p", "all_gather"]
    if generator.random() < 0.5:
        words += ["--hierarchical-context-parallel-sizes", "2", str(size // 2)]
        types += ["a2a+p2p"]
    return [*words, "--cp-comm-type", generator.choice(types)] if generator.random() < 0.5 else words


@functools.cache
def check_groups(
    world_size: int,
    tensor: int,
    pipeline: int,
    chunks: int,
    expert: int,
    expert_tensor: int,
    context: int,
    hierarchy: tuple[int, ...],
    order: str,
) -> None:
    """Megatron's process groups of these degrees, over processes that are not there."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        with contextlib.redirect_stdout(None):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tensor,
                pipeline_model_parallel_size=pipeline,
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
                expert_model_parallel_size=expert,
                expert_tensor_parallel_size=expert_tensor,
                context_parallel_size=context,
                hierarchical_context_parallel_sizes=list(hierarchy) or None,
                order=order,
                create_gloo_process_groups=False,
            )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def refusal_of(words: Sequence[str]) -> str | None:
    """Why Megatron refuses a command, in one line; None where it accepts it."""
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.training.arguments import core_transformer_config_from_args

    try:
        args = validated(words)
        check_groups(
            args.world_size,
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size or 1,
            args.expert_model_parallel_size,
            args.expert_tensor_parallel_size,
            args.context_parallel_size,
            tuple(args.hierarchical_context_parallel_sizes or ()),
            # As megatron/training/initialize.py says the order.
            "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        )
        with contextlib.redirect_stdout(None):
            core_transformer_config_from_args(args)
            ConstantNumMicroBatchesCalculator(
                args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 0
            )
    except (Exception, SystemExit) as error:
        # Its checks raise whatever a wrong value leads to. That it accepts the command is checked first.
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def refused_values(
    plan: Plan, space: Space, generator: random.Random
) -> Iterator[tuple[dict[str, Any], str]]:
    """Arguments beside a plan's that our rules refuse for a rule of Megatron's, with our words."""
    layout, rules, shape = plan.layout, space.rules(), plan.shape
    context = KnobContext(layout=layout, shape=shape, rules=rules)
    size = generator.choice((2, 3, 4, 5, 8, 16))
    fault = TENSOR_PARALLEL.fault(size, context)
    is_checked = fault and ("heads" in fault or "query groups" in fault or fault.endswith("devices"))
    # State-space layers are checked where they are built.
    if fault and is_checked and "state-space" not in fault:
        yield {"tensor_model_parallel_size": size}, fault
    size = generator.choice((2, 3, 4, 5, 8, 16))
    fault = EXPERT_PARALLEL.fault(size, context)
    if fault and rules.job.experts is not None:
        yield {"expert_model_parallel_size": size}, fault
    fault = EXPERT_TENSOR_PARALLEL.fault(0, context)
    if layout.tensor_parallel > 1 and fault and "biases" in fault:
        yield {"expert_tensor_parallel_size": None}, fault
    for value in (AS_LAYERS, WHOLE) if layout.tensor_parallel > 1 and rules.job.experts else ():
        fault = EXPERT_TENSOR_PARALLEL.fault(value, context)
        if fault and "--use-tp-pp-dp-mapping" in fault:
            yield {"expert_tensor_parallel_size": value or None}, fault
    size = generator.choice((2, 3, 4, 5, 7, 8))
    fault = PIPELINE_PARALLEL.fault(size, context)
    # Too few layers for a hybrid model's stages are not refused before it is built.
    if fault and (shape.layer_kinds is None or "divide" in fault):
        yield {"pipeline_model_parallel_size": size, "pipeline_model_parallel_layout": None}, fault
    size = generator.choice((2, 3, 4, 5, 7, 16))
    fault = MICRO_BATCH_SIZE.fault(size, context)
    if fault:
        yield {"micro_batch_size": size}, fault
    if layout.pipeline_parallel == 1:
        chunks = generator.choice((2, 4))
        fault = VIRTUAL_STAGES.fault(chunks, context)
        if fault:
            yield {"num_virtual_stages_per_pipeline_rank": chunks}, fault
    if layout.distributed_optimizer and layout.data_parallel > 1:
        bare = KnobContext(layout=layout.with_setting("overlap_grad_reduce", False), shape=shape, rules=rules)
        fault = OVERLAP_PARAM_GATHER.fault(True, bare)
        if fault:
            yield {"overlap_param_gather": True, "overlap_grad_reduce": None}, fault
    for modules in ("moe_act", "mla_up_proj"):
        fault = RECOMPUTE_MODULES.fault(modules, context)
        # A model without experts has no grouped products of theirs.
        if fault and ("needs" in fault or "no experts" in fault):
            whole = dict.fromkeys(("recompute_method", "recompute_num_layers"))
            yield {"recompute_granularity": "selective", "recompute_modules": [modules], **whole}, fault
    for knob in (SHARED_EXPERT_OVERLAP, EXPERT_OVERLAP, DELAYED_WEIGHT_GRADIENTS):
        # Of a job that keeps the setting Megatron refuses no value: its device could not run it.
        fault = None if knob.kept(rules) else knob.fault(True, context)
        if fault:
            yield {knob.destination: True}, fault
    fault = TOKEN_DISPATCHER.fault("allgather", context)
    is_overlapped = context.is_on(SHARED_EXPERT_OVERLAP.name, feature=SHARED_EXPERT_OVERLAP.name)
    if fault and is_overlapped and rules.job.experts and rules.job.experts.shared_ffn_hidden_size:
        yield {"moe_token_dispatcher_type": "allgather"}, fault
    if "precision_aware_optimizer" not in rules.job.features and rules.job.layer_impl != "local":
        fault = OPTIMIZER_CPU_OFFLOAD.fault(True, context)
        if fault:
            yield {"optimizer_cpu_offload": True}, fault
    fault = OFFLOAD_MODULES.fault("expert_fc1", context)
    is_local = rules.job.layer_impl == "local"
    # Before 0.19 Megatron does not compare what is offloaded with what is recomputed.
    compares = not rules.job.framework_version.startswith(("0.17", "0.18"))
    if fault and (is_local or (compares and "recompute of moe" in fault)):
        yield OFFLOAD_MODULES.arguments("expert_fc1"), fault
    if layout.context_parallel > 1 and CP_COMM_TYPE.kept(rules) is None:
        fault = CP_COMM_TYPE.fault("a2a+p2p", context)
        # That heads divide is a rule of Transformer Engine, which a step checks.
        if fault and "hierarchical" in fault:
            yield {"cp_comm_type": ["a2a+p2p"]}, fault
        rings = replace(context, layout=layout.with_setting(CP_COMM_TYPE.name, "a2a+p2p"))
        sizes = generator.choice(("1+2", "2+1", "2+2", "4+2", "3+2"))
        fault = HIERARCHICAL_SIZES.fault(sizes, rings)
        if fault and "hierarchical" in fault:
            values = {HIERARCHICAL_SIZES.destination: HIERARCHICAL_SIZES.write(sizes)}
            yield {"cp_comm_type": ["a2a+p2p"], **values}, fault
    if layout.num_stages > 1:
        counts = list(plan.split.transformer_layers_per_stage)
        counts[-1] += generator.choice((-1, 1))
        if not is_legal_split(counts, num_layers=shape.num_layers, num_stages=layout.num_stages):
            written = Split(transformer_layers_per_stage=tuple(max(0, count) for count in counts))
            if sum(written.transformer_layers_per_stage) != shape.num_layers:
                layout_text = written.layout_text(mtp_layers=plan.made_for.mtp_layers or 0)
                yield {"pipeline_model_parallel_layout": layout_text}, "the stages hold all layers"


def proportions(shape: ModelShape) -> dict[str, Any]:
    """Other FFNs, groups and, where they divide the width of all heads, head sizes of a model."""
    sizes = [size for size in (32, 128) if shape.attention_size % size == 0]
    return {
        "tolerance": 0.1,
        "ffn_ratios": [2.5, 3.5],
        "query_groups": [1, 2],
        **({"head_sizes": sizes} if sizes else {}),
    }


def changed(flags: Flags, words: Sequence[str], values: dict[str, Any]) -> list[str]:
    """The words with other values; None takes an argument out."""
    kept = {name: value for name, value in values.items() if value is not None}
    edited, _ = flags.edit(words, remove=set(values), append=flags.words_for(kept))
    return edited


def no_counts() -> dict[str, Any]:
    """Counts and disagreements before the first plan.

    `spread_over_tensor` are plans whose experts are spread over tensor-parallel ranks, too.
    """
    numbers = dict.fromkeys(("accepted", "refused", "spread_over_tensor", "hybrid", "mtp_before_last"), 0)
    return {**numbers, "disagreements": [], "settings": Counter()}


def _may_be_before_last(space: Space) -> bool:
    """Whether some layout may have multi-token prediction on the stage before the last one."""
    layouts = itertools.chain.from_iterable(space.layouts.values())
    return any(fault_of_before_last(layout, space.rules()) is None for layout in layouts)


def check_command(command: ProductionCommand, generator: random.Random, num: int) -> dict[str, Any]:
    """Counts and disagreements of the plans of one command."""
    flags = native_flags()
    result = no_counts()
    with hopper(command):
        # A plan of a command that does not run as it is written says nothing of our rules.
        own = refusal_of(command.words)
        assert own is None, f"Megatron refuses the command itself: {own}"
        job = job_of(command)
        searches: tuple[dict[str, Any], ...] = (
            {},
            {**FREE, "expert_tensor_parallel": "auto"},
            {**FREE, "scaling": proportions(job.shape)},
            FREE | _DISPATCHERS,
        )
        spaces = [space_of(command, job, search) for search in searches]
        if _may_be_before_last(spaces[0]):
            spaces.append(space_of(command, job, {MTP_STAGE.name: list(MTP_STAGE.words)}))
        user: Namespace = flags.values(command.words)
        for turn in range(num):
            space = spaces[turn % len(spaces)]
            plan = space.decode(Sweep(generator.randrange(10**6)), trial=turn + 1)
            result["settings"].update(setting.name for setting in plan.layout.settings or ())
            result["spread_over_tensor"] += plan.layout.needs_whole_experts
            result["hybrid"] += plan.shape.layer_kinds is not None
            result["mtp_before_last"] += bool(plan.split.mtp_before_last)
            with mock.patch.dict(os.environ):
                words, _ = rewrite(plan, flags=flags, words=command.words)
                set_connections(user, flags.values(words), environment=os.environ, architecture=lambda: 9)
                label = f"{plan.layout.label} {plan.split.label} {plan.schedule.label}"
                refusal = refusal_of(words)
                if refusal is None:
                    result["accepted"] += 1
                else:
                    result["disagreements"].append(
                        {"plan": label, "words": words, "ours": "legal", "megatron": refusal}
                    )
                for values, fault in refused_values(plan, space, generator):
                    if refusal_of(changed(flags, words, values)) is None:
                        result["disagreements"].append(
                            {
                                "plan": label,
                                "words": words,
                                "values": values,
                                "ours": fault,
                                "megatron": "accepted",
                            }
                        )
                    else:
                        result["refused"] += 1
    return result


def main() -> None:
    """Check random plans and write the counts and every disagreement as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    generator = random.Random(options.seed)
    total = no_counts()
    left = options.plans
    while left > 0:
        num = min(left, PLANS_A_COMMAND)
        part = check_command(random_command(generator), generator, num)
        for name, value in part.items():
            total[name] += value
        left -= num
    json.dump(total, sys.stdout)


if __name__ == "__main__":
    main()
