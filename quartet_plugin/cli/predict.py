"""`quartet predict`: time and memory of described runs; no torch, no device."""

from pathlib import Path
from typing import Annotated

import typer

from quartet_plugin.cli.hardware import CalibrationFile, HardwareFolder, constants_of


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @app.command("predict")
    def predict(
        ctx: typer.Context,
        rows: Annotated[
            Path, typer.Argument(metavar="ROWS.json", help="An array of runs.", show_default=False)
        ],
        output: Annotated[
            Path,
            typer.Option("-o", "--output", metavar="FILE", help="Where to write.", show_default=False),
        ],
        hardware: HardwareFolder = None,
        calibration: CalibrationFile = None,
    ) -> None:
        """Predict iteration time and peak memory of every run in ROWS.json."""
        from quartet_plugin.cli.invocation import refuse_user_command
        from quartet_plugin.cost.devices import read_folder
        from quartet_plugin.cost.predict import predict_rows
        from quartet_plugin.model.files import read_json, write_json_atomic

        refuse_user_command(ctx)
        devices = None if hardware is None else read_folder(hardware)
        constants = constants_of(calibration)
        found = predict_rows(read_json(rows), where=str(rows), constants=constants, devices=devices)
        write_json_atomic(output, found)
        errors = sum("error" in entry for entry in found)
        typer.echo(f"{output}: {len(found) - errors} predictions, {errors} rows with an error")
