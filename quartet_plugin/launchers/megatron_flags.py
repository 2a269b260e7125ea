"""Megatron's flags among the words of a command, read without Megatron and without starting a process.

A field of `MegatronFlags` is a flag: `num_layers` is `--num-layers`. Words are read as Megatron's own parser
reads them: `--flag value` or `--flag=value`, no abbreviations, the last occurrence counts. A flag that is not
given, or whose value the framework will refuse, is None: the ranks know and say the rest.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.command import ENTRY_MODULE, Command
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.megatron_arguments import stages_of_layout

# A value of argparse may begin with a dash only where it is a number, or holds a space.
# `--flag=a b` is a flag all the same.
_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+", re.ASCII)
_INLINE_VALUE = re.compile(r"--[^\s=]+=")
_MAX_DIGITS = 18
# Flags whose value is a number of devices, layers or sequences.
_SIZES = (
    "num_layers",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "micro_batch_size",
    "global_batch_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedCounts:
    """The counts that a command's flags determine; None where only a started process knows them."""

    num_layers: int | None = None
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_stages: int | None = None
    data_parallel: int | None = None
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    num_microbatches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """The values of Megatron's flags in a command; None, or False for a switch, where one is not given."""

    # The model.
    num_layers: int | None = None
    hybrid_layer_pattern: str | None = None
    hybrid_override_pattern: str | None = None
    heterogeneous_layers_config_path: str | None = None
    heterogeneous_layers_config_encoded_json: str | None = None

    # The layout.
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_layout: str | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    recompute_activations: bool = False
    moe_layer_recompute: bool = False
    recompute_granularity: str | None = None

    # The batch.
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    step_batch_size_schedule: str | None = None

    # What takes the place of the flags above.
    yaml_cfg: str | None = None
    use_mp_args_from_checkpoint_args: bool = False

    @property
    def is_model_stated(self) -> bool:
        """Whether the flags state a model, so that degrees without a flag have Megatron's default, 1."""
        return self.yaml_cfg is None and self.num_layers is not None

    def counts(self, *, num_processes: int | None) -> StatedCounts:
        """The counts that the flags decide for a command that starts `num_processes` (None: not known).

        A yaml configuration replaces every flag; degrees kept in a checkpoint replace those of the flags.
        """
        if self.yaml_cfg is not None:
            return StatedCounts()
        tensor = self._degree(self.tensor_model_parallel_size)
        context = self._degree(self.context_parallel_size)
        pipeline = self._degree(self.pipeline_model_parallel_size)
        data = _quotient(num_processes, tensor, context, pipeline)
        batch = self.global_batch_size
        if batch is None and self.step_batch_size_schedule is None:
            batch = _product(self.micro_batch_size, data)
        return StatedCounts(
            num_layers=self._num_layers(),
            tensor_parallel=tensor,
            context_parallel=context,
            pipeline_parallel=pipeline,
            virtual_stages=self._virtual_stages(pipeline),
            data_parallel=data,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=batch,
            num_microbatches=_quotient(batch, self.micro_batch_size, data),
        )

    def check_sizes(self) -> None:
        """Raise ConfigError for the first size that is below 1: Megatron refuses each."""
        for name in _SIZES if self.yaml_cfg is None else ():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: {value}; must be at least 1; correct the command"
                )

    def layout(self, *, num_processes: int | None) -> Layout | None:
        """The layout that the flags state; None where they leave a part open, or Megatron refuses it."""
        counts = self.counts(num_processes=num_processes)
        tensor, data, micro_batch = counts.tensor_parallel, counts.data_parallel, counts.micro_batch_size
        pipeline, virtual, context = counts.pipeline_parallel, counts.virtual_stages, counts.context_parallel
        is_selective = self.recompute_activations or self.moe_layer_recompute
        recompute = "selective" if is_selective else self.recompute_granularity or "none"
        if not (tensor and pipeline and data and virtual and context and micro_batch):
            return None
        if recompute not in ("none", "selective", "full"):
            return None
        try:
            return Layout(
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                data_parallel=data,
                virtual_stages=virtual,
                context_parallel=context,
                expert_parallel=self.expert_model_parallel_size or 1,
                micro_batch_size=micro_batch,
                sequence_parallel=self.sequence_parallel and tensor > 1,
                distributed_optimizer=self.use_distributed_optimizer,
                recompute=recompute,  # type: ignore[arg-type]  # one of the three
            )
        except ConfigError:
            return None

    def _degree(self, given: int | None) -> int | None:
        """A degree of parallelism; Megatron's default is 1, where the command is Megatron's for certain."""
        if self.use_mp_args_from_checkpoint_args:
            return None
        return 1 if given is None and self.is_model_stated else given

    def _num_layers(self) -> int | None:
        """The transformer layers of a model that is one list of like layers."""
        other = (
            self.hybrid_layer_pattern,
            self.hybrid_override_pattern,
            self.heterogeneous_layers_config_path,
            self.heterogeneous_layers_config_encoded_json,
        )
        return None if any(value is not None for value in other) else self.num_layers

    def _virtual_stages(self, pipeline: int | None) -> int | None:
        """Stages a device, as Megatron's validate_args derives them."""
        layers = self._num_layers()
        if pipeline is None or layers is None:
            return None
        if pipeline == 1:
            return 1
        if self.pipeline_model_parallel_layout is not None:
            return _quotient(num_stages_of(self.pipeline_model_parallel_layout), pipeline)
        if self.num_virtual_stages_per_pipeline_rank is not None:
            return self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            layers += self.account_for_embedding_in_pipeline_split + self.account_for_loss_in_pipeline_split
            return _quotient(layers, pipeline, self.num_layers_per_virtual_pipeline_stage)
        return 1


# The fields by flag, and the kind of value each takes.
_FLAGS = {f"--{field.name.replace('_', '-')}": field for field in fields(MegatronFlags)}


def read_megatron_flags(words: Sequence[str]) -> MegatronFlags:
    """Megatron's flags among `words`, the arguments of the user's script."""
    values: dict[str, Any] = {}
    for flag, given in flags_among(words):
        field = _FLAGS.get(flag)
        if field is not None:
            values[field.name] = True if field.type is bool else _value(field.type, given)
    return MegatronFlags(**values)


def flags_of(command: Command) -> MegatronFlags:
    """Megatron's flags in a command; none of them where it is another framework's."""
    return read_megatron_flags(command.arguments) if command.entry == ENTRY_MODULE else MegatronFlags()


def flags_among(words: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """Every word that is spelled like a long flag, with the words that may be its values, up to a `--`."""
    for index, word in enumerate(words):
        if word == "--":
            return
        if not word.startswith("--") or " " in word.partition("=")[0]:
            continue
        name, has_value, inline = word.partition("=")
        end = index + 1
        while end < len(words) and _is_value(words[end]):
            end += 1
        yield name, [inline] if has_value else words[index + 1 : end]


def num_stages_of(layout: str) -> int | None:
    """The stages of a `--pipeline-model-parallel-layout`, repeats unrolled; None for a text that is none."""
    try:
        return len(stages_of_layout(layout))
    except ConfigError:
        return None


def _is_value(word: str) -> bool:
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return True
    return " " in word and not _INLINE_VALUE.match(word)


def _value(kind: Any, words: Sequence[str]) -> int | str | None:
    """The value of an occurrence; None for one that the framework's parser refuses."""
    if not words:
        return None
    if kind == str | None:
        return words[0]
    try:
        return int(words[0]) if len(words[0]) <= _MAX_DIGITS else None
    except ValueError:
        return None


def _quotient(number: int | None, *divisors: int | None) -> int | None:
    """`number` over all divisors; None where one is not known, or it does not divide."""
    for divisor in divisors:
        if number is None or divisor is None or divisor < 1 or number % divisor:
            return None
        number //= divisor
    return number


def _product(*factors: int | None) -> int | None:
    product = 1
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product
