"""What a tuner and its trial server say to each other: records over a stream socket, with descriptors.

A trial server is a Python process that has made a training's imports and forks a process of it for every
trial. It ends when the tuner's end of the socket is closed, by the tuner or by its death.
"""

import json
import socket
from typing import Annotated, Any, Literal

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.schema import Bounds, Length, dump, parse, record
from quartet_plugin.protocol.attempt_files import FilePath, Name, Pid, Text

# The server's module, and its arguments: the descriptor of the socket, and packages that it does not import.
SERVER_MODULE = "quartet_plugin.rank.warm"
CHANNEL_FLAG, LEFT_OUT_FLAG = "--channel", "--leave-out"
# What stands for the attempt's id in the server's own environment: forked processes write theirs over it.
NO_ATTEMPT = "0" * 32

_MAX_BYTES = 64 * 2**20
_MAX_DESCRIPTORS = 4
_LENGTH_BYTES = 4

Environment = dict[Name, Text]
Words = Annotated[tuple[Text, ...], Length(least=1, most=100_000)]


@record
class Preload:
    """The first message to a server: the training whose imports it makes, in the environment it has.

    `entry` is the adapter's module and `framework` the package that it adapts, `target` the user's script
    (`is_module`: module); `has_agent` says that torchrun starts the ranks.
    """

    entry: Name
    framework: Name
    target: FilePath
    is_module: bool
    on_cpu: bool
    has_agent: bool
    environment: Environment


@record
class PreloadAnswer:
    """The server's answer after its imports; `refusal` says why nothing can be forked from them.

    `unsafe` is a module without which it can be tried again: the ranks then import it themselves.
    """

    refusal: Text | None
    unsafe: Name | None = None


@record
class ForkRequest:
    """One launch: `argv` as it would be started; its output's descriptor comes with the message.

    `num_ranks` processes are forked for torchrun, whose own is forked as well; 0: `argv` is a rank itself.
    """

    argv: Words
    environment: Environment
    num_ranks: Annotated[int, Bounds(ge=0, le=4096)]


@record
class ForkAnswer:
    """The process of a launch, a descriptor of which comes with the message; or why there is none."""

    pid: Pid | None
    refusal: Text | None = None


@record
class ForkEnd:
    """The end of a launch's process: its exit code, negative for a signal."""

    pid: Pid
    exit_code: int


@record
class RankStart:
    """From torchrun's process to one of the ranks forked for it: descriptors of its output come with it."""

    argv: Words
    environment: Environment


@record
class _Envelope:
    kind: Literal["Preload", "PreloadAnswer", "ForkRequest", "ForkAnswer", "ForkEnd", "RankStart"]
    content: dict[str, Any]


_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Preload, PreloadAnswer, ForkRequest, ForkAnswer, ForkEnd, RankStart)
}


def send_record(channel: socket.socket, message: Any, *, descriptors: tuple[int, ...] = ()) -> None:
    """Send a record of this module. Raises OSError where the other side has ended."""
    envelope = {"kind": type(message).__name__, "content": dump(message)}
    content = json.dumps(envelope).encode("ascii")
    head = len(content).to_bytes(_LENGTH_BYTES, "big")
    if descriptors:
        socket.send_fds(channel, [head], descriptors)
    else:
        channel.sendall(head)
    channel.sendall(content)


def receive_record(channel: socket.socket) -> tuple[Any, list[int]]:
    """The next record and the descriptors that came with it.

    Raises EOFError where the other side has ended, ConfigError for what is no record, TimeoutError.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _MAX_DESCRIPTORS)
    head += _received(channel, _LENGTH_BYTES - len(head)) if head else b""
    if not head:
        raise EOFError("the other side has ended")
    length = int.from_bytes(head, "big")
    if length > _MAX_BYTES:
        raise ConfigError(f"trial server: a message of {length} bytes; at most {_MAX_BYTES} are read")
    envelope = parse(_Envelope, json.loads(_received(channel, length)), where="trial server")
    return parse(_KINDS[envelope.kind], envelope.content, where="trial server"), descriptors


def _received(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(length - len(parts))
        if not part:
            raise EOFError("the other side has ended")
        parts += part
    return bytes(parts)
