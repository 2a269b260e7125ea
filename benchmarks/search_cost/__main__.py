"""How many trials the search needs, where the best plan is known.

    python -m benchmarks.search_cost record [--minutes 12]   # measures a whole space on real Megatron
    python -m benchmarks.search_cost replay [--seeds 20]     # trials until within 2 % of its best plan
    python -m benchmarks.search_cost replay --only large     # one of the synthetic spaces: small, large
    python -m benchmarks.search_cost regret [--trials 12]    # does the regret estimate hold what was missed?

`record` is resumed by the same command: what was measured is kept in --recording. `replay` runs the
coordinator as `quartet tune` does, and beside it Optuna's TPE by itself over the same parameters, without the
cost model. Spaces called synthetic are simulated with constants that the search is not told; they prove
nothing of a machine.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.search_cost import grounds, replay
from benchmarks.search_cost.recording import DEFAULT_FILE

ROOT = Path(__file__).resolve().parents[2]
GOAL_SHARE, GOAL_TRIALS = 0.2, 10


def main() -> int:
    """Do what is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "replay", "regret"))
    parser.add_argument("--recording", type=Path, default=DEFAULT_FILE)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "search-cost")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--limit", type=int, default=100, help="Trials after which plain TPE is given up.")
    parser.add_argument(
        "--own-limit", type=int, default=40, help="Trials after which the search is given up."
    )
    parser.add_argument("--trials", type=int, default=12, help="Trials of a search whose regret is checked.")
    parser.add_argument("--only", choices=("recorded", "small", "large"), action="append")
    options = parser.parse_args()
    if options.command == "record":
        from benchmarks.search_cost.record import record

        recording = record(options.recording, minutes=options.minutes, folder=options.folder)
        key, best_s = recording.best
        print(f"{options.recording}: best {1e3 * best_s:.1f} ms: {key}")
        return 0
    measure = _count if options.command == "replay" else _regret
    for ground in _grounds(options):
        measure(ground, options)
    return 0


def _grounds(options: argparse.Namespace) -> list[replay.Ground]:
    names = options.only or ["recorded" if options.recording.exists() else "small", "large"]
    make: dict[str, Callable[[], list[replay.Ground]]] = {
        "recorded": lambda: [
            grounds.recorded(options.recording),
            grounds.recorded(options.recording, narrowed=grounds.ONE_REPLICA),
        ],
        "small": lambda: [grounds.small()],
        "large": lambda: [grounds.large()],
    }
    return [ground for name in names for ground in make[name]()]


def _count(ground: replay.Ground, options: argparse.Namespace) -> None:
    """Trials of both sides until a plan within 2 % of the best was measured."""
    print(f"{ground.name}: {ground.num_plans} plans, best {1e3 * ground.best_s:.1f} ms", flush=True)
    quartet: list[int | None] = []
    plain: list[replay.PlainCount] = []
    for seed in range(options.seeds):
        quartet.append(replay.searched(ground, seed=seed, limit=options.own_limit))
        plain.append(replay.plain(ground, seed=seed, limit=options.limit))
        print(f"  seed {seed}: {quartet[-1]} against {plain[-1].launched}", file=sys.stderr, flush=True)
    median = _row("quartet", quartet, limit=options.own_limit)
    share = median / _row("plain TPE", [count.launched for count in plain], limit=options.limit)
    if all(count.proposed for count in plain):
        _row("plain TPE, repeats counted", [count.proposed for count in plain], limit=options.limit)
    print(f"  of plain TPE's median: {share:.2f} (goal: at most {GOAL_SHARE:g}){_met(share <= GOAL_SHARE)}")
    print(f"  median of the search: {median:g} (goal: at most {GOAL_TRIALS}){_met(median <= GOAL_TRIALS)}")


def _row(name: str, counts: Sequence[int | None], *, limit: int) -> float:
    """Print median and range; a search that gave up counts as one more than the limit."""
    values = sorted(limit + 1 if count is None else count for count in counts)
    low, high = values[len(values) // 10], values[-1 - len(values) // 10]
    median = statistics.median(values)
    given_up = sum(count is None for count in counts)
    note = f"; {given_up} of {len(counts)} given up and counted as {limit + 1}" if given_up else ""
    print(f"  {name}: median {median:g}, 10 to 90 %: {low} to {high}, most {values[-1]}{note}")
    return median


def _regret(ground: replay.Ground, options: argparse.Namespace) -> None:
    """Print the share of searches in which the estimate's interval holds the true regret."""
    regrets = []
    for seed in range(options.seeds):
        regret = replay.regret_of(ground, seed=seed, trials=options.trials)
        regrets.append(regret)
        shown = "nothing"
        if regret.low is not None:
            shown = f"{regret.median:.3f} ({regret.low:.3f} to {regret.high:.3f})"
        print(f"  seed {seed}: estimated {shown}, true {regret.true:.3f}", file=sys.stderr, flush=True)
    estimated = [regret for regret in regrets if regret.low is not None]
    covered = sum(regret.is_covered for regret in estimated)
    widths = [(regret.high or 0.0) - (regret.low or 0.0) for regret in estimated]
    print(
        f"{ground.name}, {options.trials} trials: the 95 % interval held the true regret in {covered} of "
        f"{len(estimated)} searches; median width {100 * statistics.median(widths):.1f} %, median "
        f"true regret {100 * statistics.median(regret.true for regret in regrets):.1f} %"
    )


def _met(is_met: bool) -> str:
    return "" if is_met else ": NOT MET"


if __name__ == "__main__":
    sys.exit(main())
