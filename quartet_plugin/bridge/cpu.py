"""Sets the CPU device in a configuration: gloo, layers without Transformer Engine, no fused kernels."""

from typing import Any

from quartet_plugin.bridge.fields import arguments_of
from quartet_plugin.errors import ConfigError

_MODEL = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "cross_entropy_loss_fusion"),
    *("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm"),
    "tp_comm_overlap",
)


def prepare_for_cpu(config: Any) -> None:
    """Change the configuration to the CPU's. Raises ConfigError for a field without a CPU counterpart."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    args = arguments_of(config)
    for name in ("sequence_parallel", "fp8", "fp4"):
        if getattr(args, name, None):
            raise ConfigError(f"{name} cannot run on the CPU device; omit it")
    for name in _MODEL:
        if name in vars(config.model):
            setattr(config.model, name, False)
    config.model.transformer_layer_spec = local_layer_spec
    config.dist.distributed_backend = "gloo"
    if "num_workers" in vars(config.dataset):
        config.dataset.num_workers = 0
    if getattr(config, "comm_overlap", None) is not None:
        config.comm_overlap.tp_comm_overlap = False
