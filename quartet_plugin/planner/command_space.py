"""The search space of a Megatron command by its flags, as trial 0 would report them; nothing is started."""

from argparse import Namespace
from typing import Literal, cast

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import BRIDGE_MODULE, DEEPSPEED_MODULE, Command
from quartet_plugin.launchers.megatron_words import arguments_in, read_arguments
from quartet_plugin.model.frameworks import MEGATRON
from quartet_plugin.model.megatron_arguments import (
    experts_of,
    hybrid_pattern,
    latent_attention_of,
    layout_of,
    logged_expert_layers_of,
    mtp_kinds_of,
    num_mtp_layers_of,
    precision_of,
    schedule_of,
    shape_of,
    split_of,
)
from quartet_plugin.model.plan import NodeInfo
from quartet_plugin.model.training_job import TrainingJob
from quartet_plugin.planner.job import DEFAULT_RELEASE
from quartet_plugin.planner.kept_axes import features_of_command
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.knobs.registry import settings_of
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.space.runtime_refusals import engine_layers_refusal, refusal

# No knob depends on the vocabulary, which the command's tokenizer may determine.
_ANY_VOCABULARY = 32_768


def space_of_command(command: Command) -> Space:
    """The space that a search of the command opens, without a section `search`.

    Raises ConfigError for a command whose flags do not say its model or its processes, InfeasibleError for
    one whose layers or batch its stages or processes do not divide.
    """
    if command.starter == "other" or command.entry in (DEEPSPEED_MODULE, BRIDGE_MODULE):
        raise ConfigError("its model is not in flags that can be read without starting it")
    num_processes, num_nodes = command.num_processes, command.num_nodes or 1
    if num_processes is None or num_processes % num_nodes:
        raise ConfigError("its flags do not say the number of processes")
    args, _ = read_arguments(command.arguments)
    nodes = [
        NodeInfo(host=f"node-{index}", node_class="node", num_slots=num_processes // num_nodes)
        for index in range(num_nodes)
    ]
    job = _reported_job(command, args, num_processes=num_processes)
    return build_space(job, nodes=nodes, search=SearchConfig(), run="command", seed=0)


def _reported_job(command: Command, args: Namespace, *, num_processes: int) -> TrainingJob:
    """What RANK 0 would report of these arguments, as far as a start without a device shows it."""
    layout, stated = layout_of(args, world_size=num_processes), arguments_in(command.arguments)
    layer_impl = getattr(stated, "transformer_impl", "transformer_engine")
    is_grouped = args.num_experts and args.moe_grouped_gemm and layer_impl != "local"
    has_state_space = "M" in hybrid_pattern(args) and layer_impl != "local"
    return TrainingJob(
        framework=MEGATRON.framework,
        framework_version=DEFAULT_RELEASE,
        torch_version="",
        shape=shape_of(args, vocab_size=args.padded_vocab_size or args.vocab_size or _ANY_VOCABULARY),
        layout=layout,
        split=split_of(args),
        schedule=schedule_of(args),
        global_batch_size=args.global_batch_size or layout.micro_batch_size * layout.data_parallel,
        train_iters=0,
        precision=cast(Literal["fp32", "bf16", "fp16"], precision_of(args)),
        features=features_of_command(command),
        neutralised=(),
        settings=tuple(settings_of(args)),
        full_backward=engine_layers_refusal(has_experts=bool(is_grouped), has_state_space=has_state_space),
        layer_impl=layer_impl,
        normalization=getattr(stated, "normalization", "LayerNorm"),
        experts=experts_of(args),
        latent=latent_attention_of(args),
        mtp_layers=num_mtp_layers_of(args) or None,
        mtp_kinds=mtp_kinds_of(args),
        logged_expert_layers=logged_expert_layers_of(args) or None,
        no_custom_schedules=refusal(stated),
    )
