"""A machine divided between workers."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.launchers import device_slices
from quartet_plugin.launchers.command import Command, parse_command
from quartet_plugin.launchers.device_slices import DeviceSlice, SliceLauncher, divide


def command(*words: str, num_processes: int | str = 2) -> Command:
    start = ["torchrun", "--nproc-per-node", str(num_processes), *words, "train.py"]
    return parse_command(start, environment={})


def cores(monkeypatch: pytest.MonkeyPatch, num: int, *, threads: int = 1) -> None:
    """A machine with so many logical processors; with two threads a core the second ones come last."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num)))
    num_cores = num // threads
    monkeypatch.setattr(device_slices, "_core_position", lambda cpu: (0, cpu % num_cores, cpu))


def cut(monkeypatch: pytest.MonkeyPatch, num: int, *, gpus: str | None = None, **options: Any) -> Any:
    cores(monkeypatch, num, threads=options.pop("threads", 1))
    device: Literal["cpu", "cuda"] = "cpu" if gpus is None else "cuda"
    environment = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return divide(
        device,
        num_slices=options.pop("num_slices"),
        command=options.pop("command", command()),
        environment=environment,
        **options,
    )


def test_cores_are_divided_with_the_threads_of_one_core_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(monkeypatch, 8, num_slices=2, threads=2)
    assert [set(part.cores) for part in found] == [{0, 4, 1, 5}, {2, 6, 3, 7}]
    assert [part.label for part in found] == ["cores 0-1,4-5", "cores 2-3,6-7"]
    assert all(part.environment == {} for part in found)


def test_accelerators_are_divided_as_the_environment_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(monkeypatch, 1, gpus="3,2,GPU-aa-bb,0,1", num_slices=2)
    assert [part.environment["CUDA_VISIBLE_DEVICES"] for part in found] == ["3,2", "GPU-aa-bb,0"]
    assert [part.num_devices for part in found] == [2, 2]


def test_the_machine_may_say_how_many_processes_an_accelerator_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = command(num_processes="gpu")
    assert [s.num_devices for s in cut(monkeypatch, 1, gpus="0,1,2,3", num_slices=2, command=auto)] == [2, 2]
    with pytest.raises(ConfigError, match="write it as a number"):
        cut(monkeypatch, 8, num_slices=2, command=command(num_processes="auto"))


@given(
    num=st.integers(1, 64),
    num_slices=st.integers(1, 64),
    num_processes=st.integers(1, 16),
    size=st.none() | st.integers(1, 16),
)
@settings(deadline=None, max_examples=200)
def test_slices_are_alike_and_have_nothing_in_common(
    num: int, num_slices: int, num_processes: int, size: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        each = num // num_slices if size is None else size
        fits = num_slices * each <= num and each >= num_processes
        call: Any = {"num_slices": num_slices, "command": command(num_processes=num_processes), "size": size}
        if not fits:
            with pytest.raises(ConfigError, match=f"--workers {num_slices}: {num} cores here"):
                cut(patch, num, **call)
            return
        found = cut(patch, num, **call)
    assert {part.num_devices for part in found} == {each}
    assert len({core for part in found for core in part.cores}) == num_slices * each
    assert not any(one.overlaps(other) for one in found for other in found if one is not other)
    assert [(part.index, part.count) for part in found] == [(i, num_slices) for i in range(num_slices)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_slices": 3}, r"--workers 3: 4 cores here, and 2 a trial are needed; use at most 2 workers"),
        ({"num_slices": 1, "command": command(num_processes=8)}, "use a host with more"),
        ({"num_slices": 1, "size": 6}, "6 a worker, as the run's others have"),
        ({"num_slices": 0}, "from 1 to 64"),
        ({"num_slices": 65}, "from 1 to 64"),
        ({"num_slices": 2, "command": command("--master-port", "29500")}, "omit the port"),
        ({"num_slices": 1, "command": command("--nnodes", "2")}, "several nodes"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        cut(monkeypatch, 4, **options)
    assert "\n" not in str(caught.value)


def test_accelerators_are_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--workers 2: 3 accelerators here") as caught:
        cut(monkeypatch, 1, gpus="0,1,2", num_slices=2, oversubscribe=True)
    assert "oversubscribe" not in str(caught.value)
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        cut(monkeypatch, 1, gpus="0;1", num_slices=1)


def test_cores_are_shared_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cut(monkeypatch, 2, num_slices=4, oversubscribe=True)
    assert [part.cores for part in found] == [(0, 1)] * 4
    assert not found[0].overlaps(found[1])
    alone = cut(monkeypatch, 2, num_slices=1)[0]
    assert not alone.overlaps(found[0])
    assert alone.overlaps(cut(monkeypatch, 2, num_slices=1)[0])


def test_standalone_and_single_processes_name_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(cut(monkeypatch, 4, num_slices=2, command=command("--standalone"))) == 2
    plain = parse_command(("python", "train.py"), environment={})
    assert len(cut(monkeypatch, 4, num_slices=4, command=plain)) == 4


def test_ports_of_two_slices_are_never_the_same() -> None:
    parts = [DeviceSlice(device="cpu", index=index, count=7, cores=(0,)) for index in range(7)]
    for _ in range(20):
        ports = [part.free_port() for part in parts]
        assert [port % 7 for port in ports] == list(range(7))
        assert all(20_000 <= port < 32_768 for port in ports)


def test_processes_run_inside_their_slice_and_this_one_keeps_its_own(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    launcher = SliceLauncher(DeviceSlice(device="cuda", cores=(core,), devices=("7", "GPU-x")))
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['CUDA_VISIBLE_DEVICES'])"
    process = launcher.start(
        [sys.executable, "-c", code], env=dict(os.environ), cwd=tmp_path, stdout=tmp_path / "out"
    )
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "out").read_text().split("\n")[0] == f"[{core}] 7,GPU-x"
    assert os.sched_getaffinity(0) == before


def test_a_program_that_is_not_read_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="'bash' are not known before it runs"):
        cut(monkeypatch, 8, num_slices=2, command=parse_command(["bash", "train.sh"]))
