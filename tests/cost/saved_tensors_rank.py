"""One rank of a test: `saved_tensors_rank.py RESULT CASES` on the CPU device.

CASES is a JSON array of [flags of Megatron, label of a tensor partition]. Of each the model that the flags
make runs one microbatch forwards and backwards; the last rank writes of every case the most bytes that
autograd had saved, and the number of its parameters, as a JSON array of pairs to RESULT.
"""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Install the device, join the ranks, and weigh every case."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.ensure_environment()
    result, cases = sys.argv[1:]
    cpu_device.install()

    import torch

    torch.distributed.init_process_group("gloo")
    world_size = torch.distributed.get_world_size()
    peaks = [saved_bytes(shlex.split(flags), label) for flags, label in json.loads(cases)]
    if int(os.environ["RANK"]) == world_size - 1:
        Path(result).write_text(json.dumps(peaks))
    cpu_device.exit_now()


def saved_bytes(flags: list[str], label: str) -> tuple[int, int]:
    """The most bytes that autograd saves in a microbatch under a partition, and the model's parameters."""
    from megatron.core import parallel_state

    from quartet_plugin.megatron import seams
    from quartet_plugin.megatron.partition.install import PartitionedModels
    from quartet_plugin.model.tensor_partition import partition_from_label
    from quartet_plugin.runtime.activation_tracker import SavedTensorTracker

    args = parsed(flags)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )
    partition = partition_from_label(label)
    installation = None if partition is None else seams.install(PartitionedModels(partition).wrappers)
    model = built(args)
    if installation is not None:
        installation.uninstall()
    tracker = SavedTensorTracker()
    tracker.begin(model.parameters())
    with tracker.saving():
        model(**microbatch(args)).sum().backward()
    return tracker.peak_bytes, sum(parameter.numel() for parameter in model.parameters())


def parsed(flags: list[str]) -> Any:
    """Megatron's arguments of a training command with these flags."""
    from megatron.training.arguments import parse_args, validate_args

    from quartet_plugin.megatron import cpu_device

    sys.argv = ["train", *flags, *cpu_device.required_flags(set(flags))]
    args = parse_args()
    validate_args(args)
    args.padded_vocab_size = args.vocab_size
    return args


def built(args: Any) -> Any:
    """The model that a training with these arguments has."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = gpt_config_from_args(args)
    return config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())


def microbatch(args: Any) -> dict[str, Any]:
    """Tokens, positions, the causal mask that the data has, and labels."""
    import torch

    shape = args.micro_batch_size, args.seq_length
    tokens = torch.randint(args.vocab_size, shape)
    scores = torch.ones(args.micro_batch_size, 1, args.seq_length, args.seq_length)
    return {
        "input_ids": tokens,
        "position_ids": torch.arange(args.seq_length).expand(shape),
        "attention_mask": scores.tril() < 0.5,
        "labels": tokens,
    }


if __name__ == "__main__":
    main()
