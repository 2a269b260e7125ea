"""Measures every plan of a small space with real trials; what was measured is kept, and gone on with.

Every plan is measured once, in random order; then those near the best again, round by round, until the time
is up. Another call goes on: with other plans first where some are missing, then with more rounds.
"""

import os
import platform
import random
import socket
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.scenarios.catalogue import Scenario
from benchmarks.search_cost.recording import Entry, Recording, read_recording
from benchmarks.search_cost.walk import every_plan, key_of
from quartet_plugin.calibration.machine_prior import machine_model_of_space
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.launchers.command import parse_command
from quartet_plugin.model.plan import NodeInfo, Plan
from quartet_plugin.model.training_job import TrainingJob, parse_training_job
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.trial.request import Outcome, TrialRequest, TrialResult
from quartet_plugin.trial.runner import run_trial
from quartet_plugin.tuner.config import parse_config
from quartet_plugin.tuner.trial_backend import LocalBackend

ROOT = Path(__file__).resolve().parents[2]
WARMUP, MEASURE = 2, 5
# Only plans this near the best are worth another launch, and no more than so many.
NEAR = 1.25
MAX_LAUNCHES = 7

SCENARIO = Scenario(
    about="a GPT with a heavy head on two CPU cores: layout, split, schedule and micro-batch free",
    num_processes=2,
    cores="0,1",
    flags="--num-layers 8 --hidden-size 128 --vocab-size 8192 --pipeline-model-parallel-size 2 "
    "--micro-batch-size 1 --global-batch-size 8",
    search={
        "virtual_stages": [1, 2],
        "micro_batch_size": [1, 2],
        "schedule": ["no-pipelining", "1f1b", "zb-h1", "zb-v", "gpipe"],
        "mapping": "stock",
    },
)
# What the ends weigh, in parts of all layers: between them all splits of two stages appear.
EMBEDDING = (0.0, 0.25)
HEAD = tuple(step / 16 for step in range(-16, 17))
# Of the splits over two chunks a device only so many are measured: the nearest stands for the others.
MAX_SPLITS_OF_CHUNKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop, in seconds of the monotonic clock, and where trials run."""

    end: float
    folder: Path


def record(path: Path, *, minutes: float, folder: Path) -> Recording:
    """Add launches to the recording in `path`, for about so many minutes."""
    os.chdir(ROOT)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ |= {"SCENARIO_CORES": SCENARIO.cores, "SCENARIO_NAMESPACES": "", "OMP_NUM_THREADS": "1"}
    limits = Limits(end=time.monotonic() + 60.0 * minutes, folder=folder)
    folder.mkdir(parents=True, exist_ok=True)
    recording = read_recording(path) if path.exists() else _begun(limits)
    plans = plans_of(recording, host=socket.gethostname())
    recording.write(path)
    print(f"{len(plans)} plans; {sum(len(e.launches) for e in recording.entries.values())} launches so far")
    for round_number in range(MAX_LAUNCHES):
        for key in _due(recording, round_number):
            if time.monotonic() > limits.end:
                return recording
            entry = recording.entries[key]
            number = len(entry.launches)
            result = _launch(plans[key], name=f"{sorted(plans).index(key):04d}-{number}", limits=limits)
            _add(entry, result)
            recording.write(path)
            print(f"round {round_number + 1}: {_words(result)}  {key}", flush=True)
    return recording


def space_of(recording: Recording) -> Space:
    """The space that was recorded."""
    search = parse_config({"search": recording.search}, where="search").search
    return _space(recording.job, recording.nodes, search)


def plans_of(recording: Recording, *, host: str | None = None) -> dict[str, Plan]:
    """Every plan to measure, with an entry for each; `host` is where they run, which no recording says."""
    space = space_of(recording)
    if host is not None:
        nodes = tuple(replace(node, host=host) for node in recording.nodes)
        space = _space(recording.job, nodes, space.search)
    plans = every_plan(space, embedding=EMBEDDING, head=HEAD)
    if len(recording.entries) > 1:
        kept = {key: plan for key, plan in plans.items() if key in recording.entries}
    else:
        kept = _without_rare(plans, space)
    for key in kept:
        recording.entries.setdefault(key, Entry())
    return kept


def _without_rare(plans: dict[str, Plan], space: Space) -> dict[str, Plan]:
    """All plans but those of two chunks a device that are predicted to be the slower ones of their kind."""
    predictor = PlanPredictor(machine_model_of_space(space), num_iterations=MEASURE)
    costs = {key: predictor.relative_cost(plan, baseline=space.baseline) for key, plan in plans.items()}
    kept: dict[str, Plan] = {}
    count: dict[tuple[str, str], int] = {}
    for key, plan in sorted(plans.items(), key=lambda item: (costs[item[0]] or 0.0, item[0])):
        kind = (plan.layout.label, plan.schedule.label)
        count[kind] = count.get(kind, 0) + 1
        if plan.layout.virtual_stages == 1 or count[kind] <= MAX_SPLITS_OF_CHUNKS:
            kept[key] = plan
    return kept


def _due(recording: Recording, round_number: int) -> list[str]:
    """What has no launch of this round yet, in random order; after the first round only what is near."""
    entries = recording.entries
    due = [k for k, e in entries.items() if e.refused is None and len(e.launches) <= round_number]
    if round_number:
        nearest = recording.best[1] * NEAR
        due = [key for key in due if (entries[key].iteration_s or nearest) <= nearest]
    random.Random(round_number).shuffle(due)
    return due


def _begun(limits: Limits) -> Recording:
    """A new recording, from what the user's command reports."""
    result = _launch(None, name="own-0", limits=limits)
    if not result.is_measured or result.job is None:
        raise SystemExit(f"the command itself failed: {result.reason}; see {result.folder}")
    job = parse_training_job(result.job, where=str(result.folder))
    nodes_info = LocalBackend().nodes(result)
    nodes = tuple(
        NodeInfo(host=f"node-{index}", node_class=node.node_class, num_slots=node.num_slots)
        for index, node in enumerate(nodes_info)
    )
    baseline = key_of(_space(job, nodes, SearchConfig()).baseline)
    return Recording(
        about=SCENARIO.about,
        job=job,
        nodes=nodes,
        search=dict(SCENARIO.search),
        environment={
            "device": "CPU, a core and a thread for each process, pinned after the imports",
            "num_processes": SCENARIO.num_processes,
            "python": platform.python_version(),
            "torch": job.torch_version,
            job.framework: job.framework_version,
            "iterations": f"{MEASURE} a launch after {WARMUP} that are left out",
            "flags": SCENARIO.flags,
        },
        entries={baseline: Entry(launches=[list(result.iteration_s)])},
    )


def _space(job: TrainingJob, nodes: tuple[NodeInfo, ...], search: SearchConfig) -> Space:
    return build_space(job, nodes=nodes, search=search, run="search-cost", seed=0)


def _launch(plan: Plan | None, *, name: str, limits: Limits) -> TrialResult:
    folder = limits.folder / f"{name}-{time.time_ns():x}"
    folder.mkdir(parents=True)
    return run_trial(
        TrialRequest(
            folder=folder,
            command=parse_command(SCENARIO.command),
            plan=plan,
            warmup=WARMUP,
            measure=MEASURE,
            device="cpu",
            deadline_s=120.0,
            max_spread=1e9,
            cwd=ROOT,
        )
    )


def _add(entry: Entry, result: TrialResult) -> None:
    if result.is_measured:
        entry.launches.append(list(result.iteration_s))
    elif result.outcome is Outcome.INFEASIBLE:
        entry.refused = result.reason
    elif result.outcome in (Outcome.HARNESS, Outcome.WRONG, Outcome.CANCELLED):
        raise SystemExit(f"{result.outcome.value}: {result.reason}; see {result.folder}")
    # What the machine did is nobody's fault: another call launches the plan again.


def _words(result: TrialResult) -> str:
    if not result.is_measured:
        return f"{result.outcome.value}: {result.reason}"
    return f"{1e3 * statistics.median(result.iteration_s):7.1f} ms, {result.wall_s:4.1f} s in all"
