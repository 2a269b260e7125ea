"""A linear of a transformer layer on a grid of devices, with Megatron's layouts on its outside.

Inside, the device holds one block of the weight, and of the input and the output the blocks of its table's
homes. The first linear of a block takes tokens in sequence-parallel shards, the second one gives them;
between qkv and proj lies Megatron's attention with its part of the heads, between fc1 and fc2 the grid's
layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from quartet_plugin.errors import PlanError
from quartet_plugin.megatron.partition.borders import Border, gather_tokens, gather_vector, scatter_tokens
from quartet_plugin.megatron.partition.context import PartitionContext
from quartet_plugin.megatron.partition.sharded_state import sharded_linear
from quartet_plugin.partition.table import Tensor
from quartet_plugin.runtime.partition.linear import partitioned_linear

# (piece of K, pieces of K), (piece of N, pieces of N) of a weight [K, N].
BlockPlace = tuple[tuple[int, int], tuple[int, int]]


class GridLinear(torch.nn.Module):  # type: ignore[misc]
    """One of qkv, proj, fc1 and fc2; takes and returns what Megatron's linear in its place does."""

    # Split backwards mark its weight as they mark those of Megatron's linears.
    is_partitioned = True

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        context: PartitionContext,
        name: str,
        config: Any,
        init_method: Callable[[Any], Any],
        bias: bool,
        stride: int = 1,
    ) -> None:
        super().__init__()
        self.linear_name = name
        # For the trial's report of what was built.
        self.block_label = context.block(name).label
        self.config = config
        self.stride = stride
        self._context = context
        self._executor = context.executor(name)
        self._place = context.place(name)
        homes, pieces = self._executor.steps.homes, self._executor.steps.partition.pieces
        home = homes[Tensor.WEIGHT]
        self.block_place: BlockPlace = ((home.columns[0], pieces[2]), (home.rows[0], pieces[1]))
        self._row = self._border(
            "row", self._place.row_peers, Tensor.INPUT if self.is_first else Tensor.OUTPUT
        )
        self._column = Border(
            "column", context.messages, context.device, self._place.column_peers, range(self._place.side)
        )
        self._make_parameters(input_size, output_size, init_method, has_bias=bias)

    @property
    def is_first(self) -> bool:
        """Whether it is the first linear of its block."""
        return self.linear_name in ("qkv", "fc1")

    @property
    def bias_place(self) -> tuple[int, int] | None:
        """This device's piece of the bias and their number; None for a bias that every device has whole."""
        if not self.is_first:
            return None
        piece, pieces = self.block_place[0]
        return piece * self._place.side + self._place.row, pieces * self._place.side

    def _border(self, name: str, peers: tuple[int, ...], tensor: Tensor) -> Border:
        """The exchange among a row's devices, each of which has the columns of its home of the tensor."""
        home = self._executor.steps.partition.homes[tensor]
        columns = [home.blocks[peer][0][1] for peer in peers]
        return Border(name, self._context.messages, self._context.device, peers, columns)

    def _check_divides(self, kind: str, size: int, pieces: int) -> None:
        if size % pieces:
            raise PlanError(
                f"layout.tensor_partition: {self.block_label}; {self.linear_name} has {size} {kind}; "
                f"must be a multiple of {pieces}"
            )

    def _make_parameters(
        self, input_size: int, output_size: int, init_method: Callable[[Any], Any], *, has_bias: bool
    ) -> None:
        (_, rows), (_, columns) = self.block_place
        self._check_divides("outputs", output_size, (self.bias_place or (0, rows))[1] * self.stride)
        self._check_divides("inputs", input_size, columns)
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        empty = torch.empty(
            output_size // rows, input_size // columns, device=device, dtype=config.params_dtype
        )
        self.weight = torch.nn.Parameter(empty)
        set_tensor_model_parallel_attributes(self.weight, True, 0, self.stride)
        self.weight.allreduce = True
        if config.perform_initialization:
            self._initialize(input_size, output_size, init_method)
        self.bias: torch.nn.Parameter | None = None
        if has_bias:
            pieces = 1 if self.bias_place is None else self.bias_place[1]
            zeros = torch.zeros(output_size // pieces, device=device, dtype=config.params_dtype)
            self.bias = torch.nn.Parameter(zeros)
            self.bias.allreduce = True
            if self.bias_place is None:
                self.bias.sequence_parallel = True
            else:
                set_tensor_model_parallel_attributes(self.bias, True, 0, self.stride)

    def _initialize(self, input_size: int, output_size: int, init_method: Callable[[Any], Any]) -> None:
        """Give the weight its block of the whole matrix where the CPU's generator makes it; else draw it.

        A gated layer's piece has the same piece of both halves, as stock's shards have.
        """
        if not self.config.use_cpu_initialization:
            with get_cuda_rng_tracker().fork():
                init_method(self.weight)
            return
        whole = torch.empty(output_size, input_size, dtype=torch.float32)
        init_method(whole)
        (piece, pieces), (column, columns) = self.block_place
        rows = whole.unflatten(0, (self.stride, pieces, -1))[:, piece].flatten(0, 1)
        with torch.no_grad():
            self.weight.copy_(rows.chunk(columns, 1)[column])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and, but for qkv, which adds it, the bias that Megatron is to add."""
        if self.is_first:
            hidden = gather_tokens(hidden, self._row)
        elif self.linear_name == "proj":
            hidden = scatter_tokens(self._in_grid_order(hidden), self._column)
        flat = hidden.reshape(-1, hidden.shape[-1])
        output = partitioned_linear(flat, self.weight, self._executor, defer=self._context.defer)
        output = output.view(-1, hidden.shape[1], output.shape[-1])
        if self.linear_name == "qkv":
            output = self._in_token_order(gather_tokens(output, self._column))
            return (output if self.bias is None else output + self.bias), None
        if self.linear_name == "fc1":
            return output, None if self.bias is None else self._whole_bias(self.bias)
        return scatter_tokens(output, self._row), self.bias

    def _whole_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The bias of this device's output, of which every device of the column has a piece."""
        gathered = gather_vector(bias, self._column)
        return gathered.unflatten(1, (self.stride, -1)).transpose(0, 1).reshape(-1)

    def _in_token_order(self, hidden: torch.Tensor) -> torch.Tensor:
        """Tokens [rows of a grid x grids] of blocks as all tokens [grids x rows] in their order."""
        return self._swapped(hidden, self._place.side, self._place.outer)

    def _in_grid_order(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._swapped(hidden, self._place.outer, self._place.side)

    def _swapped(self, hidden: torch.Tensor, first: int, second: int) -> torch.Tensor:
        if self._place.outer == 1:
            return hidden
        return hidden.unflatten(0, (first, second, -1)).transpose(0, 1).flatten(0, 2)

    def backward_dw(self) -> None:
        """Do nothing: Megatron's own delayed weight gradients are not used."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore it: it is there for checkpoints of other layers alone."""

    def get_extra_state(self) -> None:
        """Nothing, under a name that stock's checkpoints have."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The blocks as parts of the matrices that stock saves and loads."""
        return sharded_linear(self, prefix, sharded_offsets, metadata)
