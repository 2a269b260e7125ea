"""`quartet train --launcher`: the same training, started once on each node by an engine."""

import codecs
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quartet_plugin.errors import ConfigError, ExitCode, InfrastructureError, StorageError, UsageError
from quartet_plugin.protocol.environment import ATTEMPT_ID

if TYPE_CHECKING:
    from quartet_plugin.launchers.protocol import NodesHandle, NodesLauncher
    from quartet_plugin.launchers.site import Site

_ENTRY = "from quartet_plugin.cli.main import entry; entry()"
_POLL_S, _AGAIN_S = 0.2, 2.0
OUTPUT_NAME = "output.log"


def train_on_nodes(
    options: Sequence[str], words: Sequence[str], *, launcher: str, num_nodes: int, site: Path | None
) -> int:
    """Start `quartet train` with `options` and `words` on every node, and return the training's exit code.

    Inside of an allocation of Slurm this process becomes `srun`; any other engine starts the command as it
    starts a trial, and its output is followed here. Raises ConfigError where there are fewer nodes.
    """
    from quartet_plugin.launchers.engines import LOCAL, engine_named
    from quartet_plugin.launchers.site import read_site
    from quartet_plugin.launchers.slurm import SlurmEngine

    if launcher == LOCAL:
        raise UsageError("--launcher local: this machine needs no launcher; omit --launcher and --nodes")
    asked = read_site(site)
    engine = engine_named(launcher, site=asked)
    (nodes,) = engine.divide(num_nodes=num_nodes, at_once=1)
    argv = [asked.python or sys.executable, "-c", _ENTRY, "train", *options, "--", *words]
    of_nodes, token = engine.launcher(nodes, num_nodes=num_nodes), secrets.token_hex(16)
    if isinstance(engine, SlurmEngine):
        return _become(of_nodes, argv, site=asked, token=token)
    return _follow(of_nodes, argv, token=token)


def _become(launcher: "NodesLauncher", argv: Sequence[str], *, site: "Site", token: str) -> int:
    """Become the launcher's own process, which a terminal's signals reach."""
    from quartet_plugin.launchers.slurm_commands import environment_below

    started = launcher.words(argv, attempt_id=token, cwd=Path.cwd(), stdout=Path(os.devnull))
    # The port that the nodes meet at follows from it; no trial is meant.
    environment = {**environment_below(os.environ), **site.environment, ATTEMPT_ID: token}
    try:
        os.execvpe(started[0], started, environment)  # noqa: S606  # the words are a list, no shell reads them
    except OSError as error:
        raise ConfigError(f"{started[0]}: cannot start: {error.strerror}") from error


def _follow(launcher: "NodesLauncher", argv: Sequence[str], *, token: str) -> int:
    """Start the command on the nodes and print its output until it ends; the first Ctrl-C asks it to."""
    from quartet_plugin.cli.output import tell
    from quartet_plugin.cli.signals import stop_on_signals

    folder = Path.cwd() / f"quartet-train-{time.strftime('%Y%m%d-%H%M%S')}-{token[:4]}"
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be created: {error.strerror}") from error
    environment = {**os.environ, ATTEMPT_ID: token}
    output = folder / OUTPUT_NAME
    with stop_on_signals(tell) as should_stop:
        handle = launcher.start(argv, env=environment, cwd=Path.cwd(), stdout=output)
        following = _Following(output)
        try:
            tell(f"the training's output is in {output}")
            code, is_asked = _await_end(handle, following.show, should_stop)
        except BaseException:
            # A closed pipe or a full disk, too: what was started on the nodes would outlive this process.
            with contextlib.suppress(InfrastructureError):
                handle.end_on_nodes()
            raise
        left = handle.end_on_nodes()
        following.show()
    if left:
        raise InfrastructureError(f"{', '.join(left)}: may still be running the training; end it there")
    if is_asked:
        return int(ExitCode.INTERRUPTED)
    return _exit_code(handle, code)


def _await_end(
    handle: "NodesHandle", show: Callable[[], None], should_stop: Callable[[], bool]
) -> tuple[int, bool]:
    """Wait for the training's end: its exit code, and whether it was asked to end.

    An engine that cannot say is asked again as long as that takes: the training need not have noticed.
    """
    from quartet_plugin.cli.output import tell

    is_asked, last_fault = False, ""
    while True:
        show()
        pause_s = _POLL_S
        try:
            if should_stop() and not is_asked:
                handle.terminate()
                is_asked = True
            if (code := handle.poll()) is not None:
                return code, is_asked
        except InfrastructureError as error:
            pause_s = _AGAIN_S
            if str(error) != last_fault:
                last_fault = str(error)
                tell(f"{error}; the training continues, retrying to read its state; Ctrl-C ends the training")
        time.sleep(pause_s)


def _exit_code(handle: "NodesHandle", code: int) -> int:
    """The training's own exit code. Raises InfrastructureError for what the engine or a signal has ended."""
    if handle.fault is not None:
        raise InfrastructureError(handle.fault)
    if code not in {int(known) for known in ExitCode}:
        raise InfrastructureError(f"the training ended with exit code {code}; its last lines give the reason")
    return code


class _Following:
    """Prints what was added to a growing file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> None:
        """Print what is new; the file need not be there yet."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as output:
            output.seek(self._place)
            content = output.read()
            self._place += len(content)
            sys.stdout.write(self._decoder.decode(content))
            sys.stdout.flush()
