"""`calibration.json`: a cluster's calibration as a file; docs/formats.md describes it."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from quartet_plugin.calibration.constants_fit import Calibration, Term
from quartet_plugin.cost.constants import ClusterConstants, Constants
from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.schema import Bounds, Length, read_record, record

_NAMES = frozenset(known.name for known in fields(ClusterConstants))
# Every file has these; what came later is neutral where a file lacks it.
_REQUIRED = frozenset(known.name for known in fields(Constants))

Positive = Annotated[float, Bounds(gt=0, lt=1e20)]
Count = Annotated[int, Bounds(ge=0, le=2**31)]
Number = float


@record
class _TermFile:
    name: str
    value: Positive
    low: Positive
    high: Positive
    prior: Positive
    num_measurements: Count
    learned: Annotated[float, Bounds(ge=0, le=1)]


@record
class _File:
    schema_version: Literal[1]
    source: Annotated[str, Length(most=500)]
    constants: dict[str, Annotated[float, Bounds(ge=0, lt=1e20)]]
    terms: Annotated[tuple[_TermFile, ...], Length(most=len(_NAMES))]
    covariance: tuple[tuple[Number, ...], ...]
    iteration_error: Annotated[float, Bounds(ge=0, le=10)]
    num_iterations: Count
    num_parts: Count

    def __post_init__(self) -> None:
        unknown = sorted((set(self.constants) | {term.name for term in self.terms}) - _NAMES)
        if unknown:
            raise ConfigError(f"constants: {unknown[0]}: unknown constant; remove it")
        size = len(self.terms)
        if len(self.covariance) != size or any(len(row) != size for row in self.covariance):
            raise ConfigError(f"covariance: must have {size} rows and columns, one a term")


def write_calibration(calibration: Calibration, *, path: Path, source: str) -> None:
    """Write the file, whole or not at all; `source` says in words what was measured."""
    content: dict[str, Any] = {
        "schema_version": 1,
        "source": source[:500],
        "constants": asdict(calibration.constants),
        "terms": [asdict(term) for term in calibration.terms],
        "covariance": calibration.covariance.tolist(),
        "iteration_error": calibration.iteration_error,
        "num_iterations": calibration.num_iterations,
        "num_parts": calibration.num_parts,
    }
    write_json_atomic(path, content)


def read_calibration(path: Path) -> Calibration:
    """The calibration in `path`. Raises ConfigError in one line: the field, the value and the rule."""
    file = read_record(_File, path)
    missing = sorted(_REQUIRED - set(file.constants))
    if missing:
        raise ConfigError(f"{path}: constants.{missing[0]}: missing; the key is required")
    return Calibration(
        constants=ClusterConstants(**file.constants),
        terms=tuple(Term(**asdict(term)) for term in file.terms),
        covariance=np.array(file.covariance, dtype=np.float64).reshape(len(file.terms), len(file.terms)),
        iteration_error=file.iteration_error,
        num_iterations=file.num_iterations,
        num_parts=file.num_parts,
    )
