"""Partitions with a name: one, two, 2.5 and three dimensions, rings, PrimePar's P, home-anchored grids.

The tables follow Megatron-LM with sequence parallelism (Korthikanti et al. 2022), SUMMA as in Colossal-AI's
2D (Xu et al. 2021), 2.5D (Wang et al. 2021) and 3D (Bian et al. 2021), and PrimePar's P(q x q) (ASPLOS 2024),
from whose table the home-anchored ones differ in that every phase begins and ends with all blocks at home.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import shown
from quartet_plugin.partition.table import (
    AXES,
    DIMS,
    BlockIndex,
    Home,
    Partition,
    Phase,
    Steps,
    Tensor,
    Triple,
    coordinates,
)
from quartet_plugin.partition.validate import MAX_CELLS, MAX_DEVICES

# The product of a device, by its place in the mesh and the step.
IndexFunction = Callable[[tuple[int, ...], int], Triple]
BlocksFunction = Callable[[tuple[int, ...]], Sequence[BlockIndex]]

# In which dimension F, B and G walk; what the dimension does not touch stays at home.
RESULT_STAYS = "NKM"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFamily:
    """A kind of named partition: how its names are written, and what it is."""

    form: str
    example: str
    meaning: str


FAMILIES = (
    PartitionFamily(
        form="columnT, rowT",
        example="column4",
        meaning="1D with sequence parallelism: gathers and scatters, as Megatron's linears",
    ),
    PartitionFamily(
        form="columnT-replicated, rowT-replicated",
        example="row4-replicated",
        meaning="1D without sequence parallelism: all-reduces",
    ),
    PartitionFamily(
        form="ring-columnT, ring-rowT",
        example="ring-column4",
        meaning="1D with the gathers and scatters as rings that products hide",
    ),
    PartitionFamily(form="2DQxQ", example="2D2x2", meaning="SUMMA: broadcasts in rows and columns"),
    PartitionFamily(
        form="2.5DQxQxD",
        example="2.5D2x2x2",
        meaning="D grids of SUMMA, each with its part of the tokens and all of the weight",
    ),
    PartitionFamily(
        form="3DQxQxQ", example="3D2x2x2", meaning="one product a device, every block in Q parts"
    ),
    PartitionFamily(
        form="PQxQ",
        example="P2x2",
        meaning="PrimePar's spatial-temporal rings: one copy of every block, carried",
    ),
    PartitionFamily(
        form="homeQxQ-in, homeQxQ-out, ...-XYZ",
        example="home2x2-in",
        meaning="rings from home to home; F, B, G walk along X, Y, Z of M, N, K (NKM: results stay)",
    ),
    PartitionFamily(
        form="KT-NAME, NT-NAME, MT-NAME",
        example="K2-home2x2-in",
        meaning="a dimension cut into T, each piece cut as NAME says",
    ),
)


def named_partition(name: str) -> Partition:
    """The partition called `name` (see `FAMILIES`).

    Raises ConfigError for an unknown name or too many devices.
    """
    for pattern, make in _MAKERS:
        match = re.fullmatch(pattern, name, re.ASCII)
        if match is not None:
            _check_size(name, match)
            return replace(make(*match.groups()), name=name)
    forms = "; ".join(family.form for family in FAMILIES)
    raise ConfigError(f"partition {shown(name)}: unknown; names are {forms}")


def build(
    mesh: tuple[int, ...],
    pieces: tuple[int, int, int],
    index: Mapping[Phase, IndexFunction],
    num_steps: int,
    homes: Mapping[Tensor, BlocksFunction],
    *,
    parts: Mapping[Tensor, int] | None = None,
    carried: Sequence[Tensor] = (),
    kept: Sequence[Tensor] = (),
) -> Partition:
    """A partition from index functions. Indices are taken modulo the pieces.

    Homes of gradients that `homes` lacks are those of their tensors.
    """
    places = coordinates(mesh)
    steps: dict[Phase, Steps] = {
        phase: tuple(
            tuple(_modulo(index[phase](place, step), pieces) for place in places) for step in range(num_steps)
        )
        for phase in Phase
    }
    of_tensor = dict(homes)
    for grad, tensor in _GRADIENTS.items():
        of_tensor.setdefault(grad, of_tensor[tensor])
    num_parts = dict(parts or {})
    for grad, tensor in _GRADIENTS.items():
        num_parts.setdefault(grad, num_parts.get(tensor, 1))
    return Partition(
        name="",
        mesh=mesh,
        pieces=pieces,
        steps=steps,
        homes={
            tensor: Home(
                tuple(_blocks(of_tensor[tensor](place), tensor, pieces) for place in places),
                parts=num_parts.get(tensor, 1),
            )
            for tensor in Tensor
        },
        carried=frozenset(carried),
        kept=frozenset(kept),
    )


_GRADIENTS = {
    Tensor.INPUT_GRAD: Tensor.INPUT,
    Tensor.WEIGHT_GRAD: Tensor.WEIGHT,
    Tensor.OUTPUT_GRAD: Tensor.OUTPUT,
}


def _modulo(triple: Triple, pieces: tuple[int, int, int]) -> Triple:
    m, n, k = (index % count for index, count in zip(triple, pieces, strict=True))
    return m, n, k


def _blocks(
    blocks: Sequence[BlockIndex], tensor: Tensor, pieces: tuple[int, int, int]
) -> tuple[BlockIndex, ...]:
    rows, columns = (pieces[axis] for axis in AXES[tensor])
    return tuple((row % rows, column % columns) for row, column in blocks)


def _everywhere(function: IndexFunction) -> dict[Phase, IndexFunction]:
    return dict.fromkeys(Phase, function)


def _column(count: str, replicated: str | None) -> Partition:
    size = int(count)
    return build(
        (size,),
        (1, 1, size),
        _everywhere(lambda place, _: (0, 0, place[0])),
        1,
        {
            Tensor.INPUT: lambda _: [(0, 0)],
            Tensor.WEIGHT: lambda place: [(0, place[0])],
            Tensor.OUTPUT: lambda place: [(0, place[0])],
        },
        parts={} if replicated else {Tensor.INPUT: size},
    )


def _row(count: str, replicated: str | None) -> Partition:
    size = int(count)
    return build(
        (size,),
        (1, size, 1),
        _everywhere(lambda place, _: (0, place[0], 0)),
        1,
        {
            Tensor.INPUT: lambda place: [(0, place[0])],
            Tensor.WEIGHT: lambda place: [(place[0], 0)],
            Tensor.OUTPUT: lambda _: [(0, 0)],
        },
        parts={} if replicated else {Tensor.OUTPUT: size},
        kept=[Tensor.OUTPUT_GRAD],
    )


def _ring_column(count: str) -> Partition:
    """Sums that travel start one device on, so that each device computes its own last: nothing is exposed."""
    size = int(count)
    whole = range(size)
    return build(
        (size,),
        (size, 1, size),
        _everywhere(lambda place, step: (place[0] + step, 0, place[0]))
        | {Phase.B: lambda place, step: (place[0] + 1 + step, 0, place[0])},
        size,
        {
            Tensor.INPUT: lambda place: [(place[0], 0)],
            Tensor.WEIGHT: lambda place: [(0, place[0])],
            Tensor.OUTPUT: lambda place: [(row, place[0]) for row in whole],
        },
    )


def _ring_row(count: str) -> Partition:
    size = int(count)
    whole = range(size)
    return build(
        (size,),
        (size, size, 1),
        _everywhere(lambda place, step: (place[0] + step, place[0], 0))
        | {Phase.F: lambda place, step: (place[0] + 1 + step, place[0], 0)},
        size,
        {
            Tensor.INPUT: lambda place: [(row, place[0]) for row in whole],
            Tensor.WEIGHT: lambda place: [(place[0], 0)],
            Tensor.OUTPUT: lambda place: [(place[0], 0)],
        },
        kept=[Tensor.OUTPUT_GRAD],
    )


def _summa(side: str, same: str, depth: str = "1") -> Partition:
    size, layers = int(side), int(depth)
    _check_square(side, same)

    def row(place: tuple[int, ...]) -> int:
        # A place is (layer, row, column); with one layer (row, column).
        return place[0] * size + place[1] if layers > 1 else place[0]

    return build(
        (size, size) if layers == 1 else (layers, size, size),
        (layers * size, size, size),
        _everywhere(lambda place, step: (row(place), step, place[-1])),
        size,
        {
            Tensor.INPUT: lambda place: [(row(place), place[-1])],
            Tensor.WEIGHT: lambda place: [(place[-2], place[-1])],
            Tensor.OUTPUT: lambda place: [(row(place), place[-1])],
        },
    )


def _cube(side: str, same: str, last: str) -> Partition:
    size = int(side)
    _check_square(side, same)
    _check_square(side, last)
    return build(
        (size, size, size),
        (size, size, size),
        _everywhere(lambda place, _: (place[0], place[1], place[2])),
        1,
        {
            Tensor.INPUT: lambda place: [(place[0], place[1])],
            Tensor.WEIGHT: lambda place: [(place[1], place[2])],
            Tensor.OUTPUT: lambda place: [(place[0], place[2])],
        },
        parts={Tensor.INPUT: size, Tensor.WEIGHT: size, Tensor.OUTPUT: size},
        kept=[Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT_GRAD],
    )


def _spatial_temporal(side: str, same: str) -> Partition:
    """PrimePar's table; the last step of G is one column on, which brings the weight's gradient home."""
    q = int(side)
    _check_square(side, same)

    def gradient(place: tuple[int, ...], step: int) -> Triple:
        r, c = place
        last = int(step == q - 1)
        return r + step, r + c - 1 + last, c - 1 + last

    return build(
        (q, q),
        (q, q, q),
        {
            Phase.F: lambda place, step: (place[0], place[0] + place[1] + step, place[1]),
            Phase.B: lambda place, step: (place[0], place[0] + place[1] - 1, place[1] + step),
            Phase.G: gradient,
        },
        q,
        {
            Tensor.INPUT: lambda place: [(place[0], place[0] + place[1])],
            Tensor.WEIGHT: lambda place: [(place[0] + place[1], place[1])],
            Tensor.OUTPUT: lambda place: [(place[0], place[1])],
            Tensor.INPUT_GRAD: lambda place: [(place[0], place[0] + place[1] - 1)],
        },
        carried=[Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT_GRAD],
    )


def _home_anchored(side: str, same: str, skew: str, walk: str | None) -> Partition:
    q = int(side)
    _check_square(side, same)

    def base(place: tuple[int, ...]) -> Triple:
        r, c = place
        return (r, r + c, c) if skew == "in" else (r, c, r + c)

    def walking(dim: str) -> IndexFunction:
        axis = DIMS.index(dim)

        def index(place: tuple[int, ...], step: int) -> Triple:
            m, n, k = base(place)
            moved = [m, n, k]
            moved[axis] += step
            return moved[0], moved[1], moved[2]

        return index

    def home(tensor: Tensor) -> BlocksFunction:
        rows, columns = AXES[tensor]
        return lambda place: [(base(place)[rows], base(place)[columns])]

    dims = walk or RESULT_STAYS
    return build(
        (q, q),
        (q, q, q),
        {phase: walking(dim) for phase, dim in zip(Phase, dims, strict=True)},
        q,
        {tensor: home(tensor) for tensor in (Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT)},
    )


def _outer(dim: str, count: str, inner: str) -> Partition:
    """A dimension in `count` pieces around another partition; tensors without the dimension lie in parts."""
    inside, size = named_partition(inner), int(count)
    axis = DIMS.index(dim)
    if inside.carried or any(home.parts > 1 for home in inside.homes.values()):
        raise ConfigError(
            f"partition {dim}{count}-{inner}: {inner} carries tensors or has blocks in parts; name a grid"
        )

    def moved(triple: Triple, piece: int) -> Triple:
        m, n, k = (
            index + (piece * inside.pieces[axis] if place == axis else 0)
            for place, index in enumerate(triple)
        )
        return m, n, k

    def home(tensor: Tensor) -> Home:
        blocks = inside.homes[tensor].blocks
        if axis not in AXES[tensor]:
            return Home(blocks * size, parts=size)
        side = AXES[tensor].index(axis)
        shift = inside.pieces[axis]
        return Home(
            tuple(
                tuple(
                    (row + piece * shift, column) if side == 0 else (row, column + piece * shift)
                    for row, column in of_device
                )
                for piece in range(size)
                for of_device in blocks
            )
        )

    pieces = [pieces * (size if place == axis else 1) for place, pieces in enumerate(inside.pieces)]
    return Partition(
        name="",
        mesh=(size, *inside.mesh),
        pieces=(pieces[0], pieces[1], pieces[2]),
        steps={
            phase: tuple(
                tuple(moved(triple, piece) for piece in range(size) for triple in triples)
                for triples in steps
            )
            for phase, steps in inside.steps.items()
        },
        homes={tensor: home(tensor) for tensor in Tensor},
        kept=inside.kept,
    )


def _check_square(side: str, same: str) -> None:
    if side != same:
        raise ConfigError(f"partition of {side} x {same} devices: a grid has equal sides")


def _check_size(name: str, match: "re.Match[str]") -> None:
    """Refuse names of tables that would not fit, before one is made."""
    sides = [int(number) for number in re.findall(r"(?<!2\.)(?<![0-9])[0-9]+(?!\.5|D)", match.string)]
    if prod(sides) > MAX_DEVICES or 0 in sides or prod(sides) * max(sides, default=1) * 3 > MAX_CELLS:
        raise ConfigError(f"partition {shown(name)}: {prod(sides)} devices; must be 1 to {MAX_DEVICES}")


_N = r"([0-9]{1,4})"
_MAKERS: tuple[tuple[str, Callable[..., Partition]], ...] = (
    (rf"column{_N}(-replicated)?", _column),
    (rf"row{_N}(-replicated)?", _row),
    (rf"ring-column{_N}", _ring_column),
    (rf"ring-row{_N}", _ring_row),
    (rf"2D{_N}x{_N}", _summa),
    (rf"2\.5D{_N}x{_N}x{_N}", _summa),
    (rf"3D{_N}x{_N}x{_N}", _cube),
    (rf"P{_N}x{_N}", _spatial_temporal),
    (rf"home{_N}x{_N}-(in|out)(?:-([MNK]{{3}}))?", _home_anchored),
    (rf"([MNK]){_N}-([^-].{{0,60}})", _outer),
)
