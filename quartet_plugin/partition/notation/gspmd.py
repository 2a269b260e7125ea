"""GSPMD's sharding annotations, as XLA's HLO text has them: `{devices=[2,2]0,1,3,2}` (Xu et al. 2021)."""

from quartet_plugin.partition.tiles import TileAssignment

_COPIES = " last_tile_dim_replicate"


def to_gspmd(tiles: TileAssignment) -> str:
    """The annotation of a matrix: tiles by row and column, then the devices of each tile."""
    dims = [tiles.rows, tiles.columns, *([tiles.copies] if tiles.copies > 1 else [])]
    devices = ",".join(map(str, tiles.devices))
    return f"{{devices=[{','.join(map(str, dims))}]{devices}{_COPIES if tiles.copies > 1 else ''}}}"
