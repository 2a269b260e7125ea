"""What tuning wins: searches, the winners in turns, and the table, each from the files of the one before.

    python -m benchmarks.scenarios run SCENARIO --seed 0           # ours-0.json: `quartet tune`
    python -m benchmarks.scenarios run SCENARIO --seed 0 --stock   # stock-0.json: plain TPE over stock flags
    python -m benchmarks.scenarios run SCENARIO --without split    # without-split-0.json: one axis at stock
    python -m benchmarks.scenarios turns SCENARIO                  # turns.json: all of them in turns
    python -m benchmarks.scenarios table                           # the table, from results/ alone

Real Megatron on two CPU cores, one thread a process, ranks pinned after import, the same allocator settings
everywhere. A row has three sides:

  default   Megatron's defaults for the job, split evenly; none where a memory limit is below what they need
  stock     the best that plain TPE found over stock flags, with as many trials of that length, three seeds;
            the best of its final rounds by the median, where `quartet tune` asks for certainty
  ours      what `quartet tune` found

All are launched together and train in turns of a second or two (`turns.py`), several times over; where
memory does not hold all, ours is launched with some of the others, then with the rest. The table
has winner over the best stock search (the median over the rounds of all launches, with a 95 % bootstrap
interval; the best is the seed over which that median is least), over the geometric mean of the three, and
over the default, and what each axis gave (`--without`). The runs of a row have to be of one commit, or of
commits with the same search; rows of another one than most are named.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scenarios.catalogue import SCENARIOS, Scenario
from benchmarks.scenarios.cpu_shares import cpu_shares
from benchmarks.scenarios.hosts import launcher_of, probe, sections
from benchmarks.scenarios.network import address, joined_namespaces
from benchmarks.scenarios.result_files import (
    OURS,
    ROOT,
    STOCK,
    WITHOUT,
    SearchRun,
    TurnRounds,
    commit_of,
    machine_words,
    read_runs,
    write_result,
)
from benchmarks.scenarios.table import DEFAULT, table_lines
from benchmarks.scenarios.turns import Launch, measured_in_turns
from quartet_plugin.cli.runs import read_whole
from quartet_plugin.model.canonical import digest
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.history import PARTS, RunHistory, TrialRow
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.model.schema import dump
from tests.launchers.linked_hosts import LinkedHosts, linked_hosts

WARMUP, MEASURE = 2, 6
# Waiting processes of launches in turns that 24 GB of memory hold at once.
MAX_PROCESSES = 24


def main() -> int:
    """Run a search, launch winners in turns, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    turns = commands.add_parser("turns")
    commands.add_parser("table")
    for command in (run, turns):
        command.add_argument("scenario", choices=SCENARIOS)
        command.add_argument("--folder", type=Path, default=ROOT / "runs" / "scenarios")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--trials", type=int, default=8)
    side = run.add_mutually_exclusive_group()
    side.add_argument("--stock", action="store_true")
    side.add_argument("--without", metavar="AXIS")
    turns.add_argument("--rounds", type=int, default=10, help="Turns of every side in a launch.")
    turns.add_argument("--launches", type=int, default=3)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table_lines({name: scenario.about for name, scenario in SCENARIOS.items()})))
        return 0
    # An end by a signal has to end the jobs, too, of which all but one are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options.folder.mkdir(parents=True, exist_ok=True)
    with _place(options) as hosts:
        result = search(options, hosts) if options.command == "run" else measure_in_turns(options, hosts)
    print(f"wrote {write_result(result)}")
    return 0


@contextlib.contextmanager
def _place(options: argparse.Namespace) -> Iterator[LinkedHosts | None]:
    """The scenario's environment around whatever is started inside; its hosts, None where all runs here."""
    scenario: Scenario = SCENARIOS[options.scenario]
    before = dict(os.environ)
    os.environ["SCENARIO_CORES"] = scenario.cores
    os.environ["SCENARIO_NAMESPACES"] = scenario.namespaces
    os.environ["SCENARIO_ADDRESS"] = address(0)
    try:
        if scenario.cpu_shares:
            with cpu_shares(scenario.cpu_shares) as groups:
                os.environ["SCENARIO_CPU_GROUPS"] = ",".join(map(str, groups))
                yield None
        elif scenario.num_hosts > 1:
            folder = options.folder / f"{options.scenario}-hosts"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            number, slow = scenario.num_hosts, scenario.slow_pairs
            with linked_hosts(folder, number=number, slow=slow, rate=scenario.slow_rate) as hosts:
                yield hosts
        else:
            with joined_namespaces(scenario.rates) if scenario.rates else contextlib.nullcontext():
                yield None
    finally:
        os.environ.clear()
        os.environ.update(before)


def search(options: argparse.Namespace, hosts: LinkedHosts | None) -> SearchRun:
    """One `quartet tune`, to its end; one that was stopped goes on."""
    scenario: Scenario = SCENARIOS[options.scenario]
    commit = commit_of(ROOT)
    if options.without:
        side, section = f"{WITHOUT}-{options.without}", scenario.search_without(options.without)
    else:
        side, section = (STOCK, scenario.stock_search) if options.stock else (OURS, scenario.search)
    name = f"{options.scenario}-{side}-{options.seed}"
    folder, config = options.folder / name, options.folder / f"{name}.yaml"
    content = _config_of(options, hosts, name=name, side=side, section=section)
    config.write_text(yaml.safe_dump(content))
    words = ["quartet", "tune", "--config", str(config), "--run-dir", str(options.folder)]
    words += ["--resume"] if folder.exists() else []
    with (options.folder / f"{name}.log").open("a") as log:
        print(f"{name}: searching", file=sys.stderr, flush=True)
        subprocess.run([*words, "--", *scenario.command], check=True, stdout=log, stderr=log)
    # The study's record says what became of a trial: a rank's own outcome is OK above a memory limit too.
    history, _, fault = read_whole(folder)
    if fault is not None:
        raise fault
    plan = fastest_finalist(folder, history) if side == STOCK else winner(folder)
    return SearchRun(
        scenario=options.scenario,
        side=side,
        seed=options.seed,
        commit=commit,
        machine=machine_words(os.cpu_count() or 1),
        num_trials=options.trials,
        trials=tuple(map(trial_of, history.trials)),
        chosen=None if plan is None else json.loads(plan.read_text()),
        chosen_words="the default" if plan is None else _words(read_plan(plan)),
        note=history.baseline_note,
    )


def _config_of(
    options: argparse.Namespace, hosts: LinkedHosts | None, *, name: str, side: str, section: dict[str, Any]
) -> dict[str, Any]:
    """The q.yaml of a search; cluster files are written beside it."""
    scenario: Scenario = SCENARIOS[options.scenario]
    cluster = options.folder / f"{name}-cluster.json"
    content: dict[str, Any] = {
        "run": name,
        "search": section,
        "trial": {"warmup": WARMUP, "measure": MEASURE, "deadline_s": 120},
        # `top_k` and `rounds` keep their defaults, as in a user's search.
        "study": {
            "trials": options.trials,
            "seed": options.seed,
            "starts": "none" if side == STOCK else "auto",
        },
        "device": "cpu",
    }
    if scenario.cluster is not None:
        write_json_atomic(cluster, scenario.cluster)
        content["machine"] = {"cluster": str(cluster)}
    if hosts is not None:
        content |= sections(hosts)
        content["trial"]["nodes"] = scenario.num_hosts
        if side != STOCK:
            # Plain TPE knows nothing of a cluster.
            if not cluster.exists():
                probe(hosts, cluster, processes_per_host=scenario.processes_per_host)
            content["machine"] = {"cluster": str(cluster)}
    return content


def trial_of(row: TrialRow) -> dict[str, Any]:
    """A trial as a result file has it."""
    return {
        "number": row.number,
        "plan": ", ".join(row.labels[part] for part in PARTS if part in row.labels),
        "verdict": row.verdict,
        "outcome": row.outcome,
        "reason": row.reason,
        "iterations_s": list(row.iterations_s),
        "peak_memory_bytes": row.peak_memory_bytes,
    }


def winner(folder: Path) -> Path | None:
    """The plan file that `quartet tune` hands over: only where its gain is certain."""
    best = folder / "best" / "plan.json"
    return best if best.exists() else None


def fastest_finalist(folder: Path, history: RunHistory) -> Path | None:
    """The best of the final rounds by their median, certain or not: a plain search has no such caution."""
    faster = [one for one in history.finalists if one.comparison.speedup.median > 1.0]
    if not faster:
        return winner(folder)
    best = max(faster, key=lambda one: one.comparison.speedup.median)
    return next((folder / "final" / f"{best.number:06d}-round-1").glob("attempt-*/plan.json"))


def measure_in_turns(options: argparse.Namespace, hosts: LinkedHosts | None) -> TurnRounds:
    """Work a second of every side in every round; sides with one plan are launched once."""
    name, scenario = options.scenario, SCENARIOS[options.scenario]
    sides = {run.name: _plan_of(run) for run in read_runs(name)}
    if not sides:
        raise SystemExit(f"{name}: no search has a result file yet; see `run`")
    if scenario.memory_limit_bytes is None:
        sides[DEFAULT] = None
    plans = {job_key(plan): plan for plan in sides.values()}
    reference = next(iter(plans))  # ours, the first by name
    groups = launch_groups(list(plans), reference=reference, num_processes=scenario.num_processes)
    rounds = []
    for number in range(options.launches):
        by_group = []
        for place, group in enumerate(groups):
            launch = Launch(
                command=scenario.command,
                num_processes=scenario.num_processes,
                plans={key: plans[key] for key in group},
                folder=options.folder / f"{name}-turns" / f"launch-{number}" / f"group-{place}",
                cwd=ROOT,
                launcher=None if hosts is None else launcher_of(hosts),
            )
            said = f"{name}: launch {number + 1} of {options.launches}, group {place + 1} of {len(groups)}"
            print(said, file=sys.stderr, flush=True)
            by_group.append(measured_in_turns(launch, rounds=options.rounds, seed=number))
        for found in zip(*by_group, strict=True):
            speeds = [
                {key: _flops(plans[key]) / seconds for key, seconds in group.items()} for group in found
            ]
            values = joined_round(speeds, reference=reference)
            rounds.append({side: values[job_key(plan)] for side, plan in sides.items()})
    return TurnRounds(
        scenario=name,
        commit=commit_of(ROOT),
        machine=machine_words(os.cpu_count() or 1),
        num_launches=options.launches,
        rounds=tuple(rounds),
    )


def launch_groups(keys: Sequence[str], *, reference: str, num_processes: int) -> list[tuple[str, ...]]:
    """The plans that are launched together: all, or the reference beside as many others as memory holds."""
    most = max(2, MAX_PROCESSES // num_processes)
    if len(keys) <= most:
        return [tuple(keys)]
    others = [key for key in keys if key != reference]
    return [(reference, *group) for group in batched(others, most - 1)]


def joined_round(groups: Sequence[Mapping[str, float]], *, reference: str) -> dict[str, float]:
    """One round of all groups: each speed relative to the reference's in the same group."""
    return {key: speed / speeds[reference] for speeds in groups for key, speed in speeds.items()}


def _plan_of(run: SearchRun) -> Plan | None:
    """The plan that a search chose; None for the default."""
    if run.chosen is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_json_atomic(path, dict(run.chosen))
        return read_plan(path)


def job_key(plan: Plan | None) -> str:
    """A text that is equal for plans that train alike under one command, whatever is known of its nodes."""
    if plan is None:
        return DEFAULT
    about = ("made_for", "provenance", "prediction", "measurement")
    return digest({name: value for name, value in dump(plan).items() if name not in about})


def _flops(plan: Plan | None) -> float:
    """Relative work of an iteration, where the plan changes the shape: parameters and tokens are equal."""
    if plan is None:
        return 1.0
    own = plan.made_for.shape
    return plan.shape.model_flops_per_sequence / own.model_flops_per_sequence


def _words(plan: Plan) -> str:
    return ", ".join(
        (plan.shape.label, plan.layout.label, plan.split.label, plan.schedule.label, plan.mapping.label)
    )


if __name__ == "__main__":
    sys.exit(main())
