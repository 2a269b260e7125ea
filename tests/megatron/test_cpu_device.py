"""The parts of the CPU device, each in a process of its own: what it redirects stays redirected."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet_plugin.errors import ConfigError
from quartet_plugin.megatron import cpu_device
from quartet_plugin.megatron.cpu_device.process import missing_settings
from quartet_plugin.protocol.environment import CPU_SETTINGS
from tests.megatron import support


def answer(folder: Path, program: str, *, environment: dict[str, str] | None = None) -> Any:
    """What `program`, run as a script with the device's environment, printed last, read as JSON."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    result = subprocess.run(
        [sys.executable, str(path)],
        env=environment or support.rank_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_importing_it_does_nothing(tmp_path: Path) -> None:
    loaded = answer(
        tmp_path,
        """
        import json, multiprocessing.spawn as spawn, sys
        before = (spawn.get_preparation_data, list(sys.meta_path))
        from quartet_plugin.megatron import cpu_device
        assert before == (spawn.get_preparation_data, list(sys.meta_path))
        print(json.dumps([cpu_device.is_installed(), "torch" in sys.modules, "megatron" in sys.modules]))
        """,
    )
    assert loaded == [False, False, False]


def test_torch_answers_for_the_cpu(tmp_path: Path) -> None:
    answers = answer(
        tmp_path,
        """
        import json, mmap, sys
        from quartet_plugin.megatron import cpu_device
        cpu_device.install()
        import torch
        bound = torch.zeros
        cpu_device.install()
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3, device="cuda")
        torch.cuda.set_rng_state(state)
        drawn_again = torch.rand(3)
        event, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        event.record(); later.record()
        with torch.device("meta"):
            on_meta = torch.empty(2)
        # Not a tensor: the allocator keeps what one frees.
        with mmap.mmap(-1, 200_000_000) as block:
            block.write(b"x" * 200_000_000)
            high = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        print(json.dumps({
            "installing twice changes nothing": bound is torch.zeros,
            "devices": {str(made.device) for made in (
                torch.zeros(2, device="cuda"), torch.empty(2, device=torch.device("cuda", 0)),
                torch.ones(2).to("cuda:0"), torch.ones(2).cuda(), torch.ones(2).to(device=0),
                torch.nn.Linear(2, 2).cuda().weight, torch.ones(2).new_zeros(2, device="cuda"),
            )} == {"cpu"},
            "other devices are left": on_meta.device.type == "meta",
            "types": torch.ones(1).type() == "torch.cuda.FloatTensor"
            and torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor",
            "conversion": torch.ones(1).type("torch.cuda.DoubleTensor").dtype == torch.float64,
            "generator": torch.equal(drawn, drawn_again),
            "time": later.elapsed_time(event) <= 0 <= event.elapsed_time(later),
            "peak memory holds the block": high > 200_000_000,
            "peak memory starts anew": torch.cuda.max_memory_allocated() < high,
            "one thread": torch.get_num_threads() == 1,
            "no compiler": "torch._dynamo" not in sys.modules,
            "optimizer": (torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step(),
                          "torch._dynamo" not in sys.modules)[1],
        }))
        """,
    )
    assert [name for name, holds in answers.items() if not holds] == []


def test_megatron_first_is_refused(tmp_path: Path) -> None:
    message = answer(
        tmp_path,
        """
        import json, sys, types
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        from quartet_plugin.errors import SeamError
        from quartet_plugin.megatron import cpu_device
        try:
            cpu_device.install()
        except SeamError as error:
            print(json.dumps(str(error)))
        """,
    )
    assert message.startswith("megatron.core is already imported")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_have_the_device_and_the_parents_main(tmp_path: Path, method: str) -> None:
    child = answer(
        tmp_path,
        f"""
        import json, multiprocessing, sys
        from quartet_plugin.megatron import cpu_device
        def report(queue):
            import torch
            made = torch.zeros(1, device="cuda")
            queue.put([cpu_device.is_installed(), str(made.device), sys.argv[1:]])
        if __name__ == "__main__":
            sys.argv = ["script", "--flag"]
            cpu_device.install()
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=report, args=(queue,))
            process.start()
            print(json.dumps(queue.get(timeout=60)))
            process.join()
        """,
    )
    assert child == [True, "cpu", ["--flag"]]


_SEND_AND_FREE = """
    import os, sys
    from quartet_plugin.megatron import cpu_device
    if sys.argv[1] == "held":
        cpu_device.install()
    import torch
    import torch.distributed as dist
    from torch.distributed import P2POp, batch_isend_irecv
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), 8_000_000
    wrong = 0
    for step in range(6):
        value = float(step + 1)
        if rank == 0:
            tensor = torch.full((size,), value)
            if step % 2:
                works = [dist.isend(tensor, 1)]
            else:
                works = batch_isend_irecv([P2POp(dist.isend, tensor, 1)])
            tensor.data = torch.empty(1)  # as deallocate_output_tensor does
            garbage = [torch.full((size,), -1.0) for _ in range(4)]
            for work in works:
                work.wait()
        else:
            import time
            time.sleep(0.2)
            tensor = torch.zeros(size)
            dist.irecv(tensor, 0).wait()
            wrong += int((tensor != value).sum())
    if sys.argv[1] == "held":
        from quartet_plugin.megatron.cpu_device.collectives import PendingSend
        assert not PendingSend._pending
    if rank == 1:
        print(f"wrong elements: {wrong}", flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_send_keeps_the_storage_that_megatron_frees(tmp_path: Path) -> None:
    program = tmp_path / "send.py"
    program.write_text(textwrap.dedent(_SEND_AND_FREE))
    outputs = {}
    for mode in ("held", "free"):
        exit_code, outputs[mode] = support.run_processes(
            support.torchrun(2, str(program), mode), timeout_s=60, log=tmp_path / mode
        )
        if mode == "held":
            assert exit_code == 0, outputs[mode]
    assert "wrong elements: 0\n" in outputs["held"]
    # The hazard is real: without the device the same program sends something else, or dies of it.
    assert "wrong elements: 0\n" not in outputs["free"]


def test_process_starts_anew_once_and_keeps_its_pid(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            from quartet_plugin.megatron import cpu_device
            from quartet_plugin.protocol.environment import CPU_SETTINGS
            cpu_device.ensure_environment()
            cpu_device.ensure_environment()
            settings = {name: os.environ[name] for name in CPU_SETTINGS}
            print(json.dumps([os.getpid(), sys.argv[1:], settings]))
            """
        )
    )
    bare = {name: value for name, value in support.rank_environment().items() if name not in CPU_SETTINGS}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(path), "--flag", "a b"],
        env={**bare, "OMP_NUM_THREADS": "7"},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=60)

    assert json.loads(output) == [process.pid, ["--flag", "a b"], CPU_SETTINGS]


def test_settings_that_are_there_are_not_missing() -> None:
    assert missing_settings({**os.environ, **CPU_SETTINGS}) == {}
    assert missing_settings({}) == CPU_SETTINGS


@pytest.mark.parametrize("command", [set(), {"--bf16"}, {"--distributed-backend", "nccl"}])
def test_flags_of_a_gpu_command_are_replaced(command: set[str]) -> None:
    flags = cpu_device.required_flags(command)
    assert flags[flags.index("--distributed-backend") + 1] == "gloo"
    assert flags[flags.index("--transformer-impl") + 1] == "local"


@pytest.mark.parametrize("command", [{"--distributed-backend", "gloo"}, {"--distributed-backend=gloo"}])
def test_a_flag_with_the_needed_value_is_left_alone(command: set[str]) -> None:
    assert "--distributed-backend" not in cpu_device.required_flags(command)


@pytest.mark.parametrize("flag", ["--async-save", "--fp8-format"])
def test_what_a_cpu_cannot_do_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} "):
        cpu_device.required_flags({flag})


@settings(deadline=None, max_examples=50)
@given(st.sets(st.sampled_from(sorted(cpu_device.required_flags(set())))))
def test_a_flag_is_added_at_most_once_and_asking_again_adds_nothing(command: set[str]) -> None:
    added = cpu_device.required_flags(command)
    flags = [argument for argument in added if argument.startswith("--")]
    assert len(flags) == len(set(flags))
    assert cpu_device.required_flags(command | set(added)) == []


def test_every_redirected_name_exists_and_comes_back(tmp_path: Path) -> None:
    answers = answer(
        tmp_path,
        """
        import functools, importlib, json
        from quartet_plugin.errors import SeamError
        from quartet_plugin.megatron.cpu_device import startup
        from quartet_plugin.megatron.cpu_device import redirects
        from quartet_plugin.rank.seams import Redirect, redirect
        declared = [*redirects(), *startup._WHILE_IMPORTED]
        places = [(module, entry.name) for entry in declared for module in (entry.module, *entry.aliases)]
        def values():
            return {
                place: functools.reduce(getattr, place[1].split("."), importlib.import_module(place[0]))
                for place in places
            }
        def changed(before):
            return [place for place, value in values().items() if value is not before[place]]
        before = values()
        members = set(vars(importlib.import_module("torch").Tensor))
        try:
            redirect([*declared, Redirect("torch", "no_such_name", lambda original: original)])
        except SeamError as error:
            refusal, touched = str(error), changed(before)
        installation = redirect(declared)
        replaced = changed(before)
        installation.uninstall()
        print(json.dumps({
            "refusal": refusal,
            "touched": touched,
            "declared twice": len(places) - len(set(places)),
            "left alone": len(places) - len(replaced),
            "not restored": changed(before),
            "left behind": sorted(set(vars(importlib.import_module("torch").Tensor)) - members),
        }))
        """,
    )
    assert answers.pop("refusal").startswith("torch.no_such_name: not in torch 2.")
    assert answers == {
        "touched": [],
        "declared twice": 0,
        "left alone": 0,
        "not restored": [],
        "left behind": [],
    }


def test_the_device_goes_as_it_came(tmp_path: Path) -> None:
    answers = answer(
        tmp_path,
        """
        import json
        import torch
        zeros, to, is_available = torch.zeros, torch.Tensor.to, torch.cuda.is_available
        from quartet_plugin.megatron import cpu_device
        cpu_device.install()
        installed = [cpu_device.is_installed(), torch.zeros is not zeros, torch.cuda.is_available()]
        cpu_device.uninstall()
        restored = [torch.zeros is zeros, torch.Tensor.to is to, torch.cuda.is_available is is_available]
        print(json.dumps([installed, restored, cpu_device.is_installed()]))
        """,
    )
    assert answers == [[True] * 3, [True] * 3, False]
