"""What every launcher of nodes must do, as tests for pytest: subclass `LauncherConformance`.

    class TestMine(LauncherConformance):
        num_nodes = 2

        def engine(self) -> Engine:
            return my_engine(Site())

The nodes must see the folder of the tests, as they must see a run's folder. Each test starts a small Python
program on the nodes, which writes what it was given and then counts, so that whether it lives is seen from
here without asking the node.
"""

import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers.protocol import Engine, NodesHandle
from quartet_plugin.launchers.site import Site, parse_site
from quartet_plugin.protocol.environment import ATTEMPT_ID

# The longest that a start, and an end, may take.
LIMIT_S = 60.0
# Values that a shell, a template or a careless join would change.
HOSTILE = (
    "two words",
    "$(touch injected)",
    "`touch injected`",
    "; touch injected",
    "'\"\\",
    "-x",
    "--output=elsewhere",
    "%j%%n",
    "{{ value }}",
    "line\nbreak",
    "caf\u00e9",
    "",
    "x" * 5000,
)
_PROGRAM = """
import json, os, pathlib, signal, subprocess, sys, time
mode, folder, *rest = sys.argv[1:]
folder, node = pathlib.Path(folder), os.environ["NODE_RANK"]
names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NODE_RANK", "OF_A_TEST")
seen = {"argv": rest, "cwd": os.getcwd(), "environment": {name: os.environ.get(name) for name in names}}
(folder / f"{node}.part").write_text(json.dumps(seen))
(folder / f"{node}.part").rename(folder / f"{node}.json")
print("the output of node", node, flush=True)
if mode == "fail" and node == rest[0]:
    sys.exit(7)
if mode == "daemon" and os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    words = [sys.executable, __file__, "count", str(folder), "daemon-"]
    os.execve(sys.executable, words, {"NODE_RANK": node})
if mode in ("stubborn", "count"):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
name = rest[0] if mode == "count" else ""
end = time.time() + (0 if mode == "quick" else 300)
while time.time() < end:
    (folder / f"{name}{node}.count").write_text(str(time.monotonic_ns()))
    time.sleep(0.05)
"""
_STARTER = """
import json, os, signal, sys
from pathlib import Path
from quartet_plugin.testing.launchers import started_from
started_from(json.loads(sys.stdin.read()))
os.kill(os.getpid(), signal.SIGKILL)
"""


class LauncherConformance:
    """The tests; `engine` gives a new engine whose nodes are free, `num_nodes` of them or more."""

    num_nodes = 2

    def engine(self) -> Engine:
        """The engine under test."""
        raise NotImplementedError

    def site(self) -> Site:
        """The site that the engine's module makes it for, in another process."""
        return Site()

    def _engine_on(self, site: Site) -> Engine:
        """The engine on another site, by the function `engine` of its module."""
        make: Callable[[Site], Engine] = import_module(type(self.engine()).__module__).engine
        return make(site)

    def test_every_node_starts_the_command_with_its_place(self, tmp_path: Path) -> None:
        """Each node starts the command once, with the variables that torchrun and scripts read."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        handle = run.start("quick")
        run.succeed(handle)
        seen = [run.seen(node)["environment"] for node in range(self.num_nodes)]
        assert [variables["NODE_RANK"] for variables in seen] == [str(n) for n in range(self.num_nodes)]
        assert [variables["PET_NODE_RANK"] for variables in seen] == [str(n) for n in range(self.num_nodes)]
        for name in ("NNODES", "PET_NNODES"):
            assert {variables[name] for variables in seen} == {str(self.num_nodes)}
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            assert len({variables[name] for variables in seen}) == 1
        assert handle.end_on_nodes() == ()

    def test_words_folder_and_variables_arrive_unchanged(self, tmp_path: Path) -> None:
        """Words, folder and variables reach the command as they are: no shell reads them."""
        folder = tmp_path / "a folder; touch injected"
        folder.mkdir()
        run = _Run(self.engine(), folder, num_nodes=1)
        handle = run.start("quick", *HOSTILE, environment={"OF_A_TEST": "$(touch injected) 'and\" more"})
        run.succeed(handle)
        seen = run.seen(0)
        assert seen["argv"] == list(HOSTILE)
        assert seen["cwd"] == str(folder)
        assert seen["environment"]["OF_A_TEST"] == "$(touch injected) 'and\" more"
        assert not list(tmp_path.rglob("injected*"))

    def test_the_variables_of_the_site_reach_the_command(self, tmp_path: Path) -> None:
        """`environment` of site.yaml is set on every node, before what this process has under the name."""
        engine = self._engine_on(self.site().model_copy(update={"environment": {"OF_A_TEST": "of the site"}}))
        run = _Run(engine, tmp_path, num_nodes=self.num_nodes)
        run.succeed(run.start("quick", environment={"OF_A_TEST": "of this process"}))
        for node in range(self.num_nodes):
            assert run.seen(node)["environment"]["OF_A_TEST"] == "of the site", "site.environment is not set"

    def test_the_python_of_the_site_starts_on_the_nodes(self, tmp_path: Path) -> None:
        """`python` of site.yaml starts there what starts the command."""
        python, taken = tmp_path / "python", tmp_path / "taken"
        python.write_text(f'#!/bin/sh\n: > {shlex.quote(str(taken))}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        run = _Run(
            self._engine_on(self.site().model_copy(update={"python": str(python)})), tmp_path, num_nodes=1
        )
        run.succeed(run.start("quick"))
        assert taken.exists(), "site.python is not used"

    def test_the_output_of_all_nodes_is_in_one_file(self, tmp_path: Path) -> None:
        """The named file, which is new, gets the output of every node."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        handle = run.start("quick")
        run.exit_code(handle)
        lines = {f"the output of node {node}" for node in range(self.num_nodes)}
        _await(lambda: lines <= set(run.stdout.read_text().splitlines()), "the output of every node")

    def test_a_node_that_fails_ends_the_others(self, tmp_path: Path) -> None:
        """The attempt exits with a code other than 0 when one node has failed."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        handle = run.start("fail", str(self.num_nodes - 1))
        assert run.exit_code(handle) not in (0, None)
        run.seen(self.num_nodes - 1)
        handle.end_on_nodes()
        assert not run.is_counting()

    def test_terminate_ends_it_everywhere(self, tmp_path: Path) -> None:
        """A command that heeds SIGTERM is ended on all nodes by `terminate`."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        handle = run.start("wait")
        run.await_counting(self.num_nodes)
        assert handle.poll() is None
        handle.terminate()
        run.exit_code(handle)
        handle.end_on_nodes()
        assert not run.is_counting()

    def test_a_command_that_ignores_signals_is_ended(self, tmp_path: Path) -> None:
        """`end_on_nodes` ends a command that ignores signals, and returns when nothing runs."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        handle = run.start("stubborn")
        run.await_counting(self.num_nodes)
        assert handle.end_on_nodes() == ()
        assert not run.is_counting()
        run.exit_code(handle)

    def test_a_daemon_ends_with_the_command(self, tmp_path: Path) -> None:
        """A daemon is ended too, also in another session and without the command's environment."""
        run = _Run(self.engine(), tmp_path, num_nodes=1)
        handle = run.start("daemon")
        run.await_counting(2)
        handle.terminate()
        run.exit_code(handle)
        handle.end_on_nodes()
        assert not run.is_counting()

    def test_it_outlives_the_process_that_started_it(self, tmp_path: Path) -> None:
        """A tuner that follows a killed one finds its attempt and ends it."""
        run = _Run(self.engine(), tmp_path, num_nodes=self.num_nodes)
        request = run.request("stubborn") | {
            "engine": [type(run.engine).__module__, "engine"],
            "site": self.site().model_dump(mode="json", exclude_defaults=True),
        }
        subprocess.run(
            [sys.executable, "-c", _STARTER],
            input=json.dumps(request),
            text=True,
            check=False,
            timeout=LIMIT_S,
            start_new_session=True,
        )
        run.await_counting(self.num_nodes)
        handle = self.engine().adopt(run.attempt_id, stdout=run.stdout)
        assert handle.poll() is None
        run.await_more_counting()
        assert handle.end_on_nodes() == ()
        assert not run.is_counting()
        run.exit_code(handle)

    def test_an_attempt_that_nobody_started_has_ended(self, tmp_path: Path) -> None:
        """An attempt whose launcher was killed before it began counts as ended."""
        handle = self.engine().adopt(secrets.token_hex(16), stdout=tmp_path / "stdout.log")
        _await(lambda: handle.poll() is not None, "the end of an attempt that never was")
        assert handle.end_on_nodes() == ()

    def test_two_at_once_are_apart(self, tmp_path: Path) -> None:
        """Two attempts at once have nodes of their own, and the end of one leaves the other alone."""
        engine = self.engine()
        parts = engine.divide(num_nodes=1, at_once=2)
        names = [name for part in parts for name in part]
        assert len(set(names)) == len(names)
        runs = []
        for index, part in enumerate(parts):
            folder = tmp_path / str(index)
            folder.mkdir()
            runs.append(_Run(engine, folder, num_nodes=1, nodes=part))
        first, second = (run.start("wait") for run in runs)
        for run in runs:
            run.await_counting(1)
        first.terminate()
        runs[0].exit_code(first)
        assert first.end_on_nodes() == ()
        assert not runs[0].is_counting()
        runs[1].await_more_counting()
        assert second.poll() is None
        second.end_on_nodes()
        assert not runs[1].is_counting()

    def test_more_nodes_than_there_are_is_refused(self) -> None:
        """An engine that knows its nodes refuses more of them than there are."""
        engine = self.engine()
        if not engine.divide(num_nodes=1, at_once=1)[0]:
            return  # a queue chooses them
        try:
            engine.divide(num_nodes=100_000, at_once=2)
        except ConfigError:
            return
        raise AssertionError("100,000 nodes twice are there")


def started_from(request: dict[str, Any]) -> NodesHandle:
    """Start what `request` describes, for a process of its own."""
    module, name = request["engine"]
    engine: Engine = getattr(import_module(module), name)(parse_site(request["site"], where="site"))
    return _started(engine, request)


def _started(engine: Engine, request: dict[str, Any]) -> NodesHandle:
    launcher = engine.launcher(request["nodes"], num_nodes=request["num_nodes"])
    return launcher.start(
        request["argv"], env=request["env"], cwd=Path(request["cwd"]), stdout=Path(request["stdout"])
    )


class _Run:
    """One start of the program in a folder."""

    def __init__(
        self, engine: Engine, folder: Path, *, num_nodes: int, nodes: tuple[str, ...] | None = None
    ) -> None:
        self.engine, self.folder, self._num_nodes = engine, folder, num_nodes
        self._nodes = engine.divide(num_nodes=num_nodes, at_once=1)[0] if nodes is None else nodes
        self.attempt_id = secrets.token_hex(16)
        self.stdout = folder / "stdout.log"

    def request(self, mode: str, *rest: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
        """What is to be started."""
        program = self.folder / "program.py"
        program.write_text(_PROGRAM)
        return {
            "argv": [sys.executable, str(program), mode, str(self.folder), *rest],
            "env": {**os.environ, ATTEMPT_ID: self.attempt_id, **(environment or {})},
            "cwd": str(self.folder),
            "stdout": str(self.stdout),
            "nodes": list(self._nodes),
            "num_nodes": self._num_nodes,
        }

    def start(self, mode: str, *rest: str, environment: dict[str, str] | None = None) -> NodesHandle:
        """Start it here."""
        handle = _started(self.engine, self.request(mode, *rest, environment=environment))
        assert isinstance(handle, NodesHandle)
        return handle

    def exit_code(self, handle: NodesHandle) -> int | None:
        """The exit code, when it has ended."""
        _await(lambda: handle.poll() is not None, "the end of the command")
        return handle.poll()

    def succeed(self, handle: NodesHandle) -> None:
        """Wait for the end, which must be a good one."""
        code = self.exit_code(handle)
        assert code == 0, f"exit code {code}, fault {handle.fault}; {self._last_output()}"

    def seen(self, node: int) -> dict[str, Any]:
        """What the program on a node was given."""
        file = self.folder / f"{node}.json"
        assert file.exists(), f"the program did not run on node {node}; {self._last_output()}"
        content: dict[str, Any] = json.loads(file.read_text())
        return content

    def _last_output(self) -> str:
        """The last of what the attempt has printed."""
        text = self.stdout.read_text(errors="replace") if self.stdout.exists() else ""
        return f"{self.stdout} ends with:\n{text[-2000:]}"

    def counts(self) -> dict[str, str]:
        """What each process that counts has written last."""
        return {path.name: path.read_text() for path in self.folder.glob("*.count")}

    def await_counting(self, number: int) -> None:
        """Wait until this number of processes count."""
        _await(lambda: len(self.counts()) == number, f"{number} processes that count")

    def await_more_counting(self) -> None:
        """Wait until a process has counted further; on a busy machine that may take a while."""
        before = self.counts()
        _await(lambda: self.counts() != before, "further counting")

    def is_counting(self) -> bool:
        """Whether a process still counts: its number changes."""
        before = self.counts()
        time.sleep(0.5)
        return self.counts() != before


def _await(is_done: Callable[[], bool], event: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < end, f"no {event} within {LIMIT_S:g} s"
        time.sleep(0.05)
