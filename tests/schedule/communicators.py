"""How programs would run on communicators that the runtime does not use: made late, or one a group.

NCCL makes the communicator of a pair and group at its first transfer, which blocks the host until the peer
comes to its own first transfer there. In a group with a bound device it has one communicator, on which a
device's transfers run one after the other, never as a batch.
"""

from dataclasses import replace

from quartet_plugin.schedule.instruction import Instruction, Post, Program, QueueScope

_Channel = tuple[frozenset[int], int]  # two devices, group


def blocked_first_uses(program: Program) -> list[str]:
    """The devices whose first uses of communicators wait for each other in a circle, each with its peer.

    Waits block the device and not the host, so first uses wait for first uses alone.
    """
    order = [_first_uses(row) for row in program.instructions]
    position = [0] * program.num_devices
    moved = True
    while moved:
        moved = False
        for device, channels in enumerate(order):
            while position[device] < len(channels):
                channel = channels[position[device]]
                (peer,) = channel[0] - {device}
                if order[peer][position[peer] : position[peer] + 1] != [channel]:
                    break
                position[device] += 1
                position[peer] += 1
                moved = True
    return [
        f"device {device} with {min(pair - {device})} in group {program.groups[group]}"
        for device, channels in enumerate(order)
        for pair, group in channels[position[device] : position[device] + 1]
    ]


def _first_uses(row: tuple[Instruction, ...]) -> list[_Channel]:
    """The pairs and groups of a device, by their first transfer."""
    messages = (t.message for post in row if isinstance(post, Post) for t in post.transfers)
    return list(dict.fromkeys((frozenset((m.source_device, m.target_device)), m.group) for m in messages))


def with_bound_devices(program: Program) -> Program:
    """The program in groups with a bound device: one queue a device and group, transfer after transfer."""
    rows = tuple(tuple(_unbatched(row)) for row in program.instructions)
    return replace(program, queues=QueueScope.DEVICE, instructions=rows)


def _unbatched(row: tuple[Instruction, ...]) -> list[Instruction]:
    return [
        part
        for instruction in row
        for part in (
            [Post(transfers=(transfer,)) for transfer in instruction.transfers]
            if isinstance(instruction, Post)
            else [instruction]
        )
    ]
