"""The first iterations of a trial, which the parity gate compares: the request, and what the ranks wrote."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quartet_plugin.errors import QuartetError
from quartet_plugin.model.receipt import StepValues
from quartet_plugin.model.schema import Number
from quartet_plugin.protocol.attempt_files import KEPT_FILE, KeptWeights, read_shared
from quartet_plugin.protocol.rank_files import RankGradients, RankReport, rank_files_of
from quartet_plugin.trial.request import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStart:
    """The wish that a trial's first `num_steps` iterations are compared.

    The trial starts from `weights`, or keeps its own in `save_weights`. `restores_settings`: dropout or
    jitter may be set aside for these iterations, so that the command's own warm-up follows them.
    """

    num_steps: int
    weights: Path | None = None
    save_weights: Path | None = None
    restores_settings: bool = False

    def num_warmup(self, asked: int) -> int:
        """The iterations that are not measured, where the user asks for `asked` of them."""
        return self.num_steps + asked if self.restores_settings else max(asked, self.num_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSteps:
    """The compared iterations of a trial, as its ranks wrote them.

    `settings` were set aside for them, `weights_s` are the seconds of the slowest rank to save or load the
    weights. `unavailable` says why there is nothing to compare; then there are no `steps`.
    """

    steps: tuple[StepValues, ...] = ()
    settings: tuple[str, ...] = ()
    weights_s: float = 0.0
    unavailable: str | None = None


def read_compared_steps(result: TrialResult) -> ComparedSteps:
    """The compared iterations of a measured trial; a value that no rank has is not a number."""
    count = result.num_compared
    gradients = read_gradients(result.folder, attempt_id=result.attempt_id)
    try:
        reports = result.rank_files().reports
    except QuartetError as error:
        return ComparedSteps(unavailable=str(error))
    reason = next((rank.unavailable for rank in gradients if rank.unavailable), None)
    if reason is None and (not count or {rank.launch_rank for rank in gradients} != set(reports)):
        reason = "its ranks left no record of compared iterations"
    if reason is None and any(len(rank.steps) != count for rank in gradients):
        reason = "it made fewer iterations than are compared"
    if reason is not None:
        return ComparedSteps(unavailable=reason)
    parts, loads = part_norms(gradients), expert_loads(gradients)
    ordered = sorted(reports.values(), key=lambda report: report.rank)
    return ComparedSteps(
        steps=tuple(_step(ordered, step, parts=parts[step], loads=loads[step]) for step in range(count)),
        settings=tuple(sorted({name for rank in gradients for name in rank.settings or ()})),
        weights_s=max((float(rank.weights_s or 0.0) for rank in gradients), default=0.0),
    )


def _step(
    reports: Sequence[RankReport], step: int, *, parts: dict[str, float], loads: dict[str, tuple[int, ...]]
) -> StepValues:
    """The lowest RANK's loss and gradient norm of a step."""
    rows = [report.iterations[step] for report in reports if step < len(report.iterations)]
    loss = next((row.loss for row in rows if row.loss is not None), None)
    norm = next((row.grad_norm for row in rows if row.grad_norm is not None), None)
    return StepValues(
        loss=math.nan if loss is None else float(loss),
        grad_norm=math.nan if norm is None else float(norm),
        parts=parts,
        expert_loads=loads,
    )


def kept_by(weights: Path) -> str | None:
    """The attempt that kept these weights; None where they are not there, or not whole."""
    try:
        return read_shared(KeptWeights, weights / KEPT_FILE).attempt_id
    except (QuartetError, OSError):
        return None


def read_gradients(folder: Path, *, attempt_id: str) -> list[RankGradients]:
    """Every rank's rank-K.parity.json of an attempt; [] where one breaks its format.

    Gradients by part only name the stage of a fault, so such a file is no error.
    """
    gradients: list[RankGradients] = []
    for path in rank_files_of(RankGradients, folder):
        try:
            rank = read_shared(RankGradients, path)
        except (QuartetError, FileNotFoundError):
            return []
        if rank.attempt_id == attempt_id:
            gradients.append(rank)
    return gradients


def part_norms(gradients: Sequence[RankGradients]) -> list[dict[str, float]]:
    """The gradient norm of every part of the model, step by step, over all ranks."""
    length = min((len(rank.steps) for rank in gradients), default=0)
    return [_norms([rank.steps[step].squares for rank in gradients]) for step in range(length)]


def expert_loads(gradients: Sequence[RankGradients]) -> list[dict[str, tuple[int, ...]]]:
    """The tokens of every expert by part of the model, step by step, over all ranks."""
    length = min((len(rank.steps) for rank in gradients), default=0)
    loads: list[dict[str, tuple[int, ...]]] = []
    for step in range(length):
        total: dict[str, tuple[int, ...]] = {}
        for rank in gradients:
            for name, tokens in (rank.steps[step].expert_tokens or {}).items():
                before = total.get(name, (0,) * len(tokens))
                total[name] = tuple(map(sum, zip(before, tokens, strict=False)))
        loads.append(total)
    return loads


def _norms(squares: Sequence[dict[str, Number]]) -> dict[str, float]:
    names = sorted({name for rank in squares for name in rank})
    return {name: math.sqrt(sum(float(rank.get(name, 0.0)) for rank in squares)) for name in names}
