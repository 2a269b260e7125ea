"""A partition's picture: the products of each step and device in the dimensions' pieces, and what moves."""

import io
from typing import TYPE_CHECKING

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.partition.render import device_text, product_text
from quartet_plugin.partition.table import PRODUCTS, Partition, Phase, Tensor, block_of
from quartet_plugin.partition.transfers import BlockTransfer, transfers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_CELLS = 1200
_DPI = 120
_CELL_INCHES = (1.25, 0.62)
_COLOURS = {Phase.F: (0.16, 0.42, 0.71), Phase.B: (0.90, 0.53, 0.08), Phase.G: (0.18, 0.58, 0.34)}


def partition_png(partition: Partition) -> bytes:
    """The table as a PNG: steps down, devices across, shades by the result's block, below each what arrives.

    Raises UsageError where matplotlib is not installed, ConfigError for a table that is too large to be read.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError(
            "--format png needs matplotlib, which is not installed; pip install 'quartet-plugin[plots]'"
        ) from error
    rows = [(phase, step) for phase in Phase for step in range(len(partition.steps[phase]))]
    if len(rows) * partition.num_devices > MAX_DRAWN_CELLS:
        raise ConfigError(
            f"{partition.name}: {len(rows)} steps of {partition.num_devices} devices; a picture has at most "
            f"{MAX_DRAWN_CELLS} cells; use --format text"
        )
    width, height = _CELL_INCHES
    figure = Figure(
        figsize=(1.0 + width * partition.num_devices, 1.0 + height * len(rows)), dpi=_DPI, facecolor="white"
    )
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.7 / figure.get_figwidth(), 0.02, 1 - 0.8 / figure.get_figwidth(), 0.9))
    _draw(axes, partition, rows)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": "quartet"})
    return buffer.getvalue()


def received_text(transfers: tuple[BlockTransfer, ...], phase: Phase, step: int, device: int) -> str:
    """The tensors that a device receives during a step, with a plus before sums: `I W`, `+dO`."""
    arriving = [
        transfer
        for transfer in transfers
        if (transfer.phase, transfer.step, transfer.target) == (phase, step, device)
    ]
    return " ".join(
        f"{'+' if is_sum else ''}{tensor}"
        for tensor in Tensor
        for is_sum in (False, True)
        if any(transfer.tensor is tensor and transfer.is_sum is is_sum for transfer in arriving)
    )


def _draw(axes: "Axes", partition: Partition, rows: list[tuple[Phase, int]]) -> None:
    from matplotlib.patches import Rectangle

    transfers = transfers_of(partition)
    for row, (phase, step) in enumerate(rows):
        result = PRODUCTS[phase][2]
        blocks = sorted(set(partition.blocks_of(result)))
        for device, triple in enumerate(partition.steps[phase][step]):
            shade = 0.45 * blocks.index(block_of(result, triple)) / max(1, len(blocks) - 1)
            red, green, blue = (0.55 + 0.45 * value for value in _COLOURS[phase])
            colour = tuple(value + (1 - value) * shade for value in (red, green, blue))
            axes.add_patch(Rectangle((device, row), 0.96, 0.94, facecolor=colour, edgecolor="none"))
            axes.text(
                device + 0.48, row + 0.36, product_text(phase, triple), ha="center", va="center", fontsize=7
            )
            received = received_text(transfers, phase, step, device)
            if received:
                axes.text(
                    device + 0.48, row + 0.74, f"receives {received}", ha="center", va="center", fontsize=6
                )
    axes.set_xlim(0, partition.num_devices)
    axes.set_ylim(len(rows), 0)
    axes.set_xticks([device + 0.48 for device in range(partition.num_devices)])
    axes.set_xticklabels([device_text(partition.mesh, device) for device in range(partition.num_devices)])
    axes.xaxis.tick_top()
    axes.set_yticks([row + 0.47 for row in range(len(rows))])
    axes.set_yticklabels([f"{phase}{step}" for phase, step in rows])
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(f"{partition.name}: products and what arrives meanwhile", fontsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
