"""The shape of a GPT-like model, and the parameters and FLOPs that follow from it."""

import math
from dataclasses import field, replace
from fractions import Fraction
from functools import cache
from typing import Annotated, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import ADDED, Bounds, Length, record

# The most of each size: far above any transformer, and what every command reckons with in moments.
MAX_LAYERS = 16_384
MAX_HIDDEN = 2**20
MAX_SIZES = {
    "num_layers": MAX_LAYERS,
    "hidden_size": MAX_HIDDEN,
    "ffn_hidden_size": 4 * MAX_HIDDEN,
    "num_attention_heads": 2**16,
    "num_query_groups": 2**16,
    "kv_channels": 2**16,
    "seq_length": 2**28,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**28,
}

# The coarsest multiple to which an FFN's size is rounded.
_FFN_MULTIPLE = 256

# The letters of a hybrid model's pattern, by the names of `LayerKinds`.
LETTERS = {"attention": "*", "mlp": "-", "experts": "E", "state_space": "M"}

# The sizes of state-space layers by Megatron's defaults: channels of a state and of a head, and groups.
DEFAULT_STATE, DEFAULT_HEAD, DEFAULT_GROUPS = 128, 64, 8

PositionEmbedding = Literal["learned_absolute", "rope", "none"]
_Count = Annotated[int, Bounds(ge=0, le=MAX_LAYERS)]
_Size = Annotated[int, Bounds(ge=0, le=2**40)]
_State = Annotated[int, Bounds(ge=1, le=2**20)]
_Letters = Annotated[str, Length(most=2 * MAX_LAYERS)]


@record
class LayerKinds:
    """How many of a hybrid model's layers are of each kind; attention and MLP make one transformer layer.

    The state-space layers have heads and groups of them, and projections that read or write `projected_size`
    values a token together, beside those of the hidden size. `state_size` are the channels of a state; None
    is Megatron's default, `DEFAULT_STATE`. `pattern` has the layers in their order, by `LETTERS`; None where
    the order is not known. `framework_pattern` has the framework's letters for them, and behind a slash those
    of each depth of multi-token prediction; None where these are `pattern`. Raises ConfigError for patterns
    of other counts.
    """

    attention: _Count
    mlp: _Count
    experts: _Count
    state_space: _Count
    state_space_heads: _Size = 0
    state_space_groups: _Size = 0
    projected_size: _Size = 0
    state_size: _State | None = field(default=None, metadata=ADDED)
    pattern: Annotated[str, Length(most=MAX_LAYERS)] | None = field(default=None, metadata=ADDED)
    framework_pattern: _Letters | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        counts = {name: self.pattern.count(letter) for name, letter in LETTERS.items()}
        counted = {name: getattr(self, name) for name in LETTERS}
        if sum(counts.values()) != len(self.pattern) or counts != counted:
            raise ConfigError(
                f"layer_kinds.pattern: {self.pattern[:60]!r}; must have the counted layers of each kind, "
                f"written in {' '.join(LETTERS.values())}"
            )
        written = self.framework_pattern or self.pattern
        is_text = written.isascii() and written.isprintable()
        if not is_text or len(written.partition("/")[0]) != len(self.pattern):
            raise ConfigError(
                f"layer_kinds.framework_pattern: {written[:60]!r}; must have a letter for each of the "
                f"{len(self.pattern)} layers before the first slash"
            )

    @property
    def num_layers(self) -> int:
        """The layers of all kinds together."""
        return self.attention + self.mlp + self.experts + self.state_space

    def with_pattern(self, pattern: str) -> "LayerKinds":
        """Layers of the same sizes in the order of another pattern."""
        counts = {name: pattern.count(letter) for name, letter in LETTERS.items()}
        return replace(self, **counts, pattern=pattern, framework_pattern=None)

    @property
    def without_pattern(self) -> "LayerKinds":
        """As many layers of each kind in an order that is not known."""
        return replace(self, pattern=None, framework_pattern=None)


@record
class ModelShape:
    """What is trained: everything that changes parameters or FLOPs, and nothing about how it is run.

    `vocab_size` is the padded one that the embedding really has. `kv_channels` is a head's size.
    `layer_kinds` are a hybrid model's; None where every layer is a transformer layer.
    Raises ConfigError for sizes that no transformer can have.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    vocab_size: int
    max_position_embeddings: int
    gated_ffn: bool
    tied_embeddings: bool
    position_embedding: PositionEmbedding
    layer_kinds: LayerKinds | None = field(default=None, metadata=ADDED)

    def __post_init__(self) -> None:
        for name, most in MAX_SIZES.items():
            value, least = getattr(self, name), 0 if name == "max_position_embeddings" else 1
            if not least <= value <= most:
                raise ConfigError(f"shape.{name}: {value}; must be from {least} to {most}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"shape.num_query_groups: {self.num_query_groups}; "
                f"must divide num_attention_heads ({self.num_attention_heads})"
            )

    @property
    def label(self) -> str:
        """A short name for tables: depth x width."""
        return f"{self.num_layers}x{self.hidden_size}"

    def label_beside(self, base: "ModelShape") -> str:
        """The label with what is not in the proportions of `base`: `24x2048 ffn 5504 groups 4 head 64`."""
        parts = (
            ("ffn", self.ffn_hidden_size, base.ffn_size_at(self.hidden_size)),
            ("groups", self.num_query_groups, base.num_groups_of(self.num_attention_heads)),
            ("head", self.kv_channels, base.kv_channels),
        )
        return " ".join([self.label, *(f"{name} {size}" for name, size, kept in parts if size != kept)])

    def ffn_size_at(self, hidden_size: int) -> int:
        """The FFN's size in the same ratio at another width.

        A fractional ratio (8/3) is rounded as coarsely as the size itself.
        """
        exact = Fraction(self.ffn_hidden_size * hidden_size, self.hidden_size)
        if exact.denominator == 1:
            return int(exact)
        multiple = math.gcd(self.ffn_hidden_size, _FFN_MULTIPLE)
        return max(multiple, round(exact / multiple) * multiple)

    def num_groups_of(self, num_heads: int) -> Fraction:
        """The query groups in the same ratio of `num_heads` heads, which may be none of a model's.

        A single group stays one, and heads with a group each keep one each.
        """
        if self.num_query_groups == 1 and self.num_attention_heads > 1:
            return Fraction(1)
        return Fraction(self.num_query_groups * num_heads, self.num_attention_heads)

    @property
    def attention_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def mean(self) -> "ModelShape":
        """The shape of as many transformer layers, each with the mean weights of a hybrid model's layers.

        Experts count as an FFN, a state-space layer as the FFN that has as many weights as its projections.
        """
        return self if self.layer_kinds is None else _mean_of(self, self.layer_kinds)

    @property
    def pattern(self) -> str | None:
        """The layers of a hybrid model in their order; None for another model, or where it is not known.

        It is not known of a shape with another depth than its pattern.
        """
        kinds = self.layer_kinds
        return None if kinds is None or kinds.num_layers != self.num_layers else kinds.pattern

    @property
    def without_pattern(self) -> "ModelShape":
        """The shape without the order of a hybrid model's layers."""
        kinds = self.layer_kinds
        return self if kinds is None else replace(self, layer_kinds=kinds.without_pattern)

    def with_pattern(self, pattern: str) -> "ModelShape":
        """A hybrid model with the layers of another pattern."""
        assert self.layer_kinds is not None, "the layers of a hybrid model have kinds"
        kinds = self.layer_kinds.with_pattern(pattern)
        return replace(self, num_layers=len(pattern), layer_kinds=kinds)

    @property
    def matrix_parameters_per_layer(self) -> int:
        """Weights of a layer's matrix products: query, key, value, projection and the FFN."""
        mean = self.mean
        key_value_size = mean.num_query_groups * mean.kv_channels
        attention = self.hidden_size * (2 * mean.attention_size + 2 * key_value_size)
        return attention + (3 if self.gated_ffn else 2) * self.hidden_size * mean.ffn_hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Weights of the token embedding; the head has as many, and shares them when tied."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All matrix weights: layers, embeddings, head. Norms and biases are left out."""
        positions = self.max_position_embeddings if self.position_embedding == "learned_absolute" else 0
        ends = self.embedding_parameters * (1 if self.tied_embeddings else 2) + positions * self.hidden_size
        return self.num_layers * self.matrix_parameters_per_layer + ends

    @property
    def forward_flops_per_layer(self) -> int:
        """FLOPs of one layer's forward over one sequence; causal attention counts the half it needs."""
        core = 2 * self.seq_length * self.seq_length * self.mean.attention_size
        return 2 * self.seq_length * self.matrix_parameters_per_layer + core

    @property
    def forward_flops_of_head(self) -> int:
        """FLOPs of the head's forward over one sequence."""
        return 2 * self.seq_length * self.embedding_parameters

    @property
    def model_flops_per_sequence(self) -> int:
        """Forward and backward (twice the forward), without recomputation."""
        return 3 * (self.num_layers * self.forward_flops_per_layer + self.forward_flops_of_head)


@cache
def _mean_of(shape: ModelShape, kinds: LayerKinds) -> ModelShape:
    """`ModelShape.mean` of a hybrid model: fewer heads, of a size that keeps their sum, and another FFN."""
    of_attention = shape.num_attention_heads * kinds.attention / shape.num_layers
    heads = max(1, round(of_attention))
    most_groups = max(1, round(heads * shape.num_query_groups / shape.num_attention_heads))
    matrices = 3 if shape.gated_ffn else 2
    of_mlps = shape.ffn_hidden_size * (kinds.mlp + kinds.experts)
    of_state_spaces = kinds.projected_size * kinds.state_space / matrices
    return replace(
        shape,
        num_attention_heads=heads,
        num_query_groups=max(count for count in range(1, most_groups + 1) if heads % count == 0),
        kv_channels=max(1, round(of_attention * shape.kv_channels / heads)),
        ffn_hidden_size=max(1, round((of_mlps + of_state_spaces) / shape.num_layers)),
        layer_kinds=None,
    )
