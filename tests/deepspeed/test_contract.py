"""The seams that are declared about DeepSpeed, held against the installed release."""

import ast
import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from quartet_plugin.deepspeed import seams
from quartet_plugin.deepspeed.checkpoints import GuardedEngine
from quartet_plugin.deepspeed.engine import PlannedEngine
from quartet_plugin.deepspeed.measure import BatchMeter
from quartet_plugin.deepspeed.module import PlannedModule
from quartet_plugin.deepspeed.parity import switch_dropout_off
from quartet_plugin.deepspeed.seams import DEEPSPEED, SEAMS, Seam, check_version, install, resolve
from quartet_plugin.errors import SeamError
from quartet_plugin.rank.source_tree import KnownFunction, find_definition, node_hash, parameters_of
from tests.deepspeed.support import environment

REPLACED = SEAMS[:7]
# The methods of the same class that call a declared one.
CALLERS = {
    "PipelineEngine._next_batch": "_exec_load_micro_batch",
    "PipelineModule._partition_layers": "__init__",
    "PipelineModule._build": "__init__",
    "PipelineModule.stage_owner": "_index_tied_modules",
    "PipelineModule._precompute_checkpointable_values": "set_checkpoint_interval",
    "PipelineModule.ckpt_layer_path": "save_state_dict",
    "PipelineModule.ckpt_layer_path_list": "load_state_dir",
    "PipelineModule._synchronize_tied_weights": "__init__ load_state_dir",
    "PipelineEngine._train_schedule": "train_batch",
    "PipelineEngine._inference_schedule": "eval_batch",
    "PipelineEngine.is_first_stage": "_exec_load_micro_batch",
    "PipelineEngine.is_last_stage": "_exec_load_micro_batch _aggregate_total_loss",
    "PipelineEngine._loss_stage_global_rank": "_aggregate_total_loss",
    "DeepSpeedEngine._load_checkpoint": "load_checkpoint",
    "DeepSpeedEngine._common_checkpoint_state": "_save_checkpoint _save_moe_checkpoint",
    "DeepSpeedEngine._get_zero_param_shapes": "_common_checkpoint_state",
    "PipelineModule._set_bounds": "_partition_layers",
    "PipelineEngine._exec_schedule": "train_batch eval_batch",
}


@cache
def parsed(module: str) -> ast.Module:
    """The installed source of a module."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def test_every_place_is_declared_once() -> None:
    paths = [seam.path for seam in SEAMS]
    assert len(paths) == len(set(paths))
    assert CALLERS.keys() <= {seam.name for seam in SEAMS}


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.path)
def test_the_installed_source_is_the_one_that_was_tried(seam: Seam) -> None:
    definition = find_definition(parsed(seam.module), seam.name)
    assert definition is not None
    here = KnownFunction(parameters=parameters_of(definition), source=node_hash(definition))
    assert seam.known[DEEPSPEED.installed_version()] == here
    resolve(seam)


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam.name in CALLERS], ids=lambda seam: seam.path)
def test_it_is_used_where_that_is_said(seam: Seam) -> None:
    for caller in CALLERS[seam.name].split():
        definition = find_definition(parsed(seam.module), f"{seam.name.partition('.')[0]}.{caller}")
        assert definition is not None
        used = {node.attr for node in ast.walk(definition) if isinstance(node, ast.Attribute)}
        assert seam.name.rpartition(".")[2] in used, caller


@pytest.mark.parametrize(
    ("planned", "stock"),
    [(PlannedEngine, PipelineEngine), (GuardedEngine, PipelineEngine), (PlannedModule, PipelineModule)],
)
def test_every_override_is_declared(planned: type, stock: type) -> None:
    owners = {name: owner for owner in reversed(stock.__mro__) for name in vars(owner)}
    replaced = {name: owners[name] for name in vars(planned) if name in owners}
    overridden = {
        f"{owner.__name__}.{name}" for name, owner in replaced.items() if callable(vars(owner)[name])
    }
    assert overridden
    assert overridden <= {seam.name for seam in SEAMS}


def test_what_is_replaced_is_declared() -> None:
    meter = BatchMeter.__new__(BatchMeter)
    assert set(REPLACED) == {seams.INITIALIZE, seams.CONSTRUCTOR, *meter.wrappers}


@pytest.fixture
def importer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that has imported `deepspeed.initialize` by name."""
    module = ModuleType("quartet_test_importer")
    module.begin = deepspeed.initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_all_are_replaced_and_restored(importer: ModuleType) -> None:
    def values() -> list[Any]:
        return [*(vars(holder)[name] for holder, name in holders), importer.begin]

    holders = [(resolve(seam)[0], seam.name.rpartition(".")[2]) for seam in REPLACED]
    before = values()
    installation = install({seam: lambda original: lambda *args: original(*args) for seam in REPLACED})
    assert not [name for (_, name), old, new in zip(holders, before, values(), strict=False) if old is new]
    assert importer.begin is deepspeed.initialize is not before[0]
    with pytest.raises(SeamError, match=r"deepspeed\.initialize: already replaced by tests\.deepspeed"):
        resolve(seams.INITIALIZE)
    installation.uninstall()
    assert values() == before


@pytest.mark.parametrize("seam", REPLACED, ids=lambda seam: seam.path)
def test_a_changed_source_is_named_and_nothing_is_touched(seam: Seam, importer: ModuleType) -> None:
    known = seam.known["0.19.8"]
    assert known is not None
    changed = replace(seam, known={"0.19.8": replace(known, source="0" * 16)})
    with pytest.raises(SeamError, match=rf"{seam.path}: source differs in deepspeed 0\.19\.8"):
        resolve(changed)
    for other in REPLACED:
        resolve(other)
    assert importer.begin is deepspeed.initialize


def test_other_releases_are_refused() -> None:
    assert check_version("0.19.9") == "0.19.9"
    for version in ("0.19.7", "0.18.0", "0.20.0"):
        with pytest.raises(
            SeamError, match=rf"deepspeed {version}: not supported; install deepspeed >= 0.19.8"
        ):
            check_version(version)


def test_the_entry_ends_with_4_where_a_function_was_changed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('script ran')")
    code = (
        "import sys\n"
        "from deepspeed.runtime.pipe.engine import PipelineEngine\n"
        "PipelineEngine._exec_schedule = lambda self, pipe_schedule: None\n"
        "from quartet_plugin.deepspeed.entry import main\n"
        "sys.argv[1:] = ['script.py']\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 4, done.stderr[-2000:]
    assert (
        "PipelineEngine._exec_schedule: already replaced by __main__ (installed: deepspeed 0.19.8)"
        in done.stderr
    )
    assert "script ran" not in done.stdout


def test_dropout_comes_back() -> None:
    import torch
    from torch.nn import functional

    before = dict(vars(functional))
    off = switch_dropout_off()
    assert torch.equal(functional.dropout(torch.ones(9), 1.0), torch.ones(9))
    off.uninstall()
    assert dict(vars(functional)) == before
