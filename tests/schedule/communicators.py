"""How programs would run on communicators that the runtime does not use: made late, or one a group.

NCCL makes the communicator of a pair and group at its first transfer, which blocks the host until the peer
comes to its own first transfer there. In a group with a bound device it has one communicator, on which a
device's transfers run one after the other, never as a batch.
"""

from collections import defaultdict, deque

from quartet_plugin.schedule.instruction import Instruction, Message, Post, Program, Transfer, Wait

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


def blocked_with_bound_devices(program: Program) -> list[str]:
    """The devices that do not come to their end in groups with a bound device, each with where it stands.

    A device has one queue a group: transfer after transfer, whatever was posted as one batch.
    """
    position = [0] * program.num_devices
    queues: defaultdict[tuple[int, int], deque[Transfer]] = defaultdict(deque)  # by device and group
    over: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(program.instructions):
            while position[device] < len(row) and _can_pass(row[position[device]], over):
                for transfer in _posted(row[position[device]]):
                    queues[device, transfer.message.group].append(transfer)
                position[device] += 1
                moved = True
        for (_, group), queue in list(queues.items()):
            while queue and (other := queues[queue[0].peer, group]) and other[0].message == queue[0].message:
                over.add(queue.popleft().message)
                other.popleft()
                moved = True
    return [
        f"device {device} at {row[position[device]]}"
        for device, row in enumerate(program.instructions)
        if position[device] < len(row)
    ]


def _can_pass(instruction: Instruction, over: set[Message]) -> bool:
    return not isinstance(instruction, Wait) or instruction.transfer.message in over


def _posted(instruction: Instruction) -> tuple[Transfer, ...]:
    return instruction.transfers if isinstance(instruction, Post) else ()
