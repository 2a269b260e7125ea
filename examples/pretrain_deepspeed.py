"""Pretrains a GPT with DeepSpeed's pipeline engine: `torchrun ... examples/pretrain_deepspeed.py FLAGS...`.

An ordinary DeepSpeed script that knows nothing of quartet_plugin. The same command trains on GPUs and on a
CPU (gloo), under torchrun and the `deepspeed` launcher, and, with `-m quartet_plugin.deepspeed` in front
of the script, with a plan. The text is what examples/prepare_data.py writes.
"""

import argparse
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

if not torch.cuda.is_available():
    # Both must be known before DeepSpeed is imported and used: without a GPU it looks for other devices.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

_HEADER = struct.Struct("<QBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "<u1", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenWindows(torch.utils.data.Dataset):
    """Windows of `seq_length` tokens one after another, each with the same shifted by one as labels."""

    def __init__(self, prefix: Path, *, seq_length: int) -> None:
        """Open PREFIX.bin and PREFIX.idx, an indexed dataset; raises ValueError for another format."""
        with prefix.with_name(f"{prefix.name}.idx").open("rb") as stream:
            head = stream.read(len(_MAGIC) + _HEADER.size)
        if head[: len(_MAGIC)] != _MAGIC or len(head) < len(_MAGIC) + _HEADER.size:
            raise ValueError(f"{prefix}.idx: no Megatron index; write one with examples/prepare_data.py")
        version, code, _, _ = _HEADER.unpack(head[len(_MAGIC) :])
        if version != 1 or code not in _DTYPES:
            raise ValueError(f"{prefix}.idx: version {version} with data type {code} is not read here")
        self._tokens = np.memmap(prefix.with_name(f"{prefix.name}.bin"), dtype=_DTYPES[code], mode="r")
        self._seq_length = seq_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self._seq_length
        window = torch.from_numpy(self._tokens[start : start + self._seq_length + 1].astype(np.int64))
        return window[:-1], window[1:]


def initialise(module: nn.Module, *, number: int, seed: int) -> None:
    """Draw the matrices from a generator of the layer's own: the same weights wherever the layer lies."""
    generator = torch.Generator().manual_seed(seed * 10_007 + number)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


class Embedding(nn.Module):
    """Tokens and positions to vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, seq_length: int, *, number: int, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(seq_length, hidden_size)
        initialise(self, number=number, seed=seed)

    @property
    def weight(self) -> nn.Parameter:
        """The matrix that a tied head shares."""
        return self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, sequence] to [batch, sequence, hidden]."""
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Block(nn.Module):
    """A transformer layer: causal attention and a feed-forward network, each behind a norm."""

    def __init__(self, hidden_size: int, num_attention_heads: int, *, number: int, seed: int) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.projection = nn.Linear(hidden_size, hidden_size)
        self.ffn_norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        initialise(self, number=number, seed=seed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden], unchanged in shape."""
        batch, length, width = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        heads = mixed.view(batch, length, 3, self.num_attention_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.ffn_norm(hidden))))


class Head(nn.Module):
    """The last norm and the logits."""

    def __init__(self, hidden_size: int, vocab_size: int, *, number: int, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.logits = nn.Linear(hidden_size, vocab_size, bias=False)
        initialise(self, number=number, seed=seed)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] to [batch, sequence, vocabulary]."""
        return self.logits(self.norm(hidden))


def tied_logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """The head where it shares the embedding's matrix."""
    return functional.linear(hidden, embedding.weight)


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch, a token's mean."""
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.reshape(-1))


def layers_of(args: argparse.Namespace) -> list[Any]:
    """The model as the list of layers that DeepSpeed divides into stages."""
    width, vocab, depth = args.hidden_size, args.vocab_size, args.num_layers
    embedding = (vocab, width, args.seq_length)
    blocks = [
        LayerSpec(Block, width, args.num_attention_heads, number=number, seed=args.seed)
        for number in range(1, depth + 1)
    ]
    if not args.tie_embeddings:
        first = LayerSpec(Embedding, *embedding, number=0, seed=args.seed)
        return [first, *blocks, LayerSpec(Head, width, vocab, number=depth + 1, seed=args.seed)]
    tied = {"number": 0, "seed": args.seed, "tied_weight_attr": "tokens.weight"}
    return [
        TiedLayerSpec("embedding", Embedding, *embedding, **tied),
        *blocks,
        LayerSpec(nn.LayerNorm, width),
        TiedLayerSpec("embedding", Embedding, *embedding, forward_fn=tied_logits, **tied),
    ]


def layers_of_sizes(num_layers: int, hidden_size: int, num_attention_heads: int) -> list[Any]:
    """The layers at another depth and width, for a search of shapes: `layer_builder` in a ds_config."""
    args = parse_arguments()
    args.num_layers, args.hidden_size = num_layers, hidden_size
    args.num_attention_heads = num_attention_heads
    return layers_of(args)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; sizes of the batch are in the ds_config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-path", type=Path, required=True, help="PREFIX of PREFIX.bin and PREFIX.idx")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument(
        "--tie-embeddings", action="store_true", help="the head shares the embedding's matrix"
    )
    parser.add_argument("--pipeline-stages", type=int, default=1)
    parser.add_argument("--partition-method", default="type:Block", help="DeepSpeed's (type:Block)")
    parser.add_argument("--activation-checkpoint-interval", type=int, default=0)
    parser.add_argument("--train-iters", type=int, default=40)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save", type=Path, help="write a checkpoint here at the end")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return deepspeed.add_config_arguments(parser).parse_args(argv)


def main() -> None:
    """Train, and print a line now and then."""
    args = parse_arguments()
    if not torch.cuda.is_available():
        # An optimization of all-reduce inside a node that would be compiled for a minute at the first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    model = PipelineModule(
        layers=layers_of(args),
        num_stages=args.pipeline_stages,
        loss_fn=mean_cross_entropy,
        partition_method=args.partition_method,
        activation_checkpoint_interval=args.activation_checkpoint_interval,
    )
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=TokenWindows(args.data_path, seq_length=args.seq_length),
    )
    train(engine, args)
    if args.save is not None:
        engine.save_checkpoint(str(args.save))
    torch.distributed.destroy_process_group()


def train(engine: Any, args: argparse.Namespace) -> None:
    """The training loop."""
    for iteration in range(1, args.train_iters + 1):
        loss = engine.train_batch()
        if engine.global_rank == 0 and iteration % args.log_interval == 0:
            print(f"iteration {iteration}/{args.train_iters} loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
