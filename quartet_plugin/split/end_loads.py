"""What the embedding and the head weigh, in transformer layers."""

from dataclasses import dataclass

from quartet_plugin.model.shape import ModelShape

# What the ends weigh is rounded to this part of a layer, so that near plans are one plan.
QUANTUM = 1.0 / 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLoads:
    """What embedding and head weigh, in layers; below 0 the end's device can take more than its share."""

    embedding: float
    head: float

    @classmethod
    def rounded(cls, embedding: float, head: float) -> "EndLoads":
        """The nearest multiples of the quantum."""
        return cls(embedding=round(embedding / QUANTUM) * QUANTUM, head=round(head / QUANTUM) * QUANTUM)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """What the ends cost, in transformer layers: forward FLOPs, the embedding by its memory traffic."""

    embedding: float
    head: float


def layer_weights(shape: ModelShape) -> LayerWeights:
    """The embedding and the head in units of one transformer layer's forward."""
    per_layer = shape.forward_flops_per_layer
    lookup = 20.0 * shape.seq_length * shape.hidden_size
    return LayerWeights(embedding=lookup / per_layer, head=shape.forward_flops_of_head / per_layer)
