"""The kinds of a run's layers: which there are, and which layers each stage holds.

A layer has a letter (`model.shape.LETTERS`). Like layers are all MLP or all experts beside their attention; a
mixture of experts may begin with dense layers; a hybrid model's pattern has any order, with attention, an FFN
or experts alone in a layer.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from quartet_plugin.model.costs import IntArray
from quartet_plugin.model.job_description import Experts, LatentAttention, mean_layers
from quartet_plugin.model.shape import (
    DEFAULT_GROUPS,
    DEFAULT_HEAD,
    DEFAULT_STATE,
    LETTERS,
    LayerKinds,
    ModelShape,
)

MLP, EXPERTS = LETTERS["mlp"], LETTERS["experts"]


class Sublayers(StrEnum):
    """What a layer has, each behind a norm of its own."""

    BOTH = "attention and an FFN"
    ATTENTION = "attention"
    FFN = "an FFN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The scan of a state-space layer: heads of `head_size` channels, in groups with a state each."""

    heads: int
    groups: int
    head_size: float
    state_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedKind:
    """A hybrid model's layers of one letter: the sizes of a layer, and what it has.

    A layer with a `scan` has its projections and it in the place of an FFN that has as many weights.
    """

    letter: str
    shape: ModelShape
    sublayers: Sublayers
    experts: Experts | None = None
    scan: Scan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayers:
    """The layers of a model as the cost model takes them: all alike, or `kinds` in the order of `pattern`.

    `shape`, `experts` and `latent` are those of every layer where there are no kinds.
    """

    shape: ModelShape
    experts: Experts | None
    latent: LatentAttention | None
    kinds: tuple[PricedKind, ...] = ()
    pattern: str = ""


def priced_layers(shape: ModelShape, experts: Experts | None, latent: LatentAttention | None) -> PricedLayers:
    """The layers of a model; of a hybrid model without a pattern mean ones, which have plain attention."""
    if shape.layer_kinds is None:
        return PricedLayers(shape=shape, experts=experts, latent=latent)
    if not shape.pattern:
        mean, shared = mean_layers(shape, experts)
        return PricedLayers(shape=mean, experts=shared, latent=None)
    has_experts = experts is not None and EXPERTS in shape.pattern
    return PricedLayers(
        shape=replace(shape, layer_kinds=None),
        experts=replace(experts, num_dense_layers=0) if experts is not None and has_experts else None,
        latent=latent,
        kinds=_kinds_of(shape, experts),
        pattern=shape.pattern,
    )


@lru_cache(maxsize=64)
def _kinds_of(shape: ModelShape, experts: Experts | None) -> tuple[PricedKind, ...]:
    """The kinds that the pattern has; a state-space layer has the weights of an FFN."""
    layers, alone = shape.layer_kinds, replace(shape, layer_kinds=None)
    assert layers is not None, "only a hybrid model's layers have kinds"
    routed = None if experts is None else replace(experts, num_dense_layers=0)
    width = max(1, round(layers.projected_size / (3 if shape.gated_ffn else 2)))
    state_space = replace(alone, ffn_hidden_size=width)
    kinds = (
        PricedKind(letter=LETTERS["attention"], shape=alone, sublayers=Sublayers.ATTENTION),
        PricedKind(letter=MLP, shape=alone, sublayers=Sublayers.FFN),
        PricedKind(letter=EXPERTS, shape=alone, sublayers=Sublayers.FFN, experts=routed),
        PricedKind(
            letter=LETTERS["state_space"], shape=state_space, sublayers=Sublayers.FFN, scan=scan_of(layers)
        ),
    )
    by_letter = {kind.letter: kind for kind in kinds}
    return tuple(by_letter[letter] for letter in letters_in(layers.pattern or ""))


def scan_of(kinds: LayerKinds) -> Scan:
    """The scan of a hybrid model's state-space layers; sizes that are not known are Megatron's defaults.

    The projections have three values of each channel, two of each group's state and one a head.
    """
    state, groups = kinds.state_size or DEFAULT_STATE, kinds.state_space_groups or DEFAULT_GROUPS
    others = kinds.projected_size - 2 * groups * state
    heads = kinds.state_space_heads or max(1, others // (3 * DEFAULT_HEAD + 1))
    return Scan(
        heads=heads,
        groups=groups,
        head_size=max(1.0, (others - heads) / (3 * heads)),
        state_size=state,
    )


def letters_in(pattern: str) -> str:
    """The letters of a pattern, each once, in the order in which the layers of their kinds are counted."""
    return "".join(letter for letter in LETTERS.values() if letter in pattern)


def letters_of(experts: Experts | None, kinds: tuple[PricedKind, ...]) -> str:
    """The letters of the kinds of a run's layers, each once, in the order in which they are counted."""
    if kinds:
        return "".join(kind.letter for kind in kinds)
    if experts is None:
        return MLP
    return MLP + EXPERTS if experts.num_dense_layers else EXPERTS


def sequence_of(num_layers: int, experts: Experts | None, pattern: str) -> str:
    """The letter of every layer of a model: its pattern, or dense layers and those of experts behind them."""
    if pattern:
        return pattern
    num_dense = num_layers if experts is None else min(num_layers, experts.num_dense_layers)
    return MLP * num_dense + EXPERTS * (num_layers - num_dense)


@lru_cache(maxsize=256)
def layers_before(sequence: str, letters: str) -> IntArray:
    """The layers of each of `letters` before each layer, and in all [num_kinds, num_layers + 1].

    So a stage holds as many of a kind as these differ between its first layer and the next stage's.
    """
    is_kind = np.array([[layer == letter for layer in sequence] for letter in letters], dtype=np.int64)
    before = np.zeros((len(letters), len(sequence) + 1), dtype=np.int64)
    np.cumsum(is_kind.reshape(len(letters), -1), axis=1, out=before[:, 1:])
    before.flags.writeable = False
    return before
