"""The rules of a partition's table, checked one by one; a refusal shows the table with the offending cell.

A table is valid when each phase has every product (m, n, k) exactly once, every block has a home, the
weight's gradient ends where the weight lies, and every carried tensor has exactly one copy that is where the
next product and the next phase need it.
"""

from quartet_plugin.errors import PlanError
from quartet_plugin.partition.render import PhaseCell, block_text, device_text, place, refusal
from quartet_plugin.partition.table import (
    AXES,
    DIMS,
    PRODUCTS,
    BlockIndex,
    Partition,
    Phase,
    Tensor,
    Triple,
    block_of,
)

MAX_DEVICES = 1024
MAX_CELLS = 2**20


def validate(partition: Partition) -> None:
    """Check every rule. Raises PlanError: a line with value and rule, and below it the table."""
    check_sizes(partition)
    for phase in Phase:
        _check_products(partition, phase)
    for tensor in Tensor:
        _check_home(partition, tensor)
    if partition.homes[Tensor.WEIGHT] != partition.homes[Tensor.WEIGHT_GRAD]:
        raise PlanError(
            f"{partition.name}: homes of W and dW differ; the optimizer needs both on the same devices"
        )
    for tensor in sorted(partition.carried):
        _check_carried(partition, tensor)


def check_sizes(partition: Partition) -> None:
    """Counts of devices, steps and pieces, and every index in its range. Raises PlanError."""
    name, devices = partition.name, partition.num_devices
    if not 1 <= devices <= MAX_DEVICES:
        raise PlanError(f"{name}: mesh of {devices} devices; must have 1 to {MAX_DEVICES}")
    if sum(len(steps) for steps in partition.steps.values()) * devices > MAX_CELLS:
        raise PlanError(f"{name}: more than {MAX_CELLS} cells")
    wrong = (partition.carried | partition.kept) - {Tensor.INPUT, Tensor.WEIGHT, Tensor.OUTPUT_GRAD}
    if wrong or partition.carried & partition.kept:
        raise PlanError(f"{name}: carried and kept must be disjoint subsets of I, W and dO")
    for phase in Phase:
        steps = partition.steps[phase]
        if not steps or any(len(triples) != devices for triples in steps):
            raise PlanError(f"{name}: phase {phase} needs a product for each of {devices} devices a step")
        for step, triples in enumerate(steps):
            for device, triple in enumerate(triples):
                for dim, index, count in zip(DIMS, triple, partition.pieces, strict=True):
                    if not 0 <= index < count:
                        raise PlanError(
                            f"{name}: {phase}{step}, device {device_text(partition.mesh, device)}: {dim} is "
                            f"{index}; must be 0 to {count - 1}"
                        )


def _check_products(partition: Partition, phase: Phase) -> None:
    first: dict[Triple, PhaseCell] = {}
    for step, triples in enumerate(partition.steps[phase]):
        for device, triple in enumerate(triples):
            cell = (phase, step, device)
            earlier = first.setdefault(triple, cell)
            if earlier != cell:
                reason = (
                    f"product {_words(triple)} at {place(partition, cell)}: twice, also at "
                    f"{place(partition, earlier)}; each once"
                )
                raise refusal(partition, reason, mark=cell, related=[earlier])
    total = partition.pieces[0] * partition.pieces[1] * partition.pieces[2]
    if len(first) != total:
        raise PlanError(f"{partition.name}: phase {phase} has {len(first)} of {total} products; each once")


def _check_home(partition: Partition, tensor: Tensor) -> None:
    home = partition.homes[tensor]
    if len(home.blocks) != partition.num_devices:
        raise PlanError(
            f"{partition.name}: home of {tensor}: {len(home.blocks)} lists of blocks for "
            f"{partition.num_devices} devices; one a device"
        )
    owners = home.owners()
    rows, columns = AXES[tensor]
    for device, blocks in enumerate(home.blocks):
        for block in blocks:
            if not (0 <= block[0] < partition.pieces[rows] and 0 <= block[1] < partition.pieces[columns]):
                raise PlanError(
                    f"{partition.name}: home of {tensor}, device {device_text(partition.mesh, device)}: "
                    f"block {block_text(block)} is out of range"
                )
    for block in partition.blocks_of(tensor):
        places = owners.get(block, ())
        if not places or len(set(places)) != len(places):
            raise PlanError(
                f"{partition.name}: {tensor}{block_text(block)} is assigned to no device, or twice to one; "
                "assign each block to at least one device, and once to each"
            )
        if home.parts > 1 and len(places) != home.parts:
            raise PlanError(
                f"{partition.name}: {tensor}{block_text(block)} has {len(places)} owners; its home has "
                f"{home.parts} parts"
            )


def _check_carried(partition: Partition, tensor: Tensor) -> None:
    """Require one copy of a carried block, in use on another device each time, without a pause."""
    home = partition.homes[tensor]
    if home.parts != 1 or any(len(places) != 1 for places in home.owners().values()):
        raise PlanError(f"{partition.name}: {tensor} is carried, so each of its blocks has one owner")
    if any(len(blocks) != 1 for blocks in home.blocks):
        raise PlanError(f"{partition.name}: {tensor} is carried, so each device has one of its blocks")
    held = [blocks[0] for blocks in home.blocks]
    for phase in Phase:
        if tensor not in PRODUCTS[phase][:2]:
            continue
        for step, triples in enumerate(partition.steps[phase]):
            held = _carried_step(partition, tensor, (phase, step), triples, held)
        if tensor is Tensor.WEIGHT and phase is Phase.B:
            held = [blocks[0] for blocks in home.blocks]


def _carried_step(
    partition: Partition,
    tensor: Tensor,
    row: tuple[Phase, int],
    triples: tuple[Triple, ...],
    held: list[BlockIndex],
) -> list[BlockIndex]:
    """The carried blocks by device in one step, after those of the step before."""
    needed = [block_of(tensor, triple) for triple in triples]
    first: dict[BlockIndex, int] = {}
    for device, block in enumerate(needed):
        other = first.setdefault(block, device)
        if other != device:
            cell = (*row, device)
            reason = (
                f"{tensor}{block_text(block)} at {place(partition, cell)}: device "
                f"{device_text(partition.mesh, other)} needs the only copy in the same step"
            )
            raise refusal(partition, reason, mark=cell, related=[(*row, other)])
        if row[1] == 0 and block != held[device]:
            cell = (*row, device)
            reason = (
                f"{tensor}{block_text(block)} at {place(partition, cell)}: the device holds "
                f"{tensor}{block_text(held[device])}; a phase begins where the one before ends"
            )
            raise refusal(partition, reason, mark=cell)
    return needed


def _words(triple: Triple) -> str:
    return f"({', '.join(f'{dim} {index}' for dim, index in zip(DIMS, triple, strict=True))})"
