"""The places where the runtime takes hold of the installed Megatron: there, replaced, put back."""

import subprocess
import sys
from pathlib import Path

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
from quartet_plugin.megatron.runtime.install import prepare
from tests.runtime.pipelines import recipe

def found(value):
    return [
        f"{name}.{key}" for name, module in list(sys.modules.items()) if name.startswith("megatron.")
        for key, held in list(getattr(module, "__dict__", {}).items()) if held is value
    ]

def state():
    from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    return DistributedDataParallel.__init__, PipelineParallelLayerLayout.__dict__["from_str"]

prepared = prepare(recipe("zb-v", 2), num_microbatches=4)
originals = {seam: seams.resolve(seam)[1] for seam in prepared.wrappers}
# Not as globals: those are replaced too.
linear = [sys.modules["megatron.core.tensor_parallel.layers"].LinearWithGradAccumulationAndAsyncCommunication]
before, aliases = state(), {seam: found(original) for seam, original in originals.items()}
installation = seams.install(prepared.wrappers)
undo = prepared.apply()
for seam, original in originals.items():
    assert not found(original), (seam.path, found(original))
assert not found(linear[0])
assert len(aliases[next(s for s in originals if s.name == "is_pp_last_stage")]) >= 8
assert len(aliases[next(s for s in originals if s.name == "get_pp_last_rank")]) >= 2
assert state() != before

from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
import copy, pickle
layout = PipelineParallelLayerLayout.from_str("Et|tt|ttt|tL", 2)
counts = [[len([l for l in stage if l.name == "decoder"]) for stage in rank] for rank in layout.layout]
assert counts == [[1, 1], [2, 3]], counts
assert [layout.get_layer_offset(pp_rank=r, vp_stage=v) for r in (0, 1) for v in (0, 1)] == [0, 6, 1, 3]
assert type(pickle.loads(pickle.dumps(layout))) is PipelineParallelLayerLayout
assert copy.deepcopy(layout) is layout

try:
    prepare_again = prepare(recipe("zb-v", 2), num_microbatches=4)
    seams.install(prepare_again.wrappers)
except SeamError as error:
    assert "already replaced" in str(error), error
else:
    raise AssertionError("a second installation was taken")
undo()
installation.uninstall()
assert state() == before
assert {seam: found(original) for seam, original in originals.items()} == aliases
assert found(linear[0])
print("all held")
"""


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
