"""`quartet predict`: time and memory of described runs; no torch, no device."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.command import CalibrationFile, HardwareFolder, check_folder, constants_of, devices_of
from quartet_plugin.cli.output import show
from quartet_plugin.errors import ConfigError

# Some ten thousand rows, each a page of figures.
MAX_ROWS_BYTES = 16 * 2**20


def predict_command(
    rows: Annotated[
        Path,
        typer.Argument(metavar="ROWS.json", help="A JSON array that describes runs.", show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write.", show_default=False),
    ],
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Predict iteration time and peak memory of every run in ROWS.json."""
    from quartet_plugin.cost.predict import predict_rows
    from quartet_plugin.model.files import read_json, write_json_atomic

    check_folder(output)
    predictions = predict_rows(
        read_json(rows, max_bytes=MAX_ROWS_BYTES),
        where=str(rows),
        constants=constants_of(calibration),
        devices=devices_of(hardware),
        folder=rows.parent,
    )
    write_json_atomic(output, predictions)
    errors = [entry["error"] for entry in predictions if "error" in entry]
    show(f"{output}: {len(predictions) - len(errors)} predictions, {len(errors)} rows with an error")
    if errors and len(errors) == len(predictions):
        raise ConfigError(f"{rows}: none of {len(errors)} rows can be predicted; the first: {errors[0]}")
