"""The arguments of Megatron that a plan sets on an axis: without one of them the axis stays at stock."""

from collections.abc import Container, Mapping

from quartet_plugin.space.axes import Axis

_PIPELINE, _LAYOUT = "pipeline_model_parallel_size", "pipeline_model_parallel_layout"
NEEDED_FLAGS: Mapping[Axis, tuple[str, ...]] = {
    Axis.SCALING: ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels"),
    Axis.SPLIT: (_LAYOUT,),
    # Other stages are written as a layout, and so are those of another pipeline degree.
    Axis.SCHEDULE: (_PIPELINE, _LAYOUT, "microbatch_group_size_per_vp_stage"),
    Axis.MAPPING: (),
    Axis.DEGREES: (
        *("tensor_model_parallel_size", _PIPELINE, _LAYOUT, "context_parallel_size"),
        # Megatron pads the vocabulary by the tensor-parallel size.
        "padded_vocab_size",
    ),
    Axis.MICRO_BATCH: ("micro_batch_size", "global_batch_size"),
    Axis.RECOMPUTE: ("recompute_granularity", "recompute_method", "recompute_num_layers"),
}
_PREFIX = "without --"
# Where the option has another name than the argument.
_FLAGS = {"microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage"}


def flag_of(name: str) -> str:
    """The option of an argument."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def missing_flags(axis: Axis, known: Container[str]) -> tuple[str, ...]:
    """The arguments that the axis needs and a framework with the arguments `known` lacks."""
    return tuple(name for name in NEEDED_FLAGS.get(axis, ()) if name not in known)


def missing_flag_features(known: Container[str]) -> tuple[str, ...]:
    """The features `without --FLAG` of a job whose framework has the arguments `known` alone."""
    names = (name for axis in NEEDED_FLAGS for name in missing_flags(axis, known))
    return tuple(sorted({f"without {flag_of(name)}" for name in names}))


def axes_without(feature: str) -> frozenset[Axis] | None:
    """The axes that need the flag of a feature `without --FLAG`; None for any other feature."""
    if not feature.startswith(_PREFIX):
        return None
    flag = feature.removeprefix("without ")
    return frozenset(axis for axis, names in NEEDED_FLAGS.items() if flag in map(flag_of, names))
