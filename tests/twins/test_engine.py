"""The stand-in for Transformer Engine has the functions that it stands for, and says of which releases."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.twins import ENGINE
from tools.engine_hashes import FUNCTIONS, hashes_of

HASHES = json.loads(Path(__file__).with_name("engine_hashes.json").read_text())


def test_the_hashed_functions_are_those_of_the_stand_in() -> None:
    version = re.search(r"(?m)^Version: ([0-9]+\.[0-9]+)", next(ENGINE.glob("*/METADATA")).read_text())
    assert version is not None
    assert set(HASHES[version[1]]) == set(hashes_of(ENGINE))
    for hashes in HASHES.values():
        assert [name.split(":")[0] for name in hashes] == [file for file, _ in FUNCTIONS]
        assert all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes.values())


def test_documentation_does_not_count_and_behaviour_does(tmp_path: Path) -> None:
    shutil.copytree(ENGINE, tmp_path, dirs_exist_ok=True)
    before = hashes_of(tmp_path)
    path = tmp_path / "transformer_engine/pytorch/module/base.py"
    source = path.read_text()
    path.write_text(source.replace('"""Compute the oldest', '"""Some words.\n\n        Compute the oldest'))
    assert hashes_of(tmp_path) == before
    path.write_text(source.replace("self.bias.grad is None", "True"))
    changed = {name for name, value in hashes_of(tmp_path).items() if value != before[name]}
    assert changed == {"transformer_engine/pytorch/module/base.py:TransformerEngineBaseModule.backward_dw"}
    path.write_text(source.replace("def backward_dw", "def renamed"))
    with pytest.raises(KeyError, match="backward_dw"):
        hashes_of(tmp_path)
