"""A study is `quartet plan` with trials: until something is measured it has the planner's plans."""

import ast
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from quartet_plugin.calibration.machine_prior import KnownMachine, machine_model_of
from quartet_plugin.calibration.predictor import PlanPredictor
from quartet_plugin.errors import InfeasibleError
from quartet_plugin.model.layout import Layout
from quartet_plugin.model.plan import Plan
from quartet_plugin.model.trial_record import FinishedTrial, TrialRecord
from quartet_plugin.planner.described_rules import described_search, training_job_of
from quartet_plugin.planner.job import PlanRequest
from quartet_plugin.planner.order_search import planned_ranking
from quartet_plugin.planner.plans import Plain, plain_layout
from quartet_plugin.planner.space_request import request_of_space
from quartet_plugin.space.config import SearchConfig
from quartet_plugin.space.knobs.knob import has_copies
from quartet_plugin.space.param_sources import FixedParams, Params
from quartet_plugin.space.plan_space import Space, build_space
from quartet_plugin.study.tune_study import TuneStudy
from quartet_plugin.tuner.proposer import Proposer
from tests.planner.planning import random_job
from tests.planner.test_described_space import parts_of_plan, parts_of_ranked

FULL_SEARCHES = True  # read by `short_searches`

PACKAGE = Path(__file__).parents[2] / "quartet_plugin"
TOP = 20
# Jobs of the property, and those of them that are tried each time.
NUM_JOBS, SAMPLED = 200, (2, 5, 6, 7)
# What a command is searched for here: other numbers of the knobs whose choices depend on the command.
SEARCHED = {"virtual_stages": (1, 2), "micro_batch_size": (1, 2, 4)}


@dataclass
class WaitingPoints:
    """A study of which only the waiting points count."""

    space: Space
    plans: list[Plan] = field(default_factory=list)
    has_waiting: bool = False

    def enqueue(self, params: Params, plan: Plan) -> None:
        """The parameters must lead to the plan."""
        assert self.space.decode(FixedParams(params), trial=0).key == plan.key
        self.plans.append(plan)


def space_of(job: PlanRequest, plain: Plain) -> Space:
    """The space of a command that trains the job in its plain layout."""
    said = {name: getattr(job.search, name) for name in ("split", "forbid")}
    search = SearchConfig().model_copy(
        update={**SEARCHED, **said, "schedule": described_search(job).schedule}
    )
    command = training_job_of(job, layout=plain.layout, split=plain.stage_split)
    return build_space(command, nodes=job.nodes, search=search, run="r", seed=0)


def restricted_to(job: PlanRequest, plain: Plain) -> PlanRequest:
    """The job with what the search of a command keeps."""
    layout = plain.layout
    kept = {
        **SEARCHED,
        "context_parallel": (layout.context_parallel,),
        "recompute": (layout.recompute,),
        "distributed_optimizer": (layout.distributed_optimizer,),
        "tensor_partition": ("stock",),
    }
    return replace(job, search=job.search.model_copy(update=kept))


def proposals(
    space: Space, machine: KnownMachine, *, num: int, trials: Collection[FinishedTrial]
) -> list[Plan]:
    """What the tuner puts before its study, one after the other."""
    model = machine_model_of(
        space.nodes, precision=space.job.precision, machine=machine, experts=space.job.experts
    )
    proposer = Proposer(
        space,
        predictor=PlanPredictor(model, num_iterations=4),
        objective="tokens_per_s",
        request=request_of_space(space, machine=machine),
        constants=machine.constants,
        explore=5,
    )
    study = WaitingPoints(space)
    for _ in range(num):
        scored = proposer.prepare(cast("TuneStudy", study), list(trials), is_known=study.plans.__contains__)
        assert scored is None
    return study.plans


def without_time(space: Space) -> FinishedTrial:
    """A command of which no time is known."""
    record = TrialRecord(verdict="infeasible", outcome="INFEASIBLE", reason="out of memory", attempt_id="0")
    return FinishedTrial(number=0, plan=space.baseline, record=record)


def as_run(parts: tuple[object, ...]) -> tuple[object, ...]:
    """A plan's parts; without copies of the model no optimizer is distributed, whatever a command says."""
    shape, layout, *rest = parts
    assert isinstance(layout, Layout)
    has_it = layout.distributed_optimizer and has_copies(layout)
    return shape, replace(layout, distributed_optimizer=has_it), *rest


def num_compared(seed: int) -> int:
    """The plans of a job that the tuner must propose first, in their order."""
    job = random_job(seed)
    try:
        plain = plain_layout(job)
        restricted = restricted_to(job, plain)
        ranking = planned_ranking(restricted, top=TOP, has_search=False)
    except InfeasibleError:
        return 0
    space = space_of(job, plain)
    machine = KnownMachine(cluster=None if job.cluster is None else job.cluster.cluster)
    plans = proposals(space, machine, num=len(ranking.best), trials=[without_time(space)])
    proposed = [as_run(parts_of_plan(plan)) for plan in plans]
    assert proposed == [as_run(parts_of_ranked(restricted, ranked)) for ranked in ranking.best]
    return len(ranking.best)


@pytest.mark.parametrize("seed", SAMPLED)
def test_the_tuner_first_proposes_the_plans_of_quartet_plan(seed: int) -> None:
    assert num_compared(seed) == TOP


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_tuner_first_proposes_the_plans_of_200_jobs() -> None:
    assert sum(num_compared(seed) for seed in range(NUM_JOBS)) > 0.8 * NUM_JOBS * TOP


def importing(name: str) -> set[str]:
    """The modules that import a name, which is said with its own module."""
    module, _, last = f"quartet_plugin.{name}".rpartition(".")
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text)) if last in text else ()
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]
        if any(alias.name == last for node in imports for alias in node.names):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def test_plans_are_proposed_by_one_path() -> None:
    """The tuner and Optuna's sampler ask the scorer, and it alone asks for the list and the candidates."""
    scorer = "planner/plan_scorer.py"
    assert importing("planner.plan_scorer.PlanScorer") == {"tuner/proposer.py", "study/plan_sampler.py"}
    assert importing("planner.described_space.first_plans") == {scorer}
    assert importing("planner.candidate_plans.PlanCandidates") == {scorer}
    ranked = importing("planner.order_search.planned_ranking") | importing("planner.ranking.best_plans")
    assert not {module for module in ranked if module.startswith(("tuner/", "study/"))}
    assert importing("space.layouts.choices_by_degrees") == {"planner/layout_table.py"}
    assert importing("space.layouts.legal_layouts") == {"space/plan_space.py", "space/unsearched_layouts.py"}
