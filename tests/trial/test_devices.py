"""Rows 10, 11, 35 and 36: the devices around a launch, as the driver's tool shows them."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from quartet_plugin.errors import ConfigError, ExitCode, InfrastructureError
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.launchers.protocol import Handle
from quartet_plugin.protocol.environment import ATTEMPT_ID
from quartet_plugin.trial import devices
from quartet_plugin.trial.devices import DeviceGuard, DeviceState, read_devices
from quartet_plugin.trial.request import Outcome, TrialRequest
from quartet_plugin.trial.runner import run_trial

GPUS = """\
0, GPU-aa11, NVIDIA H200, 521, 0
1, GPU-bb22, NVIDIA H200, 1024, [N/A]
"""
APPS = """\
GPU-bb22, 4711, 1000
GPU-bb22, [Not Found], 24
"""


@pytest.fixture
def tool(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """A driver's tool that says what it is told, and the environment that finds it."""

    def make(gpus: str = GPUS, apps: str = APPS, *, code: int = 0, words: str = "") -> dict[str, str]:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)
        program = tmp_path / "nvidia-smi"
        program.write_text(
            f'#!/bin/sh\ncase "$1" in\n--query-gpu=*) cat "{tmp_path}/gpus" ;;\n'
            f'--query-compute-apps=*) cat "{tmp_path}/apps" ;;\nesac\necho "{words}" >&2\nexit {code}\n'
        )
        program.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


def test_nodes_of_an_engine_are_not_this_machine(tmp_path: Path) -> None:
    """Also where a trial has one of them: another worker's trial may run here."""

    class OnANode:
        num_nodes = 1
        engine = "slurm"

        def start(self, argv: Sequence[str], **more: object) -> Handle:
            raise InfrastructureError("no node")

    def read(environment: Mapping[str, str]) -> tuple[DeviceState, ...]:
        raise AssertionError("this machine's devices are read")

    request = TrialRequest(
        folder=tmp_path / "trials" / "000000", command=parse_command(["python", "x.py"]), device="cuda"
    )
    with pytest.raises(InfrastructureError, match="no node"):
        run_trial(request, launcher=OnANode(), devices=DeviceGuard(read=read))


class Ended:
    """A job on nodes that has ended before any of its processes started Python."""

    pid, is_pending = 0, False

    def __init__(self, fault: str | None) -> None:
        self.fault = fault

    def poll(self) -> int:
        return 1

    def terminate(self) -> None:
        raise AssertionError("it has ended")

    kill = terminate

    def end_on_nodes(self) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("fault", ["NODE_FAIL: node-7", None])
def test_a_lost_node_is_no_fault_of_a_command_that_started_nothing(tmp_path: Path, fault: str | None) -> None:
    class Queue:
        num_nodes = 2
        engine = "slurm"

        def start(self, argv: Sequence[str], *, stdout: Path, **more: object) -> Handle:
            stdout.write_text("")
            return Ended(fault)

    request = TrialRequest(
        folder=tmp_path / "trials" / "000000", command=parse_command(["bash", "train.sh"]), device="cpu"
    )
    if fault is None:
        with pytest.raises(ConfigError, match="no Python process with quartet-plugin was started"):
            run_trial(request, launcher=Queue())
        return
    result = run_trial(request, launcher=Queue())
    assert result.outcome is Outcome.INFRA
    assert result.reason.startswith("NODE_FAIL: node-7; ")
    assert len(list(request.folder.glob("attempt-*"))) == request.max_attempts > 1


def test_the_tools_table_is_read(tool: Callable[..., dict[str, str]]) -> None:
    first, second = read_devices(tool())
    assert (first.index, first.uuid, first.name, first.used_bytes) == (
        0,
        "GPU-aa11",
        "NVIDIA H200",
        521 << 20,
    )
    assert (first.num_errors, first.holders) == (0, {})
    assert (second.num_errors, second.holders) == (0, {4711: 1000 << 20})


@pytest.mark.parametrize(
    ("shown", "uuids"),
    [
        ("0,1", ["GPU-aa11", "GPU-bb22"]),
        ("1", ["GPU-bb22"]),
        (" GPU-aa ", ["GPU-aa11"]),
        ("", []),
        ("-1", []),
        ("7", []),
    ],
)
def test_only_what_is_shown_to_us_counts(
    tool: Callable[..., dict[str, str]], shown: str, uuids: list[str]
) -> None:
    found = read_devices({**tool(), "CUDA_VISIBLE_DEVICES": shown})
    assert [one.uuid for one in found] == uuids


def test_without_the_tool_nothing_is_checked(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path)}
    assert read_devices(environment) == ()
    guard = DeviceGuard()
    guard.before(environment)
    assert guard.fault(environment) is None
    guard.await_release(environment)


def test_a_tool_that_fails_is_infrastructure_in_one_line(tool: Callable[..., dict[str, str]]) -> None:
    lost = tool(code=15, words="Unable to determine the device handle: GPU is lost.")
    with pytest.raises(InfrastructureError) as caught:
        DeviceGuard().before(lost)
    assert "GPU is lost" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE


def test_a_driver_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(devices, "_TOOL_S", 0.2)
    with pytest.raises(InfrastructureError, match="the driver hangs"):
        read_devices({"PATH": f"{tmp_path}:/usr/bin:/bin"})


def state(index: int = 0, **changes: object) -> DeviceState:
    """A device that is idle and well."""
    idle = DeviceState(index=index, uuid=f"GPU-{index}", name="H200", used_bytes=500 << 20, num_errors=0)
    return replace(idle, **changes)  # type: ignore[arg-type]


@dataclass
class Machine:
    """Its devices look by look; the last look stays. Its clock moves by sleeping alone."""

    looks: list[tuple[DeviceState, ...]]
    now: float = 0.0
    seen: list[Mapping[str, str]] = field(default_factory=list)

    def read(self, environment: Mapping[str, str]) -> tuple[DeviceState, ...]:
        """One look."""
        self.seen.append(environment)
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def guard(self, **options: Mapping[str, str]) -> DeviceGuard:
        """A guard of this machine."""
        return DeviceGuard(read=self.read, clock=lambda: self.now, sleep=self.sleep, **options)  # type: ignore[arg-type]


def test_row_36_a_device_that_is_gone_is_named() -> None:
    guard = Machine([(state(0), state(1)), (state(0), state(1)), (state(0), state(2))]).guard()
    guard.before({})
    guard.before({})
    with pytest.raises(InfrastructureError) as caught:
        guard.before({})
    assert "missing device 1 (H200, GPU-1)" in str(caught.value)
    assert "new device 2 (H200, GPU-2)" in str(caught.value)
    assert caught.value.exit_code is ExitCode.INFRASTRUCTURE


def test_row_35_errors_of_this_attempt_count_and_earlier_ones_do_not() -> None:
    old = state(0, num_errors=3)
    guard = Machine([(old,), (old,), (state(0, num_errors=5),)]).guard()
    guard.before({})
    assert guard.fault({}) is None
    fault = guard.fault({})
    assert fault is not None
    assert "GPU-0" in fault
    assert "2 uncorrectable memory errors" in fault


def test_row_10_memory_that_comes_back_is_waited_for() -> None:
    full = state(0, used_bytes=90 << 30)
    machine = Machine([(state(0),), (full,), (full,), (full,), (state(0),)])
    guard = machine.guard()
    guard.before({})
    guard.await_release({})
    assert 0 < machine.now < devices.RELEASE_S


def test_row_10_memory_that_does_not_come_back_is_told_with_who_holds_it() -> None:
    held = state(0, used_bytes=90 << 30, holders={2**30: 89 << 30})
    machine = Machine([(state(0),), (held,)])
    guard = machine.guard()
    guard.before({})
    with pytest.raises(InfrastructureError) as caught:
        guard.await_release({})
    assert machine.now >= devices.RELEASE_S
    assert f"by {2**30}" in str(caught.value)
    assert "GPU-0" in str(caught.value)


def test_row_11_what_strangers_hold_is_theirs_and_what_a_trial_left_is_not() -> None:
    """Told apart by the mark that every process of a trial inherits."""
    sleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    environment = {key: value for key, value in os.environ.items() if key != ATTEMPT_ID}
    for mark, is_ours in (({}, False), ({ATTEMPT_ID: "a" * 32}, True)):
        process = subprocess.Popen(sleep, env={**environment, **mark}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        try:
            held = state(0, used_bytes=90 << 30, holders={process.pid: 90 << 30})
            guard = Machine([(state(0),), (held,)]).guard()
            guard.before({})
            if is_ours:
                with pytest.raises(InfrastructureError, match=f"by {process.pid}"):
                    guard.await_release({})
            else:
                guard.await_release({})
            assert process.poll() is None
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_share_of_the_devices_is_what_it_looks_at() -> None:
    machine = Machine([(state(0),)])
    machine.guard(shown={"CUDA_VISIBLE_DEVICES": "3"}).before({"CUDA_VISIBLE_DEVICES": "0,1", "A": "b"})
    assert machine.seen == [{"CUDA_VISIBLE_DEVICES": "3", "A": "b"}]
