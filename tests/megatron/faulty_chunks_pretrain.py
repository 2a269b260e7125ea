"""The example script with a wrong layer where every rank holds two stages, from the second step on.

`faulty_chunks_pretrain.py FLAGS...` stands for a schedule that computes something else than stock does.
"""

import runpy
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
FACTOR = 1.1


def main() -> None:
    """Run the example with the fault in its last layer."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    init = TransformerBlock.__init__

    def faulty_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for layer in self.layers:
            if layer.layer_number == self.config.num_layers:
                layer.mlp.register_forward_hook(scaled)

    def scaled(_module: Any, _args: Any, outputs: Any) -> Any:
        from megatron.training.global_vars import get_args

        is_faulty = get_args().virtual_pipeline_model_parallel_size == 2 and get_args().curr_iteration >= 1
        return (outputs[0] * FACTOR, *outputs[1:]) if is_faulty else outputs

    TransformerBlock.__init__ = faulty_init
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
