"""Processes that are forked from a trial server are as those that are started anew."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from quartet_plugin.launchers.local import LocalLauncher
from quartet_plugin.launchers.warm import WarmLauncher
from quartet_plugin.trial.processes import marked_processes
from quartet_plugin.trial.subreaper import Subreaper
from tests.launchers.warm_commands import LIMIT_S, ROOT, Workplace, exit_code_of, light_command, wait_for

STATE = """
import gc, json, os, random, resource, signal, stat, sys, threading
def text_of(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]
    except OSError:
        return None
fds = {fd: text_of(fd) for fd in map(int, os.listdir("/proc/self/fd"))}
mask = os.umask(0); os.umask(mask)
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "cwd": os.getcwd(), "path": sys.path,
    "environment": dict(os.environ), "flags": list(sys.flags), "umask": mask,
    "main": sorted(globals()), "name": __name__, "has_spec": __spec__ is not None,
    "limits": [resource.getrlimit(n) for n in range(16)],
    "signals": {n: str(signal.getsignal(n)) for n in range(1, 32)},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "descriptors": {fd: name for fd, name in fds.items() if name and name != "fd" and fd > 2 or fd == 0},
    "threads": len(os.listdir("/proc/self/task")), "names": [t.name for t in threading.enumerate()],
    "is_leader": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "streams": [[s.isatty(), s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() < 1000],
    "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    "meta_path": [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path],
}))
"""


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path)


@pytest.fixture
def launcher() -> Iterator[WarmLauncher]:
    with WarmLauncher(command_of=light_command) as warm:
        yield warm


def test_the_state_of_a_forked_process_is_that_of_a_new_one(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    argv = workplace.argv(workplace.script(STATE), "--flag", "value")
    cold, warm = (json.loads(workplace.run(way, argv)[1]) for way in (LocalLauncher(), launcher))
    assert launcher.latest.is_warm
    assert warm == cold


def test_trials_share_no_random_state_and_none_of_the_users_modules(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    beside = workplace.folder / "beside.py"
    beside.write_text("VALUE = 1\n")
    script = workplace.script(
        "import multiprocessing, random, tempfile, beside\n"
        "key = multiprocessing.current_process().authkey.hex()\n"
        "print(random.random(), next(tempfile._get_candidate_names()), key, beside.VALUE)\n"
    )
    first = workplace.run(launcher, workplace.argv(script))[1].split()
    server = launcher.server_pid
    beside.write_text("VALUE = 22\n")
    second = workplace.run(launcher, workplace.argv(script))[1].split()
    assert launcher.latest.is_warm
    assert launcher.server_pid == server
    assert not set(first) & set(second)
    assert [first[-1], second[-1]] == ["1", "22"]


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("print('done')", 0, "done"),
        ("import sys; sys.exit(3)", 3, ""),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
        ("import os; pid = os.fork()\nif pid: print('child', os.waitpid(pid, 0)[1])", 0, "child 0"),
        ("import threading as t; t.Thread(target=print, args=('thread',)).start()", 0, "thread"),
    ],
)
def test_ends_as_a_new_process_does(
    workplace: Workplace, launcher: WarmLauncher, text: str, code: int, says: str
) -> None:
    ended, output = workplace.run(launcher, workplace.argv(workplace.script(text)))
    assert launcher.latest.is_warm
    assert ended == code
    assert says in output


def test_a_signal_ends_it(workplace: Workplace, launcher: WarmLauncher) -> None:
    script = workplace.script("import time; print('here', flush=True); time.sleep(100)")
    handle, log = workplace.start(launcher, workplace.argv(script))
    wait_for(log, "here")
    handle.terminate()
    assert exit_code_of(handle) == -signal.SIGTERM
    handle.kill()  # which has no effect any more


UNSAFE = {
    "thread": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "socket": "import socket; KEPT = socket.socket()",
    "process": "import subprocess; KEPT = subprocess.Popen(['sleep', '2'])",
    "rank": "import os; KEPT = os.environ.get('LOCAL_RANK')",
    "shared memory": "import mmap; KEPT = mmap.mmap(-1, 4096)",
    "error": "raise RuntimeError('not today')",
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_an_unsafe_import_of_the_script_is_left_to_the_rank(
    workplace: Workplace, launcher: WarmLauncher, kind: str
) -> None:
    (workplace.packages / "unsafe.py").write_text(f"{UNSAFE[kind]}\n")
    (workplace.packages / "harmless.py").write_text("")
    script = workplace.script(
        "import sys; print('loaded', 'harmless' in sys.modules, 'unsafe' in sys.modules)\n"
        "try:\n    import unsafe\nexcept RuntimeError as error:\n    print(error)\nimport harmless\n"
    )
    code, output = workplace.run(launcher, workplace.argv(script))
    assert (code, launcher.latest.is_warm) == (0, True)
    assert output.startswith("loaded True False")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("thread", "the import of tests starts 1 thread"),
        ("socket", "the import of tests opens socket:"),
        ("process", "the import of tests starts a process"),
        ("rank", "the import of tests reads LOCAL_RANK"),
        ("shared memory", "the import of tests shares memory"),
        ("error", "the imports of tests.launchers.light_entry failed: RuntimeError: not today"),
    ],
)
def test_an_unsafe_framework_starts_cold(
    workplace: Workplace, launcher: WarmLauncher, kind: str, reason: str
) -> None:
    (workplace.packages / "unsafe.py").write_text(f"{UNSAFE[kind]}\n")
    workplace.environment["LIGHT_PRELOAD"] = "unsafe"
    argv = workplace.argv(workplace.script("print('cold')"))
    assert workplace.run(launcher, argv) == (0, "cold\n")
    assert not launcher.latest.is_warm
    assert str(launcher.latest.cold_reason).startswith(reason)
    assert launcher.server_pid is None
    assert workplace.run(launcher, argv) == (0, "cold\n")
    assert launcher.latest.import_s == 0.0, "a refusal is kept"


def test_a_framework_that_loads_the_users_own_files_starts_cold(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    workplace.script("", "plugin_of_mine.py")
    workplace.environment["LIGHT_PRELOAD"] = "plugin_of_mine"
    workplace.run(launcher, workplace.argv(workplace.script("")))
    assert str(launcher.latest.cold_reason).endswith("plugin_of_mine.py, a file of the user")


def test_an_installed_file_that_changes_is_imported_again(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    package = workplace.packages / "released.py"
    package.write_text("VERSION = 1\n")
    argv = workplace.argv(workplace.script("import released; print(released.VERSION)"))
    assert workplace.run(launcher, argv) == (0, "1\n")
    before = launcher.server_pid
    package.write_text("VERSION = 2.5\n")
    assert workplace.run(launcher, argv) == (0, "2.5\n")
    assert launcher.latest.is_warm
    assert launcher.server_pid != before


def test_another_environment_gets_another_server(workplace: Workplace, launcher: WarmLauncher) -> None:
    argv = workplace.argv(workplace.script("import os; print(os.environ['NEW'])"))
    servers = []
    for value in ("a", "b"):
        workplace.environment["NEW"] = value
        assert workplace.run(launcher, argv) == (0, f"{value}\n")
        servers.append(launcher.server_pid)
    assert servers[0] != servers[1]


def test_a_server_that_is_lost_is_replaced_three_times(workplace: Workplace, launcher: WarmLauncher) -> None:
    argv = workplace.argv(workplace.script("print('run')"))
    for is_warm in (True, True, True, False):
        assert workplace.run(launcher, argv) == (0, "run\n")
        assert launcher.latest.is_warm is is_warm
        if launcher.server_pid is not None:
            psutil.Process(launcher.server_pid).kill()
    assert launcher.latest.cold_reason == "3 trial servers were lost"


@pytest.mark.parametrize("is_adopted", [False, True])
def test_a_trial_goes_on_without_its_server(
    workplace: Workplace, launcher: WarmLauncher, is_adopted: bool
) -> None:
    script = workplace.script(
        "import pathlib, sys, time\nprint('here', flush=True)\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\nprint('end'); sys.exit(5)\n"
    )
    with Subreaper(is_on=is_adopted) as subreaper:
        handle, log = workplace.start(launcher, workplace.argv(script))
        subreaper.expect(handle.pid)
        wait_for(log, "here")
        server = psutil.Process(launcher.server_pid)
        server.kill()
        server.wait(10)
        assert handle.poll() is None
        (workplace.folder / "go").touch()
        # Whoever is not its parent cannot know the exit code.
        assert exit_code_of(handle) == (5 if is_adopted else 1)
    assert log.read_text() == "here\nend\n"


def test_nobody_serves_a_tuner_that_was_killed(workplace: Workplace) -> None:
    """The server ends with its tuner; a trial goes on, as one that was started cold."""
    script = workplace.script("import time; print('here', flush=True); time.sleep(100)")
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom quartet_plugin.launchers.warm import WarmLauncher\n"
        "from tests.launchers.warm_commands import Workplace, light_command, wait_for\n"
        f"place = Workplace.__new__(Workplace); place.folder = Path({str(workplace.folder)!r})\n"
        f"place.num_logs = 0; place.environment = {workplace.environment!r}\n"
        "warm = WarmLauncher(command_of=light_command)\n"
        f"handle, log = place.start(warm, place.argv({script!r}))\nwait_for(log, 'here')\n"
        "print(warm.server_pid, handle.pid, flush=True)\ntime.sleep(100)\n"
    )
    tuner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert tuner.stdout is not None
    with tuner.stdout as output:
        server, trial = map(psutil.Process, map(int, output.readline().split()))
    tuner.kill()
    tuner.wait()
    try:
        psutil.wait_procs([server], timeout=20)
        assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
        assert trial.is_running()
    finally:
        trial.kill()


def test_a_forked_process_is_known_by_the_attempts_id(workplace: Workplace, launcher: WarmLauncher) -> None:
    script = workplace.script(
        "import subprocess, time\nsubprocess.Popen(['sleep', '100'])\n"
        "print('here', flush=True)\ntime.sleep(100)\n"
    )
    ids = ("1234567890abcdef" * 2, "fedcba0987654321" * 2)
    for attempt_id in ids:
        handle, log = workplace.start(launcher, workplace.argv(script), attempt_id)
        wait_for(log, "here")
        marked = {identity.pid for identity in marked_processes(attempt_id)}
        assert marked == {handle.pid, *(child.pid for child in psutil.Process(handle.pid).children())}
        for pid in marked:
            psutil.Process(pid).kill()
        exit_code_of(handle)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_what_a_forked_trial_leaves_is_an_orphan_and_its_server_is_none(
    workplace: Workplace, launcher: WarmLauncher, is_prepared: bool
) -> None:
    script = workplace.script(
        "import os\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execve('/bin/sleep', ['sleep', '100'], {})\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    argv = workplace.argv(script)
    environment = {**workplace.environment, "QUARTET_ATTEMPT_ID": "a" * 32}
    if is_prepared:
        launcher.prepare(argv, env=environment, cwd=workplace.folder)
    with Subreaper() as subreaper:
        handle, _ = workplace.start(launcher, argv)
        subreaper.expect(handle.pid)
        assert launcher.server_pid is not None
        subreaper.leave_alone(launcher.server_pid)
        while handle.poll() is None:
            assert launcher.server_pid not in {orphan.pid for orphan in subreaper.orphans()}
            time.sleep(0.02)
        orphans = subreaper.orphans()
        assert launcher.server_pid not in {orphan.pid for orphan in orphans}
        # An orphan that has not come to execve has its parent's name.
        end = time.monotonic() + LIMIT_S
        while (names := {psutil.Process(orphan.pid).name() for orphan in orphans}) != {"sleep"}:
            assert time.monotonic() < end, names
            time.sleep(0.01)
        for orphan in orphans:
            psutil.Process(orphan.pid).kill()
    assert len(orphans) == 1


def test_a_tuner_that_is_to_stop_does_not_wait_for_imports(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    (workplace.packages / "endless.py").write_text("import time; time.sleep(100)\n")
    workplace.environment["LIGHT_PRELOAD"] = "endless"
    argv = workplace.argv(workplace.script("print('cold')"))
    environment = {**workplace.environment, "QUARTET_ATTEMPT_ID": "a" * 32}
    launcher.prepare(argv, env=environment, cwd=workplace.folder, should_stop=lambda: True)
    assert launcher.server_pid is None


def test_a_server_that_ends_in_its_imports_says_its_last_words(
    workplace: Workplace, launcher: WarmLauncher
) -> None:
    (workplace.packages / "fatal.py").write_text("import os; print('out of luck', flush=True); os._exit(3)\n")
    workplace.environment["LIGHT_PRELOAD"] = "fatal"
    assert workplace.run(launcher, workplace.argv(workplace.script("print('cold')"))) == (0, "cold\n")
    assert launcher.latest.cold_reason == "the trial server ended in its imports: out of luck"
