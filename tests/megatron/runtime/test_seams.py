"""The places where the runtime takes hold of the installed Megatron: there, replaced, put back."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron.support import REPOSITORY, rank_environment

# In a process of its own: what Megatron imports binds the CPU device's names for good.
_PROGRAM = """
import sys
from quartet_plugin.megatron import cpu_device
cpu_device.ensure_environment()
cpu_device.install()
import torch
import megatron.training.training, megatron.training.models.gpt, megatron.training.models.hybrid
from quartet_plugin.errors import SeamError
from quartet_plugin.megatron import seams
from quartet_plugin.megatron.seams.declared import TRAIN_STEP
from quartet_plugin.megatron.runtime.install import prepare
from tests.runtime.pipelines import spec_of

def found(value):
    return [
        f"{name}.{key}" for name, module in list(sys.modules.items()) if name.startswith("megatron.")
        for key, held in list(getattr(module, "__dict__", {}).items()) if held is value
    ]

def state():
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    return DistributedDataParallel.__init__, PipelineParallelLayerLayout.__dict__["from_str"]

prepared = prepare(spec_of("zb-v", 2), num_microbatches=4)

class Originals:
    # Hidden one level deeper than an installation searches: it would refuse to leave them behind.
    def __init__(self):
        self.of = {seam: seams.resolve(seam)[1] for seam in prepared.wrappers}
        self.state = state()

originals = Originals()
aliases = {seam: found(original) for seam, original in originals.of.items()}
for seam, places in aliases.items():
    holders = {place.rpartition(".")[0] for place in places}
    if "." not in seam.name:
        assert holders == {seam.module, *seam.aliases} & set(sys.modules), (seam.path, holders)
assert any(seam.name == "DistributedDataParallel.__init__" for seam in aliases)
installation = seams.install(prepared.wrappers)
for seam, original in originals.of.items():
    assert not found(original), (seam.path, found(original))
assert all(now != then for now, then in zip(state(), originals.state))

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
import copy, pickle
layout = PipelineParallelLayerLayout.from_str("Et|tt|ttt|tL", 2)
counts = [[len([l for l in stage if l.name == "decoder"]) for stage in rank] for rank in layout.layout]
assert counts == [[1, 1], [2, 3]], counts
assert [layout.get_layer_offset(pp_rank=r, vp_stage=v) for r in (0, 1) for v in (0, 1)] == [0, 6, 1, 3]
assert type(pickle.loads(pickle.dumps(layout))) is PipelineParallelLayerLayout
assert copy.deepcopy(layout) is layout

try:
    prepare_again = prepare(spec_of("zb-v", 2), num_microbatches=4)
    seams.install(prepare_again.wrappers)
except SeamError as error:
    assert "already replaced" in str(error), error
else:
    raise AssertionError("a second installation was taken")
installation.uninstall()
assert state() == originals.state
assert {seam: found(original) for seam, original in originals.of.items()} == aliases

class Kept:
    step = staticmethod(sys.modules["megatron.training.training"].train_step)

sys.modules["megatron.training.training"].KEPT = Kept
Kept.__module__ = "megatron.training.training"
try:
    seams.install({TRAIN_STEP: lambda original: lambda *args: original(*args)})
except SeamError as error:
    original = "still refers to Megatron's original function (megatron-core 0.19"
    assert f"training.KEPT.step {original}" in str(error), error
else:
    raise AssertionError("a leftover was left")
assert seams.resolve(TRAIN_STEP)
print("all held")
"""


@pytest.mark.timeout(240)
def test_every_seam_is_there_and_is_put_back(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=rank_environment(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all held" in done.stdout
