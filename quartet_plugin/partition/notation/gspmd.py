"""GSPMD's sharding annotations, as XLA's HLO text has them: `{devices=[2,2]0,1,3,2}` (Xu et al. 2021)."""

import re

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown
from quartet_plugin.partition.tiles import TileAssignment

_COPIES = " last_tile_dim_replicate"
_TEXT = re.compile(rf"\{{devices=\[([0-9]+(?:,[0-9]+){{1,2}})\]([0-9]+(?:,[0-9]+)*)({_COPIES})?\}}", re.ASCII)


def to_gspmd(tiles: TileAssignment) -> str:
    """The annotation of a matrix: tiles by row and column, then the devices of each tile."""
    dims = [tiles.rows, tiles.columns, *([tiles.copies] if tiles.copies > 1 else [])]
    devices = ",".join(map(str, tiles.devices))
    return f"{{devices=[{','.join(map(str, dims))}]{devices}{_COPIES if tiles.copies > 1 else ''}}}"


def from_gspmd(text: str) -> TileAssignment:
    """The exact inverse of `to_gspmd`. Raises ConfigError for another text."""
    match = _TEXT.fullmatch(text)
    if match is not None:
        dims = [int(word) for word in match[1].split(",")]
        devices = tuple(int(word) for word in match[2].split(","))
        copies = dims[2] if len(dims) == 3 else 1
        has_copies = match[3] is not None
        if has_copies == (len(dims) == 3) and sorted(devices) == list(range(dims[0] * dims[1] * copies)):
            return TileAssignment(dims[0], dims[1], copies, devices)
    raise ConfigError(f"sharding {shown(text)}: must be like {{devices=[2,2]0,1,3,2}}, each device once")
