"""A training that is none: it writes the files of a rank and fails in the way it is told.

It stands alone (no import of the package, but for the mode `leak`), so the files are what the formats say,
not what our writer makes.
`--gloo` adds a real process group, for what only real processes of torch show.
"""

import argparse
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MODES = (
    "ok",
    "oom",
    "oom-init",
    "refused",
    "plan",
    "hang",
    "hang-init",
    "exc",
    "sigkill",
    "segv",
    "exit17",
    "nan",
    "noisy",
    "orphan",
    "escape",
    "partial-result",
    "port-in-use",
    "network",
    "stubborn",
    "short",
    "other-plan",
    "bad-beat",
    "late-exit",
    "nothing",
    "shout",
    "leak",
)


def main() -> None:
    """One rank."""
    faulthandler.enable()
    options = arguments()
    if options.mode == "nothing":
        print("Traceback (most recent call last):\nSyntaxError: the script's own\x1b[31m fault\x07")
        sys.exit(3)
    rank = Rank(options)
    if options.mode == "stubborn" or options.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    rank.run()


def arguments() -> argparse.Namespace:
    """Our flags and the adapter's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="ok")
    parser.add_argument("--faulty-rank", type=int, default=1)
    parser.add_argument("--faulty-attempts", type=int, default=1000)
    parser.add_argument("--later-mode", choices=MODES, default="ok", help="of the attempts after these")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--nominal", action="store_true", help="report --step-s, not what a step took")
    parser.add_argument("--hold", type=Path, help="ranks wait for this file")
    parser.add_argument("--hold-from", type=int, default=1, help="not those of trials with a lower number")
    parser.add_argument("--hold-at", type=int, default=1, help="after this iteration; -1: in the start-up")
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--auth")
    parser.add_argument("--my-api-key")
    parser.add_argument("--data")
    parser.add_argument("--quartet-trial", type=Path)
    parser.add_argument("--quartet-device")
    parser.add_argument("--quartet-plan")
    options = parser.parse_args()
    attempt = int(options.quartet_trial.parent.name.rpartition("-")[2])
    if attempt > options.faulty_attempts:
        options.mode = options.later_mode
    # The baseline is measured: only plans fail.
    if options.mode == "leak" and options.quartet_plan is None:
        options.mode = "ok"
    return options


class Rank:
    """Plays one rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank = int(os.environ.get("RANK", "0"))
        self.sheet = json.loads(options.quartet_trial.read_text())
        self.folder = Path(self.sheet["folder"])
        self.is_faulty = self.rank == options.faulty_rank
        self.iterations: list[dict[str, Any]] = []
        self.phase = "import"

    def run(self) -> None:
        """The life of a rank."""
        mode = self.options.mode
        self.beat("import", 0)
        self.beat("init", 0)
        self.init(mode)
        wanted = self.sheet["warmup"] + self.sheet["measure"]
        if mode == "short":
            wanted -= 2
        self.beat("warmup", 0)
        self.hold(0)
        for iteration in range(1, wanted + 1):
            if (self.folder / "STOP").exists() and mode != "stubborn":
                break
            self.step(mode, iteration)
            self.beat("warmup" if iteration < self.sheet["warmup"] else "measure", iteration)
            self.hold(iteration)
        self.end(mode)

    def init(self, mode: str) -> None:
        """What can go wrong before the first step."""
        self.hold(-1)
        if self.options.gloo:
            import torch.distributed

            torch.distributed.init_process_group("gloo")
        if mode == "hang-init":
            self.block()
        if mode == "port-in-use":
            if self.rank == 0:
                taken = socket.create_server(("127.0.0.1", 0))
                try:
                    socket.socket().bind(taken.getsockname())
                except OSError as error:
                    print(f"RuntimeError: {error}")
                    sys.exit(1)
            self.block()
        if not self.is_faulty:
            return
        if mode == "oom-init":
            self.fail("out-of-memory", "OutOfMemoryError", "no memory", wanted_bytes=4096)
        if mode == "refused":
            self.fail("refused", "AssertionError", "hidden size\n must divide")
        if mode == "plan":
            self.fail("plan", "PlanError", "made for another model")

    def step(self, mode: str, iteration: int) -> None:
        """One iteration, and what can go wrong in it."""
        begin = time.perf_counter()
        if iteration == self.options.at:
            self.fault(mode)
        if self.options.gloo:
            import torch

            torch.distributed.all_reduce(torch.ones(4))
        step_s = self.options.step_s * (8 if mode == "noisy" and iteration % 2 else 1)
        time.sleep(step_s)
        loss: float | str = 10.0 - 0.1 * iteration
        if mode == "nan" and iteration == self.options.at:
            loss = "nan"
        self.iterations.append(
            {
                "iteration": iteration,
                "iteration_s": step_s if self.options.nominal else time.perf_counter() - begin,
                "loss": loss if self.rank == self.options.faulty_rank else None,
                "grad_norm": 1.5,
                "skipped": False,
            }
        )
        if mode == "shout":
            print("x" * 10_000)

    def hold(self, iteration: int) -> None:
        """Wait until the test lets the trials go on, or this one is stopped."""
        number = self.folder.parent.name
        if self.options.hold is None or iteration < self.options.hold_at:
            return
        if number.isdecimal() and int(number) < self.options.hold_from:
            return
        while not self.options.hold.exists():
            if (self.folder / "STOP").exists() and not self.options.stubborn:
                break
            time.sleep(0.02)

    def block(self) -> None:
        """Wait for ever, as a receive that nobody answers; a file says so."""
        (self.folder / f"blocked-{self.rank}").touch()
        while True:
            time.sleep(60)

    def fault(self, mode: str) -> None:
        """The fault of this iteration; the other ranks wait for the faulty one for ever, as in a recv."""
        if mode in ("oom", "exc", "leak", "network", "sigkill", "segv", "exit17", "hang", "stubborn"):
            if self.is_faulty:
                self.break_down(mode)
            elif not self.options.gloo:
                self.block()

    def break_down(self, mode: str) -> None:
        """End as told."""
        if mode == "oom":
            self.fail("out-of-memory", "OutOfMemoryError", "no memory", wanted_bytes=12_345)
        elif mode == "exc":
            print("the script's own last words", flush=True)
            self.fail("error", "RuntimeError", "broken at 0x7f12")
        elif mode == "leak":
            self.leak()
        elif mode == "network":
            self.fail("network", "RuntimeError", "Connection closed by peer")
        elif mode == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif mode == "segv":
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        elif mode == "exit17":
            os._exit(17)
        else:
            self.block()

    def leak(self) -> None:
        """End with an exception that holds secrets, recorded by the package."""
        from quartet_plugin.rank.failure import describe_failure

        options = self.options
        words = f"401 for {os.environ.get('HF_TOKEN')}, {options.my_api_key} at {options.data}"
        print(words, flush=True)
        try:
            raise RuntimeError(words)
        except RuntimeError as error:
            report = describe_failure(error, num_steps=len(self.iterations), peak_bytes=0)
        self.fail(report.kind, report.type, report.message, traceback=report.traceback)

    def end(self, mode: str) -> None:
        """Leave the report, or something else."""
        if mode == "orphan" and self.is_faulty:
            daemon()
        if mode == "escape" and self.is_faulty:
            escape(str(self.folder))
        report = {
            "schema_version": 1,
            "attempt_id": self.sheet["attempt_id"],
            "rank": self.rank,
            "launch_rank": self.rank,
            "host": socket.gethostname(),
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "pid": os.getpid(),
            "plan_key": "0" * 64 if mode == "other-plan" else self.sheet["plan_key"],
            "device": "cpu",
            "phases_s": {"import": 0.1, "init": 0.1, "first_step": 0.1},
            "iterations": self.iterations,
            "peak_memory_bytes": 1000 + self.rank,
            "job": job() if self.rank == 0 else None,
        }
        if self.options.quartet_plan is not None:
            plan = json.loads(Path(self.options.quartet_plan).read_text())
            report["local_rank"] = plan["mapping"]["slots"][self.rank]["local"]
            report["execution"] = execution(plan, self.rank)
        path = self.folder / f"rank-{self.rank}.json"
        if mode == "partial-result" and self.is_faulty:
            path.write_text(json.dumps(report)[:200])
        else:
            write(path, report)
        self.beat("done", len(self.iterations))
        if mode == "late-exit":
            self.block()
        if self.options.gloo:
            import torch.distributed

            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    def beat(self, phase: str, iteration: int) -> None:
        """Say where we are."""
        self.phase = phase
        value = {
            "schema_version": 1,
            "attempt_id": self.sheet["attempt_id"],
            "rank": self.rank,
            "pid": os.getpid(),
            "process_start": process_start(),
            "host": socket.gethostname(),
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
            "phase": phase,
            "iteration": iteration,
            "time": time.time(),
        }
        if self.options.mode == "bad-beat":
            value["iteration"] = -1
        write(self.folder / f"rank-{self.rank}.beat.json", value)

    def fail(
        self, kind: str, name: str, message: str, *, wanted_bytes: int = 0, traceback: Sequence[str] = ()
    ) -> None:
        """Report a failure and end."""
        value = {
            "schema_version": 1,
            "attempt_id": self.sheet["attempt_id"],
            "rank": self.rank,
            "launch_rank": self.rank,
            "host": socket.gethostname(),
            "phase": self.phase,
            "iteration": len(self.iterations),
            "time": time.time(),
            "kind": kind,
            "type": name,
            "message": message,
            "exit_code": 1,
            "peak_memory_bytes": 5000,
            "wanted_bytes": wanted_bytes,
            "traceback": list(traceback) or [f"{name}: {message}"],
        }
        write(self.folder / f"rank-{self.rank}.err.json", value)
        sys.exit(1)


def execution(plan: dict[str, Any], rank: int) -> dict[str, Any]:
    """The record of a rank that did a plan by a schedule of the framework: a custom one does not run here."""
    layout, counts = plan["layout"], plan["split"]["transformer_layers_per_stage"]
    copies = layout["data_parallel"] * layout["tensor_parallel"]
    device, devices = rank // copies, layout["pipeline_parallel"]
    name = plan["schedule"]["name"]
    batch = layout["micro_batch_size"] * layout["data_parallel"]
    return {
        "schedule": "1f1b" if name == "custom" else name,
        "position": rank,
        "pipeline_rank": device,
        "num_microbatches": plan["made_for"]["global_batch_size"] // batch,
        "stages": [
            {
                "first_layer": sum(counts[:stage]),
                "num_layers": counts[stage],
                "has_embedding": stage == 0,
                "has_head": stage == len(counts) - 1,
            }
            for stage in range(device, len(counts), devices)
        ],
        "knobs": {
            **{name: value for name, value in layout.items() if isinstance(value, bool | int | str)},
            "tensor_partition": "stock",
        },
        "actions": None,
        "ends": None,
        "modules": None,
    }


def job() -> dict[str, Any]:
    """What RANK 0 says of the framework."""
    shape = {
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "num_query_groups": 4,
        "kv_channels": 16,
        "seq_length": 32,
        "vocab_size": 128,
        "max_position_embeddings": 32,
        "gated_ffn": False,
        "tied_embeddings": True,
        "position_embedding": "learned_absolute",
    }
    layout = {
        "tensor_parallel": 1,
        "pipeline_parallel": 2,
        "data_parallel": 1,
        "virtual_stages": 1,
        "context_parallel": 1,
        "expert_parallel": 1,
        "micro_batch_size": 1,
        "sequence_parallel": False,
        "distributed_optimizer": False,
        "recompute": "none",
    }
    return {
        "framework": "megatron-core",
        "framework_version": "0.19.2",
        "torch_version": "2.11.0",
        "shape": shape,
        "layout": layout,
        "split": {"transformer_layers_per_stage": [2, 2]},
        "schedule": {"name": "1f1b", "group": None},
        "global_batch_size": 4,
        "train_iters": 100,
        "precision": "fp32",
        "features": [],
        "neutralised": [],
    }


def process_start() -> float:
    """Seconds since 1970, as psutil counts them."""
    import psutil

    return psutil.Process().create_time()


def daemon() -> None:
    """A process that leaves its parents: a new session, and a parent that ends at once."""
    sleeper = "import time; time.sleep(600)"
    child = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", child], check=True)


def escape(mark: str) -> None:
    """Two daemons without our environment: one ignores SIGTERM, one is another process every 50 ms."""
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    hopping = "import os, time\nfor _ in range(10_000):\n    time.sleep(0.05)\n    os.fork() and os._exit(0)"
    child = (
        "import subprocess, sys\n"
        f"for program in ({deaf!r}, {hopping!r}):\n"
        "    words = [sys.executable, '-c', program, sys.argv[1]]\n"
        "    subprocess.Popen(words, env={}, start_new_session=True)"
    )
    subprocess.run([sys.executable, "-c", child, mark], env={}, check=True)


def write(path: Path, value: Any) -> None:
    """A file that appears whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


if __name__ == "__main__":
    main()
