"""What tuning wins: `python -m benchmarks.scenarios [NAME ...] [--trials 8] [--rounds 10] [--launches 3]`.

Real Megatron on two CPU cores, one thread a process, ranks pinned after import, the same allocator settings
everywhere. A scenario has three sides, which are then all launched together and train in turns of a second or
two (`turns.py`), several times over:

  default   Megatron's defaults for the job, split evenly
  stock     the best that plain TPE found over stock flags, with as many trials of that length, three seeds;
            the best of its final rounds by the median, where `quartet tune` asks for certainty
  winner    what `quartet tune` found

Printed are winner over stock (the median over the rounds of all launches of the geometric mean over seeds,
with a 95 % bootstrap interval; a seed that found the same plan counts as 1.0), and winner over default.
Everything is kept in the folder: what was done is not run again, a search that was stopped goes on.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scenarios.catalogue import SCENARIOS, Scenario
from benchmarks.scenarios.network import ADDRESSES, two_namespaces
from benchmarks.scenarios.turns import Launch, measured_in_turns
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.plan import Plan, read_plan
from quartet_plugin.tuner.finalists import bootstrap_median
from quartet_plugin.tuner.history import read_history

ROOT = Path(__file__).resolve().parents[2]
WARMUP, MEASURE = 2, 6
OURS, DEFAULT = "winner", "default"


def main() -> int:
    """Run the scenarios that are named, or all, and print their table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "scenarios")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="Turns of every side in a launch.")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in options.names or SCENARIOS:
        result = options.folder / f"{name}.json"
        if not result.exists():
            with _place(SCENARIOS[name]):
                write_json_atomic(result, measure(name, SCENARIOS[name], options))
        rows[name] = json.loads(result.read_text())
        print(_row(name, rows[name]), flush=True)
    gains = [row["winner_over_stock"]["median"] for row in rows.values()]
    print(f"winner over best stock, geometric mean: {statistics.geometric_mean(gains):.3f}")
    return 0


@contextlib.contextmanager
def _place(scenario: Scenario) -> Iterator[None]:
    """The scenario's environment around whatever is started inside."""
    before = dict(os.environ)
    os.environ["SCENARIO_CORES"] = scenario.cores
    os.environ["SCENARIO_NAMESPACES"] = scenario.namespaces
    os.environ["SCENARIO_ADDRESS"] = ADDRESSES[0]
    try:
        with contextlib.nullcontext() if scenario.rate is None else two_namespaces(rate=scenario.rate):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def measure(name: str, scenario: Scenario, options: argparse.Namespace) -> dict[str, Any]:
    """Search with both, then measure what they found and the default in turns."""
    sides: dict[str, Plan | None] = {DEFAULT: None}
    sides[OURS] = winner(search(f"{name}-ours", scenario.search, scenario, options, seed=0, starts="auto"))
    for seed in range(options.seeds):
        run = f"{name}-stock-{seed}"
        folder = search(run, scenario.stock_search, scenario, options, seed=seed, starts="none")
        sides[f"stock-{seed}"] = fastest_finalist(folder)
    rounds = measure_in_turns(name, sides, scenario, options)
    return {"about": scenario.about, **compare(sides, rounds), "rounds": rounds}


def search(
    run: str,
    section: Mapping[str, Any],
    scenario: Scenario,
    options: argparse.Namespace,
    *,
    seed: int,
    starts: str,
) -> Path:
    """One `quartet tune`, to its end; the folder of its run."""
    folder = options.folder / run
    config = options.folder / f"{run}.yaml"
    content = {
        "run": run,
        "search": dict(section),
        "trial": {"warmup": WARMUP, "measure": MEASURE, "deadline_s": 120},
        "study": {"trials": options.trials, "seed": seed, "top_k": 1, "rounds": 5, "starts": starts},
        "device": "cpu",
    }
    config.write_text(yaml.safe_dump(content))
    words = ["quartet", "tune", "--config", str(config), "--run-dir", str(options.folder)]
    words += ["--resume"] if folder.exists() else []
    with (options.folder / f"{run}.log").open("a") as log:
        print(f"{run}: searching", file=sys.stderr, flush=True)
        subprocess.run([*words, "--", *scenario.command], check=True, stdout=log, stderr=log)
    return folder


def winner(folder: Path) -> Plan | None:
    """What `quartet tune` hands over: a plan only where its gain is certain."""
    best = folder / "best" / "plan.json"
    return read_plan(best) if best.exists() else None


def fastest_finalist(folder: Path) -> Plan | None:
    """The best of the final rounds by their median, certain or not: a plain search has no such caution."""
    faster = [one for one in read_history(folder).finalists if one.comparison.speedup.median > 1.0]
    if not faster:
        return None
    best = max(faster, key=lambda one: one.comparison.speedup.median)
    return read_plan(next((folder / "final" / f"{best.number:06d}-round-1").glob("attempt-*/plan.json")))


def measure_in_turns(
    name: str, sides: Mapping[str, Plan | None], scenario: Scenario, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Model FLOP/s a device of every side in every round; sides with one plan are launched once."""
    plans = {_key(plan): plan for plan in sides.values()}
    rounds = []
    for number in range(options.launches):
        launch = Launch(
            command=scenario.command,
            num_processes=scenario.num_processes,
            plans=plans,
            folder=options.folder / f"{name}-turns" / f"launch-{number}",
            cwd=ROOT,
        )
        print(f"{name}: launch {number + 1} of {options.launches}", file=sys.stderr, flush=True)
        for found in measured_in_turns(launch, rounds=options.rounds, seed=number):
            values = {key: _flops(plans[key]) / seconds for key, seconds in found.items()}
            rounds.append({side: values[_key(plan)] for side, plan in sides.items()})
    return rounds


def _key(plan: Plan | None) -> str:
    return "default" if plan is None else plan.key


def _flops(plan: Plan | None) -> float:
    """Relative work of an iteration, where the plan changes the shape: parameters and tokens are equal."""
    if plan is None:
        return 1.0
    own = plan.made_for.shape
    return plan.shape.model_flops_per_sequence / own.model_flops_per_sequence


def compare(sides: Mapping[str, Plan | None], rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Ratios of speed with their intervals; rounds are what is drawn again."""
    seeds = [side for side in sides if side.startswith("stock-")]
    against_stock = [statistics.geometric_mean([row[OURS] / row[seed] for seed in seeds]) for row in rounds]
    return {
        "plans": {side: "the default" if plan is None else _words(plan) for side, plan in sides.items()},
        "winner_over_stock": _interval(against_stock),
        "winner_over_each_stock": {
            seed: _interval([row[OURS] / row[seed] for row in rounds]) for seed in seeds
        },
        "winner_over_default": _interval([row[OURS] / row[DEFAULT] for row in rounds]),
    }


def _interval(ratios: Sequence[float]) -> dict[str, float]:
    found = bootstrap_median(ratios, seed=0)
    return {"median": found.median, "low": found.low, "high": found.high}


def _words(plan: Plan) -> str:
    return ", ".join(
        (plan.shape.label, plan.layout.label, plan.split.label, plan.schedule.label, plan.mapping.label)
    )


def _row(name: str, row: Mapping[str, Any]) -> str:
    stock, default = row["winner_over_stock"], row["winner_over_default"]
    return (
        f"| {name} | {row['about']} | {stock['median']:.3f} ({stock['low']:.3f} to {stock['high']:.3f}) "
        f"| {default['median']:.3f} ({default['low']:.3f} to {default['high']:.3f}) | {row['plans'][OURS]} |"
    )


if __name__ == "__main__":
    sys.exit(main())
