"""`quartet doctor`: the axes of the Megatron here, and a plan after an upgrade (`quartet recheck`)."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.cli import doctor as command
from quartet_plugin.cli import doctor_nodes
from quartet_plugin.cli.main import main
from quartet_plugin.launchers import engines
from quartet_plugin.model import receipt as receipts
from quartet_plugin.model.plan import Plan, write_plan
from quartet_plugin.model.receipt import receipt_path, write_receipt
from tests.model.plans import PLAN
from tests.model.test_receipt import receipt_of
from tests.report.test_node_checks import facts_of

FAULT = "a.b: source differs in megatron-core 0.19.2 (0123)"


def report(*, fault: str | None = None, changed: str | None = None) -> dict[str, Any]:
    """A doctor's report on 0.19.2, with a function that has changed."""
    state, reason = ("works", "as known") if changed is None else ("kept", "changed: a.b")
    return {
        "framework": "megatron-core",
        "framework_version": "0.19.2",
        "folder": "/tree/megatron",
        "nearest": "0.19.2",
        "fault": fault,
        "axes": [
            {"axis": "split", "state": "works", "reason": "native flags"},
            {"axis": "custom_schedules", "state": state, "reason": reason},
        ],
        "functions": [{"path": "a.b", "need": "custom schedules", "fault": changed}],
    }


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report that the doctor's process writes; tests change it."""
    content = report()
    monkeypatch.setattr(command, "_report", lambda _against: content)
    return content


def saved(folder: Path, plan: Plan = PLAN) -> str:
    write_plan(plan, path=folder / "plan.json")
    return str(folder / "plan.json")


def test_axes_are_shown_and_changed_functions_with_the_command(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "megatron-core 0.19.2 in /tree/megatron" in shown
    assert "--against" not in shown
    found |= report(changed=FAULT)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "custom_schedules  kept   changed: a.b" in shown
    assert FAULT in shown
    assert "quartet doctor --against megatron_core-0.19.2-*.whl" in shown


def test_json_has_room_for_other_nodes(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-f", "json"]) == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert node["frameworks"] == [found]


def test_a_megatron_that_cannot_be_asked_ends_with_4(
    found: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found |= report(fault="Megatron is not installed")
    assert main(["doctor"]) == 4
    assert "quartet: Megatron is not installed" in capsys.readouterr().err


def test_a_missing_tree_to_compare_with_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--against", "/no/such.whl"]) == 2
    assert "/no/such.whl: there is no such file" in capsys.readouterr().err


def test_a_plan_of_native_flags_is_as_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both ask the installed Megatron, which imports it in a process of its own.
    monkeypatch.setattr(command, "_report", functools.cache(command._report))
    assert main(["recheck", saved(tmp_path)]) == 0
    assert "megatron-core 0.19.2: the plan's own" in capsys.readouterr().out
    assert main(["doctor", "--plan", saved(tmp_path)]) == 0


def test_a_schedule_of_ours_needs_its_functions_and_its_receipt(
    found: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receipts, "needs_runtime", lambda plan: True)
    path = saved(tmp_path)
    assert main(["recheck", path]) == 2
    assert "no parity receipt" in capsys.readouterr().err
    write_receipt(receipt_of(), path=receipt_path(Path(path)))
    assert main(["recheck", path]) == 0
    assert "parity receipt: passed" in capsys.readouterr().out
    found |= report(changed=FAULT)
    assert main(["recheck", path]) == 4
    assert f"its schedule cannot run here: {FAULT}" in capsys.readouterr().err


def test_a_plan_of_native_flags_needs_no_function(found: dict[str, Any], tmp_path: Path) -> None:
    found |= report(changed=FAULT)
    assert main(["recheck", saved(tmp_path)]) == 0


def test_another_version_is_named(
    found: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(PLAN, made_for=replace(PLAN.made_for, framework_version="0.19.9"))
    assert main(["recheck", saved(tmp_path, other)]) == 2
    assert "made for megatron-core 0.19.9, here is 0.19.2" in capsys.readouterr().err


def test_another_framework_is_not_rechecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = replace(PLAN, made_for=replace(PLAN.made_for, framework="deepspeed"))
    assert main(["recheck", saved(tmp_path, other)]) == 2
    assert "deepspeed" in capsys.readouterr().err


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The facts of this machine, as its process would have written them; tests change them."""
    facts = facts_of(0, num_nodes=1)

    def look_here(folder: Path) -> tuple[str, ...]:
        (folder / "node-0.json").write_text(json.dumps(facts))
        return ("this machine",)

    monkeypatch.setattr(doctor_nodes, "_look_here", look_here)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    return facts


def test_nodes_are_one_table_with_an_exit_code(
    found: dict[str, Any], node: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--nodes"]) == 0
    shown = capsys.readouterr().out
    assert "framework  ok    megatron-core 0.19.2, 0 changed functions" in shown
    assert "devices    ok    8 x NVIDIA H100 80GB HBM3" in shown
    assert not list(tmp_path.iterdir())
    node["free_bytes"] = {"/tmp": 2**20}
    assert main(["doctor", "--nodes"]) == 5
    captured = capsys.readouterr()
    assert "free space there: a trial needs 2.25 GiB" in captured.out
    assert "checks failed: disk" in captured.err
    found["fault"] = "no megatron-core here"
    assert main(["doctor", "--nodes", "-f", "json"]) == 5
    content = json.loads(capsys.readouterr().out)
    assert content["nodes"][0]["host"] == "n0"
    states = {row["check"]: row["state"] for row in content["checks"]}
    assert (states["framework"], states["disk"], states["clock"]) == ("fail", "fail", "ok")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--plan", "p.json", "-f", "json"], "-f does not go with --plan"),
        (["--plan", "p.json", "--nodes"], "--nodes does not go with --plan"),
        (["--plan", "p.json", "--launcher", "slurm"], "--launcher does not go with --plan"),
        (["--nodes", "--against", "."], "--nodes and --against are two checks"),
    ],
)
def test_no_option_is_left_out_without_a_word(
    words: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert names in error
    assert error.count("\n") == 1


def test_nodes_are_those_that_a_launcher_has_at_once(
    found: dict[str, Any], node: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--launcher", "slurm"]) == 2
    assert "--launcher, --site and --trial-nodes work only with --nodes" in capsys.readouterr().err
    assert main(["doctor", "--nodes", "--launcher", "slurm-batch"]) == 2
    assert "its nodes are not known before a job runs" in capsys.readouterr().err
    assert main(["doctor", "--nodes", "--launcher", "ssh"]) == 2
    assert "write ssh: {hosts: [...]} into a site.yaml" in capsys.readouterr().err
    assert main(["doctor", "--nodes", "--launcher", "slurm"]) == 2
    assert "SLURM_JOB_ID is not set" in capsys.readouterr().err
    assert main(["doctor", "--nodes", "--trial-nodes", "2"]) == 2
    assert "--trial-nodes needs --launcher" in capsys.readouterr().err


class Queue:
    """An engine whose nodes a queue chooses; the checks wait once, and the nodes in `hosts` answer."""

    engine = "queue"
    is_pending = True

    def __init__(self, hosts: Sequence[str | None], *, fault: str | None = None) -> None:
        self._hosts, self.fault = hosts, fault
        self._is_looked_at = False
        self.is_ended = False

    def divide(self, *, num_nodes: int, at_once: int) -> tuple[tuple[str, ...], ...]:
        assert (num_nodes, at_once) == (len(self._hosts), 1)
        return ((),)

    def launcher(self, nodes: Sequence[str], *, num_nodes: int) -> "Queue":
        assert (nodes, num_nodes) == ((), len(self._hosts))
        return self

    def start(self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, stdout: Path) -> "Queue":
        assert len(env["QUARTET_ATTEMPT_ID"]) == 32
        assert stdout.parent == Path(argv[-1])
        for index, host in enumerate(self._hosts):
            if host is not None:
                facts = facts_of(index, num_nodes=len(self._hosts), host=host)
                (stdout.parent / f"node-{index}.json").write_text(json.dumps(facts))
        return self

    def poll(self) -> int | None:
        is_first, self._is_looked_at = not self._is_looked_at, True
        return None if is_first else 0

    def end_on_nodes(self) -> tuple[str, ...]:
        self.is_ended = True
        return ()


def test_nodes_of_a_queue_are_named_by_their_hosts(
    found: dict[str, Any],
    node: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = Queue(["a", "b", "b", None])
    monkeypatch.setattr(engines, "engine_named", lambda _name, *, site: queue)
    words = ["doctor", "--nodes", "--launcher", "queue"]
    assert main([*words, "--trial-nodes", "4", "-f", "json"]) == 5
    captured = capsys.readouterr()
    assert queue.is_ended
    assert "waiting for nodes" in captured.err
    content = json.loads(captured.out)
    assert [entry["host"] for entry in content["nodes"]] == ["a", "b", "b"]
    (nodes,) = [row for row in content["checks"] if row["check"] == "nodes"]
    assert (nodes["state"], nodes["finding"]) == ("fail", "3 of 4 answered; nothing of node 3")
    assert main(words) == 2
    assert "give their number with --trial-nodes" in capsys.readouterr().err
    queue = Queue([None], fault="the queue has ended the job")
    assert main([*words, "--trial-nodes", "1"]) == 5
    assert "no node could be checked: the queue has ended the job" in capsys.readouterr().err
