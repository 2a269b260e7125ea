"""`quartet predict`: time and memory of described runs; no torch, no device."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.command import CalibrationFile, HardwareFolder, constants_of, devices_of


def predict_command(
    rows: Annotated[Path, typer.Argument(metavar="ROWS.json", help="An array of runs.", show_default=False)],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", help="Where to write.", show_default=False),
    ],
    hardware: HardwareFolder = None,
    calibration: CalibrationFile = None,
) -> None:
    """Predict iteration time and peak memory of every run in ROWS.json."""
    from quartet_plugin.cost.predict import predict_rows
    from quartet_plugin.model.files import read_json, write_json_atomic

    predictions = predict_rows(
        read_json(rows), where=str(rows), constants=constants_of(calibration), devices=devices_of(hardware)
    )
    write_json_atomic(output, predictions)
    errors = sum("error" in entry for entry in predictions)
    typer.echo(f"{output}: {len(predictions) - errors} predictions, {errors} rows with an error")
