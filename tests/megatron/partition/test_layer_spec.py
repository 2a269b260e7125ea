"""Specifications are data: the plan's linears take their slots, the user's specification stays as it is."""

from types import SimpleNamespace
from typing import Any

import pytest

from quartet_plugin.errors import PlanError, SeamError
from quartet_plugin.model.tensor_partition import TensorPartition, partition_from_label
from quartet_plugin.trial.as_planned import OF_PARTITIONS, REPLACED_BY_PARTITIONS

pytestmark = pytest.mark.timeout(120)


def context_of(label: str) -> Any:
    from quartet_plugin.megatron.partition.context import PartitionContext

    partition = partition_from_label(label)
    assert isinstance(partition, TensorPartition)
    return PartitionContext(partition)


def local_spec(**options: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(**options)


def linears_of(spec: Any) -> dict[str, Any]:
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.keywords["submodules"]
    return {
        "qkv": attention.linear_qkv,
        "proj": attention.linear_proj,
        "fc1": mlp.linear_fc1,
        "fc2": mlp.linear_fc2,
    }


@pytest.mark.parametrize(
    ("label", "replaced"),
    [
        ("grid", {"qkv", "proj", "fc1", "fc2"}),
        ("rings", {"qkv", "proj", "fc1", "fc2"}),
        ("attention stock, mlp grid", {"fc1", "fc2"}),
        ("attention rings, mlp stock", {"qkv", "proj"}),
    ],
)
def test_the_blocks_of_the_plan_are_replaced(label: str, replaced: set[str]) -> None:
    from quartet_plugin.megatron.partition.layer_spec import with_partition

    spec = local_spec()
    before = linears_of(spec)
    after = linears_of(with_partition(spec, context_of(label)))
    assert {name for name in after if after[name] is not before[name]} == replaced
    assert linears_of(spec) == before


def test_every_layer_of_a_block_is_replaced() -> None:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from quartet_plugin.megatron.partition.layer_spec import with_partition

    block = TransformerBlockSubmodules(layer_specs=[local_spec(), local_spec()])
    changed = with_partition(block, context_of("grid"))
    assert len(changed.layer_specs) == 2
    for before, after in zip(block.layer_specs, changed.layer_specs, strict=True):
        assert linears_of(after) != linears_of(before)


def test_a_fused_norm_becomes_a_norm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's fused layers have the norm's state; its key in a checkpoint stays."""
    from dataclasses import replace

    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer.identity_op import IdentityOp

    from quartet_plugin.megatron.partition.layer_spec import with_partition

    norm = SimpleNamespace()
    monkeypatch.setattr(transformer_engine, "TENorm", norm, raising=False)
    spec = local_spec()
    fused = replace(
        spec,
        submodules=replace(
            spec.submodules,
            input_layernorm=IdentityOp,
            pre_mlp_layernorm=IdentityOp,
            sharded_state_dict_keys_map={},
        ),
    )
    changed = with_partition(fused, context_of("attention grid, mlp stock")).submodules
    assert changed.input_layernorm is norm
    assert changed.pre_mlp_layernorm is IdentityOp
    assert changed.sharded_state_dict_keys_map == {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_"
    }


def test_layers_with_other_linears_are_refused_by_name() -> None:
    from quartet_plugin.megatron.partition.layer_spec import with_partition

    experts = local_spec(num_experts=4, moe_grouped_gemm=False)
    with pytest.raises(PlanError, match=r"MLP is .*MoE"):
        with_partition(experts, context_of("grid"))
    with pytest.raises(PlanError, match="self attention is MLASelfAttention"):
        with_partition(local_spec(multi_latent_attention=True), context_of("grid"))


def test_the_seam_is_left_as_it_was() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.partition.install import PartitionedModels

    partition = partition_from_label("grid")
    assert partition is not None
    before = GPTModel.__init__
    installation = seams.install(PartitionedModels(partition).wrappers)
    assert GPTModel.__init__ is not before
    installation.uninstall()
    assert GPTModel.__init__ is before


def test_an_unknown_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quartet_plugin.megatron.partition.install import PartitionedModels

    def changed(self: Any, config: Any) -> None:
        del self, config

    monkeypatch.setattr(GPTModel, "__init__", changed)
    partition = partition_from_label("grid")
    assert partition is not None
    with pytest.raises(SeamError, match="GPTModel"):
        PartitionedModels(partition)


def test_layers_that_replace_others_are_known_to_the_comparison_of_modules() -> None:
    """What a trial's ranks ran is compared with the command's modules, these apart."""
    from megatron.core.transformer.mlp import MLP
    from torch.nn import Module

    from quartet_plugin.megatron.partition import grid_linear, ring_linear, sharded_state

    kinds = [
        value
        for module in (grid_linear, ring_linear, sharded_state)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Module) and value.__module__ == module.__name__
    ]
    assert {kind.__name__ for kind in kinds} == OF_PARTITIONS
    replaced = {base.__name__ for kind in kinds for base in kind.__bases__ if base is not Module}
    assert replaced == {"ColumnParallelLinear", "RowParallelLinear", MLP.__name__}
    assert replaced <= REPLACED_BY_PARTITIONS
