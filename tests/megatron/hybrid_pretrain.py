"""Trains a HybridModel of Megatron's own layers: `hybrid_pretrain.py --hybrid-layer-pattern '*-M-' ...`.

All but the model is the example script's.
"""

import runpy
from pathlib import Path

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import hybrid_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


def main() -> None:
    """Train, with Megatron's specification of the layers."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    example["use_installed_dataset_helper"]()
    args = parse_and_validate_args(extra_args_provider=example["set_defaults"])
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, example["datasets_provider"], ModelType.encoder_or_decoder, example["forward_step"])


if __name__ == "__main__":
    main()
