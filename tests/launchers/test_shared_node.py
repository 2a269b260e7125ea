"""A node's part of an attempt whose launcher and nodes meet in a shared folder."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.launchers import shared_node
from quartet_plugin.launchers.shared_run import SharedFolder, highest, node_words

SLEEP = [sys.executable, "-c", "import time; print('began', flush=True); time.sleep(100)"]


def request_of(
    folder: Path, argv: list[str], *, num_nodes: int = 1, env: dict[str, str] | None = None, **options: Any
) -> SharedFolder:
    """What the launcher writes."""
    shared = SharedFolder(folder / "stdout.log")
    shared.write_request(
        argv,
        env={"PATH": os.environ["PATH"], **(env or {})},
        cwd=folder,
        num_nodes=num_nodes,
        index_variables=("INDEX",) if num_nodes > 1 else (),
        names="host",
        **options,
    )
    return shared


def node(shared: SharedFolder, index: int = 0, **more: str) -> "subprocess.Popen[str]":
    """What the engine starts on a node."""
    words = node_words(shared.stdout, python=sys.executable)
    environment = {**os.environ, "INDEX": str(index), **more}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_a_folder_that_is_not_mounted_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = shared_node.main([str(tmp_path / "request.json")], see_s=0.0)
    assert code == shared_node.NOT_SEEN_EXIT
    assert "does not see" in capsys.readouterr().out


def test_a_node_is_never_begun_twice(tmp_path: Path) -> None:
    shared = request_of(tmp_path, ["true"])
    assert node(shared).wait(timeout=30) == 0
    again = node(shared)
    assert again.wait(timeout=30) == shared_node.BEGUN_BEFORE_EXIT
    assert shared.exit_codes(1) == {0: 0}


def test_the_request_is_the_owners_alone_and_is_forgotten(tmp_path: Path) -> None:
    shared = request_of(tmp_path, ["true"], env={"TOKEN": "secret"})
    path = shared.path / shared_node.REQUEST_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    shared.collect()
    assert not path.exists()


def test_variables_of_the_engines_ranks_are_set_anew(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    shared = request_of(tmp_path, argv, env={"OF_THE_TUNER": "1"})
    found = node(shared, RANK="5", PET_NPROC_PER_NODE="auto", NVIDIA_VISIBLE_DEVICES="2", MASTER_PORT="1")
    printed, _ = found.communicate(timeout=30)
    seen = json.loads(printed)
    assert "RANK" not in seen
    assert "PET_NPROC_PER_NODE" not in seen
    assert (seen["OF_THE_TUNER"], seen["NVIDIA_VISIBLE_DEVICES"], seen["NNODES"]) == ("1", "2", "1")
    assert seen["MASTER_PORT"] != "1"
    # Both in the engine's own log and in the attempt's output.
    assert json.loads(shared.stdout.read_text()) == seen


def test_a_node_keeps_its_own_devices_and_no_other_variable_of_the_tuners_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "RANKING", "SLURM_JOB_ID")
    for name in names:
        monkeypatch.setenv(name, "the tuner's")
    show = f"import os; print([os.environ.get(name) for name in {names}])"
    shared = request_of(tmp_path, [sys.executable, "-c", show], env=dict(os.environ))
    of_the_node: dict[str, Any] = dict.fromkeys(names, "the node's")
    printed, _ = node(shared, **of_the_node).communicate(timeout=30)
    assert printed == '["the node\'s", "the tuner\'s", "the tuner\'s", "the node\'s"]\n'


def test_what_the_site_sets_is_set_also_where_the_tuner_has_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    argv = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    shared = request_of(tmp_path, argv, env=dict(os.environ), of_the_site={"CUDA_VISIBLE_DEVICES": "0"})
    assert node(shared, CUDA_VISIBLE_DEVICES="1,2").communicate(timeout=30)[0] == "0\n"


@pytest.mark.parametrize(("of_the_node", "seen"), [((), "the tuner's"), (("FLUX_",), "the node's")])
def test_variables_of_another_engine_stay_as_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_node: tuple[str, ...], seen: str
) -> None:
    monkeypatch.setenv("FLUX_JOB_ID", "the tuner's")
    argv = [sys.executable, "-c", "import os; print(os.environ['FLUX_JOB_ID'])"]
    shared = request_of(tmp_path, argv, env=dict(os.environ), of_the_node=of_the_node)
    printed, _ = node(shared, FLUX_JOB_ID="the node's").communicate(timeout=30)
    assert printed == f"{seen}\n"


def test_the_launcher_ends_a_node_by_a_file(tmp_path: Path) -> None:
    shared = request_of(tmp_path, SLEEP)
    running = node(shared)
    await_text(shared.stdout, "began")
    shared.ask_to_end()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM
    assert shared.await_end(1, limit_s=5.0) == []


def test_a_command_that_the_launcher_asks_to_end_takes_its_time(tmp_path: Path) -> None:
    on_term = "lambda *ignored: (time.sleep(0.7), sys.exit(0))"
    code = f"import signal, sys, time; signal.signal(signal.SIGTERM, {on_term}); print('began', flush=True)"
    shared = request_of(tmp_path, [sys.executable, "-c", f"{code}; time.sleep(100)"])
    _, *words = node_words(shared.stdout, python="")
    no_grace = "import sys, quartet_plugin.launchers.shared_node as n; n._GRACE_S = 0.0; n.main(sys.argv[1:])"
    running = subprocess.Popen([sys.executable, "-c", no_grace, words[-1]], stdout=subprocess.DEVNULL)
    await_text(shared.stdout, "began")
    shared.ask_to_end()
    running.wait(timeout=30)
    assert shared.exit_codes(1) == {0: 0}


def test_a_node_that_waits_for_the_others_ends_too(tmp_path: Path) -> None:
    shared = request_of(tmp_path, SLEEP, num_nodes=2)
    waiting = node(shared, 1)
    while not shared.num_begun():
        time.sleep(0.02)
    assert not shared.has_begun(2)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=30) == shared_node.STOPPED_EXIT


def test_the_first_node_that_fails_ends_the_others(tmp_path: Path) -> None:
    program = "import os, time; os.environ['NODE_RANK'] == '1' and os._exit(3); time.sleep(100)"
    shared = request_of(tmp_path, [sys.executable, "-c", program], num_nodes=3)
    running = [node(shared, index) for index in range(3)]
    assert [one.wait(timeout=60) for one in running] == [128 + signal.SIGTERM, 3, 128 + signal.SIGTERM]
    assert shared.exit_codes(3)[1] == 3


def test_the_exit_code_is_that_of_the_command() -> None:
    assert highest({0: 0, 1: 7}) == 7
    assert highest({0: 1, 1: shared_node.NOT_SEEN_EXIT}) == 1
    assert highest({}) is None


def await_text(path: Path, text: str) -> None:
    """Wait until a file has the text."""
    end = time.monotonic() + 30.0
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_file_server_that_fails_for_a_moment_says_nothing_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: object, **options: object) -> object:
        raise OSError(errno.EIO, "input/output error")

    (tmp_path / "terminate").touch()
    assert shared_node.is_there(tmp_path / "terminate")
    monkeypatch.setattr(os, "stat", fails)
    with pytest.raises(OSError, match="input/output"):
        (tmp_path / "terminate").exists()
    assert not shared_node.is_there(tmp_path / "terminate")
