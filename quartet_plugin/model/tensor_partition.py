"""How a plan cuts the linears of a layer over its tensor-parallel devices: a form for each of two blocks.

`stock` is the framework's own: one dimension, collectives. `rings` are the same shards with the collectives
as rings that products hide. A `grid` cuts in two dimensions, with `outer` in one dimension around grids.
"""

import re
from dataclasses import field
from math import isqrt
from typing import Annotated, Literal, cast

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown
from quartet_plugin.model.schema import ADDED, Bounds, record

PartitionForm = Literal["stock", "rings", "grid"]
FORMS: tuple[PartitionForm, ...] = ("stock", "rings", "grid")
_OUTER = r"grid outer (\d{1,7})"
_BLOCK = r"stock|rings|grid(?: outer \d{1,7})?"
RULE = "must be stock, rings, grid, grid outer N, or attention FORM, mlp FORM"


@record
class BlockPartition:
    """The form of one block's linears; `outer` is the number of grids that cut one dimension around them."""

    form: PartitionForm
    outer: Annotated[int, Bounds(ge=2, le=2**20)] | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.outer is not None and self.form != "grid":
            raise ConfigError(f"outer: {self.outer}; goes with form grid, not {self.form}")

    @property
    def label(self) -> str:
        """The form as q.yaml and tables have it: `rings`, `grid`, `grid outer 2`."""
        return self.form if self.outer is None else f"{self.form} outer {self.outer}"

    @property
    def num_outer(self) -> int:
        """Grids that cut one dimension; 1 without an outer one."""
        return self.outer or 1

    def side(self, tensor_parallel: int) -> int:
        """The side of each grid on this number of devices. Raises ConfigError where they make no grid."""
        side = isqrt(tensor_parallel // self.num_outer)
        if side < 2 or side**2 * self.num_outer != tensor_parallel:
            squares = "4, 9, 16, ..." if self.outer is None else f"{self.outer} x 4, {self.outer} x 9, ..."
            raise ConfigError(f"{self.label} on {tensor_parallel} devices: must be {squares}")
        return side


@record
class TensorPartition:
    """The forms of a layer's two blocks. A plan with both blocks stock has none."""

    attention: BlockPartition
    mlp: BlockPartition

    def __post_init__(self) -> None:
        if {block.form for block in self.blocks.values()} == {"stock"}:
            raise ConfigError("tensor_partition: both blocks are stock; omit it")

    @property
    def blocks(self) -> dict[str, BlockPartition]:
        """The blocks by name."""
        return {"attention": self.attention, "mlp": self.mlp}

    @property
    def label(self) -> str:
        """The form of both blocks, or each block's: `grid`, `attention stock, mlp grid outer 2`."""
        if self.attention == self.mlp:
            return self.attention.label
        return ", ".join(f"{name} {block.label}" for name, block in self.blocks.items())

    def check_devices(self, tensor_parallel: int) -> None:
        """Raise ConfigError where a block's form does not fit on this number of devices."""
        if tensor_parallel < 2:
            raise ConfigError(f"{self.label} on {tensor_parallel} devices: must be 2 or more")
        for block in self.blocks.values():
            if block.form == "grid":
                block.side(tensor_parallel)


def partition_from_label(text: str) -> TensorPartition | None:
    """The inverse of `label`; None for `stock`. Raises ConfigError for another text."""
    match = re.fullmatch(rf"attention ({_BLOCK}), mlp ({_BLOCK})|({_BLOCK})", text, re.ASCII)
    if match is None:
        raise ConfigError(f"tensor_partition {shown(text)}: {RULE}")
    attention, mlp = (_block(match[index] or match[3]) for index in (1, 2))
    is_stock = attention.form == mlp.form == "stock"
    return None if is_stock else TensorPartition(attention=attention, mlp=mlp)


def _block(text: str) -> BlockPartition:
    match = re.fullmatch(_OUTER, text, re.ASCII)
    if match is None:
        return BlockPartition(form=cast(PartitionForm, text))
    outer = int(match[1])
    if not 2 <= outer <= 2**20:
        raise ConfigError(f"tensor_partition {text}: outer must be from 2 to 2^20")
    return BlockPartition(form="grid", outer=outer)
