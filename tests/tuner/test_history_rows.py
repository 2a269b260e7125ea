"""What a run's folder and events say of its trials, its proposals and its final rounds."""

import shutil
from pathlib import Path

from quartet_plugin.model.files import read_json, write_json_atomic
from quartet_plugin.tuner.history import read_history
from quartet_plugin.tuner.history_rows import limits_of

GOLDEN = Path(__file__).parents[1] / "golden" / "run_0.1.0"


def test_a_finalist_that_failed_in_a_later_round_is_left_out(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "r"))
    assert 6 in [finalist.number for finalist in read_history(run).finalists]
    path = run / "final" / "000006-round-4" / "attempt-1" / "result.json"
    write_json_atomic(path, {**read_json(path), "outcome": "INFEASIBLE", "iteration_s": []})
    assert 6 not in [finalist.number for finalist in read_history(run).finalists]


def test_the_limits_of_the_latest_proposal_that_has_some() -> None:
    earlier = {"kind": "proposed", "cut_off": ["mappings: of 8 slots the named orders"]}
    later = {"kind": "proposed", "cut_off": ["custom schedules: of 3 layouts", 7]}
    assert limits_of([]) == ()
    assert limits_of([earlier, later, {"kind": "proposed"}, {"kind": "told"}]) == (
        "custom schedules: of 3 layouts",
    )
