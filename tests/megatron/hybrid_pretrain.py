"""Trains a HybridModel of attention and MLP layers: `hybrid_pretrain.py --hybrid-layer-pattern '*-*-' ...`.

All but the model is the example script's. Megatron's own layers stand where HybridModel has Transformer
Engine's, so it trains on processors, too.
"""

import runpy
from pathlib import Path

from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"

_ATTENTION = ModuleSpec(
    module=SelfAttention,
    params={"attn_mask_type": AttnMaskType.causal},
    submodules=SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
    ),
)
_MLP = ModuleSpec(
    module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
)
LAYERS = ModuleSpec(
    module=hybrid_block.HybridStack,
    submodules=hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=WrappedTorchNorm,
                self_attention=_ATTENTION,
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=WrappedTorchNorm, mlp=_MLP, mlp_bda=get_bias_dropout_add
            ),
        ),
    ),
)


def main() -> None:
    """Train, with Megatron's norm at the end of the layers."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    example["use_installed_dataset_helper"]()
    hybrid_block.TENorm = WrappedTorchNorm
    args = parse_and_validate_args(extra_args_provider=example["set_defaults"])
    model = hybrid_config_from_args(args)
    model.hybrid_stack_spec = LAYERS
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, example["datasets_provider"], ModelType.encoder_or_decoder, example["forward_step"])


if __name__ == "__main__":
    main()
