"""The example script with a wrong gradient: in layer 4, from the second step on, where a stage has 3 layers.

`faulty_pretrain.py FLAGS...` stands for a schedule that loses part of a weight gradient.
"""

import runpy
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
LAYER = 4
FACTOR = 1.01


def main() -> None:
    """Run the example with the fault in its model."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    init = TransformerBlock.__init__

    def faulty_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for layer in self.layers:
            if layer.layer_number - 1 == LAYER and len(self.layers) == 3:
                layer.mlp.linear_fc1.weight.register_hook(scaled)

    def scaled(gradient: Any) -> Any:
        from megatron.training.global_vars import get_args

        return gradient * FACTOR if get_args().curr_iteration >= 1 else gradient

    TransformerBlock.__init__ = faulty_init
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    main()
