"""`quartet train --launcher`: the same training, started once on each node of an allocation."""

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from quartet_plugin.errors import ConfigError, UsageError
from quartet_plugin.protocol.environment import ATTEMPT_ID

_ENTRY = "from quartet_plugin.cli.main import entry; entry()"


def train_on_nodes(
    options: Sequence[str], words: Sequence[str], *, launcher: str, num_nodes: int, site: Path | None
) -> int:
    """Become the launcher's process, which starts `quartet train` with `options` and `words` on every node.

    Raises ConfigError where there are fewer nodes, UsageError for a launcher that only queues.
    """
    from quartet_plugin.launchers.engines import LOCAL, engine_named
    from quartet_plugin.launchers.site import read_site
    from quartet_plugin.launchers.slurm import SlurmEngine
    from quartet_plugin.launchers.slurm_commands import environment_below

    if launcher == LOCAL:
        raise UsageError("--launcher local: this machine needs no launcher; leave --launcher and --nodes out")
    asked = read_site(site)
    engine = engine_named(launcher, site=asked)
    if not isinstance(engine, SlurmEngine):
        raise UsageError(
            f"--launcher {launcher}: trains inside of an allocation only (slurm); queue a script that says "
            "`quartet train --launcher slurm`, as launch/slurm/train.sbatch does, or start it on every host"
        )
    (nodes,) = engine.divide(num_nodes=num_nodes, at_once=1)
    argv = [sys.executable, "-c", _ENTRY, "train", *options, "--", *words]
    token = secrets.token_hex(16)
    started = engine.launcher(nodes, num_nodes=num_nodes).words(
        argv, attempt_id=token, cwd=Path.cwd(), stdout=Path(os.devnull)
    )
    # The port that the nodes meet at follows from it; no trial is meant.
    environment = {**environment_below(os.environ), **asked.environment, ATTEMPT_ID: token}
    try:
        os.execvpe(started[0], started, environment)  # noqa: S606  # the words are a list, no shell reads them
    except OSError as error:
        raise ConfigError(f"{started[0]}: cannot start: {error.strerror}") from error
