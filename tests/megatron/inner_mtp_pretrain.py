"""Trains the example's model with multi-token prediction on whatever stage the command's layout has it.

As Megatron's own pretrain_gpt.py: that stage gets tokens, and shares the embedding with the first one.
"""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


def further_tokens() -> SimpleNamespace:
    """The layers of multi-token prediction and the layout of the stages, as Megatron's configuration has."""
    args = get_args()
    text, layout = args.pipeline_model_parallel_layout, None
    if text is not None:
        layout = PipelineParallelLayerLayout.from_str(text, args.pipeline_model_parallel_size)
    return SimpleNamespace(mtp_num_layers=args.mtp_num_layers, pipeline_model_parallel_layout=layout)


def are_here(vp_stage: int | None = None, *, ignore_virtual: bool = False) -> bool:
    """Whether the layers of multi-token prediction are on this stage, or on any of this rank."""
    config = further_tokens()
    return bool(
        mtp_on_this_rank(
            config.pipeline_model_parallel_layout,
            config.mtp_num_layers,
            ignore_virtual=ignore_virtual,
            vp_stage=vp_stage,
        )
    )


def embedding_ranks(pp_ranks: list[int], *_: Any) -> list[int]:
    """The ranks with a copy of the embedding: `get_embedding_ranks` of Megatron's own script."""
    last = [] if get_args().untie_embeddings_and_output_weights else [pp_ranks[-1]]
    return sorted({pp_ranks[0], *last, *get_mtp_ranks(pp_ranks, further_tokens())})


def main() -> None:
    """Train, with the example's batches on one stage more."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    example["use_installed_dataset_helper"]()
    names = example["forward_step"].__globals__
    is_end, on_this_tp_rank = names["is_first_or_last_pipeline_stage"], names["get_batch_on_this_tp_rank"]

    def with_all_fields(*args: Any, mtp_on_this_rank: bool, **kwargs: Any) -> Any:
        needs_all = mtp_on_this_rank or are_here(ignore_virtual=True)
        return on_this_tp_rank(*args, mtp_on_this_rank=needs_all, **kwargs)

    names["is_first_or_last_pipeline_stage"] = lambda vp_stage: is_end(vp_stage) or are_here(vp_stage)
    names["get_batch_on_this_tp_rank"] = with_all_fields
    args = parse_and_validate_args(extra_args_provider=example["set_defaults"])
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        example["datasets_provider"],
        ModelType.encoder_or_decoder,
        example["forward_step"],
        get_embedding_ranks=embedding_ranks,
    )


if __name__ == "__main__":
    main()
