"""Device files and a calibration, as the commands of the cost model take them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quartet_plugin.cost.constants import Constants

HardwareFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Device files of your own, before the library's."),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A cluster's calibration, by `quartet calibrate`."),
]


def constants_of(calibration: Path | None) -> "Constants | None":
    """The constants that a calibration file corrected; None for the package's own."""
    if calibration is None:
        return None
    from quartet_plugin.calibration.calibration_file import read_calibration

    return read_calibration(calibration).constants
