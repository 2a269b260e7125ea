"""Stand-ins for libraries that need a GPU to be installed, in plain torch, written from their behaviour.

`engine/` and `apex/` are put on the path of a process that is to find `transformer_engine` of 2.9, or
`fused_weight_gradient_mlp_cuda`. They do what the libraries do at the boundary to Megatron and to the
deferred weight gradients: which tensors a layer keeps, what its backward returns, what `backward_dw` sets and
calls. Precision below 16 bits, overlapped communication and fused operations are left out.

`engine_hashes.json` has hashes of the functions of Transformer Engine that were read, by release;
`tools/engine_hashes.py` makes them from a source tree, so that a new release shows where it must be read.
"""

import sys
from pathlib import Path

APEX, ENGINE = (Path(__file__).with_name(name) for name in ("apex", "engine"))


def provide(*folders: Path) -> None:
    """Put APEX or ENGINE on this process's path. Must run before Megatron is imported."""
    assert "megatron.core" not in sys.modules
    sys.path[:0] = [str(folder) for folder in folders]
