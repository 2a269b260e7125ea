"""`quartet schedule` in this process, and a cost table to run it on."""

import re
from typing import Any

import pytest

from quartet_plugin.cli.main import main

# What a search says on stderr while it runs.
PROGRESS = re.compile(r"quartet: \d+\.\d s, \d+ evaluations: makespan \S+ m?s")


def cost_table(
    *, num_devices: int = 4, num_microbatches: int = 8, num_layers: int = 8, **others: Any
) -> dict[str, Any]:
    """A device's share of one microbatch takes F = I = W = 1 and one unit of memory."""
    share = num_devices / num_layers
    layer = dict.fromkeys(("forward_s", "input_grad_s", "weight_grad_s", "activation_bytes"), share)
    return {
        "schema_version": 1,
        "num_devices": num_devices,
        "num_microbatches": num_microbatches,
        "layers": [{"name": f"layer.{i}", **layer} for i in range(num_layers)],
        **others,
    }


class Quartet:
    """`quartet schedule ...`, in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> str:
        """What it prints when it succeeds."""
        code = main(["schedule", *map(str, arguments)])
        out, err = self.capsys.readouterr()
        assert code == 0
        assert all(PROGRESS.match(line) for line in err.splitlines()), err
        return out

    def refused(self, *arguments: object, code: int = 2) -> str:
        """Its one line when it refuses, and what follows it."""
        assert main(["schedule", *map(str, arguments)]) == code
        out, err = self.capsys.readouterr()
        assert out == ""
        assert err.startswith("quartet: ")
        return err.removeprefix("quartet: ").rstrip("\n")
