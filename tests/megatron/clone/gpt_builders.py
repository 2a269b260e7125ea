"""The builder of a GPT stage of a Megatron-LM clone, for any release."""

from typing import Any


def gpt_builder(
    args: Any,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """A stage of GPTModel with Megatron's local layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import arguments

    if config is None:
        try:
            from megatron.training.argument_utils import core_transformer_config_from_args
        except ImportError:
            core_transformer_config_from_args = arguments.core_transformer_config_from_args
        config = core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
