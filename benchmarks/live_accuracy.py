"""How well unseen runs are predicted on this machine: `python benchmarks/live_accuracy.py RESULTS.json`.

Real Megatron trains small GPTs in two pinned processes, one thread each (CPU device). Sixteen runs and the
layers profiled in them calibrate the cost model; the other runs, of other shapes, splits and batches, are
predicted from that calibration alone. A round launches every run once, for a few iterations, in a random
order of calibrating and predicted runs together, so that the machine's drift averages out. A run's time is
the median over its launches of each launch's median iteration. The report has all predictions, the standard
errors of the medians, and the mean error; the exit code is 1 where that error is above 4 %, or where fewer
than 30 predicted runs were launched three times.

Measuring ends with the last round or after `--limit` seconds. The program can be stopped and started again:
launches in RESULTS.json are not repeated. `--report` only evaluates. Processes are forked from two processes
that have imported Megatron, which saves most of a launch.
"""

import argparse
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "pretrain_gpt.py"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
GOAL = 0.04
RUN_LIMIT_S = 60.0
LEAST_SPREAD = 0.01
LEAST_RUNS, LEAST_LAUNCHES = 30, 3
PROFILE = "profile"
PROFILE_REPEATS = 2
MOST_FAILURES = 5
# A process gets physical pages by chance; with huge pages launches of one run differ less.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# The imports that every rank would make after its fork.
IMPORTED = (
    "megatron.core.models.gpt",
    "megatron.training",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "quartet_plugin.megatron.profiling",
    "quartet_plugin.megatron.runtime.install",
    "benchmarks.live_cases",
)


def main() -> int:
    """Launch what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("--repeats", type=int, default=5, help="rounds: launches of every run")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--limit", type=float, default=1020.0, help="stop measuring after so many seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="evaluate what is there")
    parser.add_argument("--zygote", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.zygote is not None:
        serve(options.zygote)
        return 0
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.report:
        measure(options, results)
    return report(results)


def measure(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run what is missing, round by round; the file is written after every run."""
    begin = time.monotonic()
    pool: WorkerPool | None = None
    failures = 0
    try:
        for number in range(options.repeats):
            missing = _missing(number, results, seed=options.seed)
            for index, (name, is_profiled) in enumerate(missing):
                elapsed = time.monotonic() - begin
                if elapsed > options.limit:
                    print(f"{elapsed:.0f} s: the limit; start again to measure more")
                    return
                where = f"{elapsed:5.0f} s round {number + 1}/{options.repeats} {index + 1}/{len(missing)}"
                pool = pool or WorkerPool()
                try:
                    launch = pool.run(name, options=options, is_profiled=is_profiled)
                except RuntimeError as error:
                    failures += 1
                    print(f"{where}: {error}", flush=True)
                    if failures == MOST_FAILURES:
                        raise
                    pool.close()
                    pool = None
                    continue
                launches = results.setdefault(name, {"launches": [], PROFILE: []})
                launches[PROFILE if is_profiled else "launches"].append(launch)
                _write(options.results, results)
                median = statistics.median(launch["iteration_s"])
                kind = ", profiled" if is_profiled else ""
                print(f"{where}: {median * 1e3:7.1f} ms  {name}{kind}", flush=True)
    finally:
        if pool is not None:
            pool.close()


def _missing(number: int, results: dict[str, Any], *, seed: int) -> list[tuple[str, bool]]:
    """The runs that round `number` (from 0) still has to launch, in order; True for profiled ones."""
    from benchmarks.live_cases import CASES, PROFILED

    names = [(name, False) for name in CASES]
    names += [(case.name, True) for case in PROFILED if number < PROFILE_REPEATS]
    random.Random(seed + number).shuffle(names)
    empty: dict[str, list[Any]] = {"launches": [], PROFILE: []}
    return [
        (name, is_profiled)
        for name, is_profiled in names
        if len(results.get(name, empty)[PROFILE if is_profiled else "launches"]) <= number
    ]


def _write(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value) + "\n")
    temporary.replace(path)


class WorkerPool:
    """Two processes with Megatron imported, which fork one rank each for every run."""

    def __init__(self) -> None:
        from quartet_plugin.protocol.environment import CPU_SETTINGS

        environment = {**os.environ, **CPU_SETTINGS, **HUGE_PAGES, "PYTHONWARNINGS": "ignore"}
        self._members = [
            subprocess.Popen(
                [sys.executable, __file__, "-", "--zygote", str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for rank in range(2)
        ]
        for member in self._members:
            if self._answer(member, limit_s=120) != "ready":
                raise RuntimeError("a process could not import Megatron")

    def run(self, name: str, *, options: argparse.Namespace, is_profiled: bool) -> dict[str, Any]:
        """One launch: seconds of each measured iteration, of the slower rank, and the profiles."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with tempfile.TemporaryDirectory() as folder:
            order = {
                "name": name,
                "port": port,
                "folder": folder,
                "warmup": options.warmup,
                "iterations": options.iterations,
                "is_profiled": is_profiled,
            }
            for member in self._members:
                assert member.stdin is not None
                member.stdin.write(json.dumps(order) + "\n")
                member.stdin.flush()
            answers = [self._answer(member, limit_s=RUN_LIMIT_S + 20) for member in self._members]
            if answers != ["0", "0"]:
                log = "\n".join(path.read_text()[-2000:] for path in sorted(Path(folder).glob("log-*")))
                raise RuntimeError(f"{name}: exit codes {answers}\n{log}")
            times = [json.loads(Path(folder, f"times-{rank}.json").read_text()) for rank in range(2)]
            profiles = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.profile.json"))]
        return {
            "iteration_s": [max(pair) for pair in zip(*times, strict=True)][options.warmup :],
            "profiles": profiles,
        }

    def _answer(self, member: "subprocess.Popen[str]", *, limit_s: float) -> str:
        assert member.stdout is not None
        ready, _, _ = select.select([member.stdout], [], [], limit_s)
        return member.stdout.readline().strip() if ready else "no answer"

    def close(self) -> None:
        """End both."""
        for member in self._members:
            assert member.stdin is not None
            member.stdin.close()
            try:
                member.wait(timeout=10)
            except subprocess.TimeoutExpired:
                member.kill()
                member.wait()


def serve(rank: int) -> None:
    """Import Megatron once, then fork a rank for every line on the standard input."""
    from quartet_plugin.megatron import cpu_device

    cpu_device.install()
    for name in IMPORTED:
        importlib.import_module(name)
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become_rank(rank, json.loads(line))
        print(_code_of(child), flush=True)


def _code_of(child: int) -> int:
    end = time.monotonic() + RUN_LIMIT_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def _become_rank(rank: int, order: dict[str, Any]) -> None:
    """One rank of one run, from here to its end."""
    log = os.open(Path(order["folder"], f"log-{rank}"), os.O_WRONLY | os.O_CREAT)
    for stream in (0, 1, 2):
        os.dup2(log if stream else os.open(os.devnull, os.O_RDONLY), stream)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order["port"]),
    }
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    try:
        run_rank(rank, order)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def run_rank(rank: int, order: dict[str, Any]) -> None:
    """Train the case with its steps timed; ends the process."""
    from benchmarks.live_cases import CASES
    from quartet_plugin.megatron import cpu_device, seams
    from quartet_plugin.megatron.runtime.install import prepare
    from quartet_plugin.megatron.seams.declared import TRAIN_STEP

    case = CASES[order["name"]]
    steps = Steps(rank, order)
    wrappers: dict[Any, Any] = {TRAIN_STEP: steps.wrap}
    if case.is_custom:
        prepared = prepare(_schedule_spec(case), num_microbatches=case.num_microbatches)
        for seam, wrapper in prepared.wrappers.items():
            wrappers[seam] = seams.chain(wrappers.get(seam), wrapper)
    if order["is_profiled"]:
        inner = wrappers[TRAIN_STEP]
        wrappers[TRAIN_STEP] = seams.chain(inner, steps.profiled())
    seams.install(wrappers)
    sys.argv = [str(SCRIPT), *case.flags, *cpu_device.required_flags(set(case.flags))]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _schedule_spec(case: Any) -> Any:
    """The named schedule; receives are placed for stages whose time is proportional to their layers."""
    import numpy as np

    from quartet_plugin.model.costs import StageCosts
    from quartet_plugin.runtime.programs import ScheduleSpec

    device = np.array(case.placement)
    cost = np.array(case.layers_per_stage, dtype=np.float64)
    return ScheduleSpec(
        costs=StageCosts(
            device_of_stage=device,
            forward_s=cost,
            input_grad_s=cost,
            weight_grad_s=cost,
            backward_s=2 * cost,
            activation_bytes=cost,
            forward_transfer_s=0 * cost,
            backward_transfer_s=0 * cost,
            held_fraction=0.5,
        ),
        name=case.schedule,
    )


class Steps:
    """Times every step from the end of the one before; ends the process after the last."""

    def __init__(self, rank: int, order: dict[str, Any]) -> None:
        self._rank, self._order = rank, order
        self._seconds: list[float] = []
        self._last = 0.0

    def wrap(self, train_step: Any) -> Any:
        """`train_step`, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._last = self._last or time.perf_counter()
            results = train_step(*args, **kwargs)
            now = time.perf_counter()
            self._seconds.append(now - self._last)
            self._last = now
            if len(self._seconds) == self._order["warmup"] + self._order["iterations"]:
                self._finish()
            return results

        return timed

    def profiled(self) -> Any:
        """The wrapper that profiles layers too."""
        from quartet_plugin.megatron.profiling import LayerProfiler
        from quartet_plugin.protocol.attempt_files import TrialSpec
        from quartet_plugin.rank.files import RankFileWriter
        from quartet_plugin.rank.rendezvous import RankEnv

        spec = TrialSpec(
            attempt_id="0" * 32,
            folder=self._order["folder"],
            warmup=self._order["warmup"],
            measure=self._order["iterations"],
            plan_key=None,
        )
        files = RankFileWriter(spec, RankEnv.of(os.environ))
        profiler = LayerProfiler(files)
        profiler.prepare(delays_te=False)
        return profiler.wrap

    def _finish(self) -> None:
        import torch.distributed as dist

        path = Path(self._order["folder"], f"times-{self._rank}.json")
        path.write_text(json.dumps(self._seconds))
        dist.barrier()
        os._exit(0)


def report(results: dict[str, Any]) -> int:
    """Calibrate, predict, compare."""
    import numpy as np

    from benchmarks.live_cases import CALIBRATING, PREDICTED, two_cores
    from quartet_plugin.calibration.constants_fit import calibrate

    cluster = two_cores()
    observations = []
    for case in CALIBRATING:
        observations += observed(case, results.get(case.name), cluster)
    calibration = calibrate(observations)
    print(f"calibrated by {calibration.num_iterations} runs and {calibration.num_parts} parts of them")
    for term in calibration.terms:
        print(
            f"  {term.name:14} {term.value:.4g} [{term.low:.4g}, {term.high:.4g}], prior {term.prior:.4g}, "
            f"{term.num_measurements} measurements, {term.learned:.0%} learned"
        )
    print(f"error of the model in whole iterations: {calibration.iteration_error:.1%}")
    for case in CALIBRATING:
        _line(case, results.get(case.name), calibration.interval(case.run(cluster)))
    print("predicted:")
    errors: dict[str, list[float]] = {}
    spreads, inside, num_sure = [], 0, 0
    for case in PREDICTED:
        result = results.get(case.name)
        line = _line(case, result, calibration.interval(case.run(cluster)))
        if result is not None and line is not None:
            errors.setdefault(case.how if case.how != "pp2" else f"pp2 {case.schedule}", []).append(line[0])
            inside += line[1]
            spreads.append(median_of(result["launches"])[1])
            num_sure += len(result["launches"]) >= LEAST_LAUNCHES
    if not errors:
        print("nothing measured to compare with")
        return 1
    for kind, of_kind in sorted(errors.items()):
        mean, bias = np.abs(of_kind).mean(), np.mean(of_kind)
        print(f"  {kind:16} {len(of_kind)} runs: mean {mean:.1%}, bias {bias:+.1%}")
    all_errors = np.concatenate(list(errors.values()))
    absolute = np.abs(all_errors)
    print(f"slowdown of each round, over the runs' medians: {', '.join(round_slowdowns(results))}")
    print(
        f"{len(all_errors)} runs not used for calibration, {num_sure} of them launched {LEAST_LAUNCHES} "
        f"times or more: mean error {absolute.mean():.2%}, median {np.median(absolute):.2%}, worst "
        f"{absolute.max():.2%}, bias {all_errors.mean():+.2%}, {inside} inside their 95 % interval; "
        f"standard error of their medians {np.mean(spreads):.1%}; goal {GOAL:.0%}"
    )
    return 0 if absolute.mean() <= GOAL and num_sure >= LEAST_RUNS else 1


def round_slowdowns(results: dict[str, Any]) -> list[str]:
    """Each round's time of a launch over the median of its run's launches; the median over runs."""
    ratios: dict[int, list[float]] = {}
    for result in results.values():
        medians = [statistics.median(launch["iteration_s"]) for launch in result["launches"]]
        for number, median in enumerate(medians):
            ratios.setdefault(number, []).append(median / statistics.median(medians))
    return [f"{statistics.median(ratios[number]):.3f}" for number in sorted(ratios)]


def _line(case: Any, result: Any, predicted: Any) -> tuple[float, bool] | None:
    if not result or not result["launches"]:
        return None
    seconds, spread = median_of(result["launches"])
    error = predicted.seconds / seconds - 1
    print(
        f"  {error:+7.1%}  measured {seconds * 1e3:7.1f} ms +-{spread:.1%}, predicted "
        f"{predicted.seconds * 1e3:7.1f} [{predicted.low * 1e3:.1f}, {predicted.high * 1e3:.1f}]  {case.name}"
    )
    return error, predicted.low <= seconds <= predicted.high


def median_of(launches: Sequence[Any]) -> tuple[float, float]:
    """The median over launches of each launch's median iteration, and its relative standard error."""
    medians = [statistics.median(launch["iteration_s"]) for launch in launches]
    middle = statistics.median(medians)
    deviation = (
        statistics.median(abs(median - middle) for median in medians) * 1.4826
        if len(medians) > 2
        else 0.03 * middle
    )
    return middle, max(LEAST_SPREAD, deviation / middle / len(medians) ** 0.5)


def observed(case: Any, result: Any, cluster: Any) -> list[Any]:
    """The observations of a calibrating run: of its iteration and of its parts."""
    from quartet_plugin.calibration.observations import Observation
    from quartet_plugin.calibration.profile import observations_of
    from quartet_plugin.model.schema import parse
    from quartet_plugin.protocol.rank_files import RankProfile

    if not result:
        return []
    run = case.run(cluster)
    observations: list[Any] = []
    if result["launches"]:
        seconds, spread = median_of(result["launches"])
        observations.append(Observation(run=run, seconds=seconds, spread=spread))
    launches = [] if case.is_custom else result[PROFILE]
    ranks = [parse(RankProfile, rank, where=case.name) for launch in launches for rank in launch["profiles"]]
    return observations + observations_of(run, ranks)


if __name__ == "__main__":
    sys.exit(main())
