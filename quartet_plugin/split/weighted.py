"""Axis 2 as numbers a sampler can vary: integer splits from the weight of a pipeline's two ends.

With equal layers the optimal split for given end weights is found by filling the least loaded device; as
the weights move, all splits that are optimal for some end weights appear. For two stages these are all.
A negative weight is an end that can take more than its share: a faster device, or one with spare time.
"""

from collections.abc import Sequence


def weighted_split(
    num_layers: int, *, num_devices: int, chunks: int = 1, embedding: float = 0.0, head: float = 0.0
) -> tuple[int, ...]:
    """Layers of each of `num_devices * chunks` stages; stage k lies on device k % num_devices.

    `embedding` and `head` are in layers. Only the first and the last stage may end up with none. Ties go
    to the inner stages, then to the first. `num_layers` must fill the inner stages: PlanError is the
    caller's, this asserts.
    """
    num_stages = num_devices * chunks
    inner = range(1, num_stages - 1)
    assert num_layers >= len(inner), "fewer layers than inner stages"
    counts = [0] * num_stages
    loads = [0.0] * num_devices
    loads[0] += embedding
    loads[(num_stages - 1) % num_devices] += head
    ends = {0: embedding, num_stages - 1: head}
    order = [*inner, *sorted({0, num_stages - 1})]

    def add(stage: int) -> None:
        counts[stage] += 1
        loads[stage % num_devices] += 1.0

    for stage in inner:
        add(stage)
    for _ in range(num_layers - len(inner)):
        add(min(order, key=lambda s: (loads[s % num_devices], counts[s] + max(0.0, ends.get(s, 0.0)))))
    return tuple(counts)


def even_counts(num_layers: int, *, num_stages: int) -> tuple[int, ...]:
    """floor((s+1) L / S) - floor(s L / S) layers on stage s of S."""
    return tuple(
        (stage + 1) * num_layers // num_stages - stage * num_layers // num_stages
        for stage in range(num_stages)
    )


def is_legal_split(counts: Sequence[int], *, num_layers: int, num_stages: int) -> bool:
    """Whether the counts fit: one a stage, summing up, none only at the ends."""
    return (
        len(counts) == num_stages
        and sum(counts) == num_layers
        and all(count >= 0 for count in counts)
        and all(count > 0 for count in counts[1:-1])
    )


def weights_of(counts: Sequence[int], *, num_devices: int, chunks: int = 1) -> tuple[float, float] | None:
    """End weights, in layers, from which `weighted_split` makes `counts`; None where there are none."""
    num_layers = sum(counts)
    guess = (counts[-1], counts[0]) if len(counts) == 2 else (_middle(counts), _middle(counts))
    first = (
        (0.0, float(counts[0] - counts[-1]))
        if len(counts) == 2
        else (guess[0] - counts[0], guess[1] - counts[-1])
    )
    offsets = (0.0, 0.25, -0.25, 0.5, -0.5, 1.0, -1.0, 1.5, -1.5)
    grid = [(first[0] + a, first[1] + b) for a in offsets for b in offsets]
    grid += [(a / 2, b / 2) for a in range(-8, 9) for b in range(-8, 2 * min(num_layers, 24) + 1)]
    for embedding, head in grid:
        if max(abs(embedding), abs(head)) > num_layers:
            continue
        made = weighted_split(
            num_layers, num_devices=num_devices, chunks=chunks, embedding=embedding, head=head
        )
        if made == tuple(counts):
            return embedding, head
    return None


def _middle(counts: Sequence[int]) -> float:
    inner = counts[1:-1]
    return sum(inner) / len(inner) if inner else sum(counts) / len(counts)
