"""The file of what a search may have missed."""

from pathlib import Path
from typing import Any

import pytest

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.files import write_json_atomic
from quartet_plugin.model.measurement import Interval, Regret, read_regret
from quartet_plugin.model.schema import dump, write_record

REGRET = Regret(
    gain=Interval(median=0.01, low=0.0, high=0.06),
    notable=0.3,
    likely="pp2 mb2, 6+2, zb-h1",
    likely_chance=0.25,
    num_untried=160,
    num_measured=13,
    source="measured trials",
)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "regret.json"
    write_record(REGRET, path=path)
    assert read_regret(path) == REGRET


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"notable": 1.5}, "notable"),
        ({"gain": {"median": 0.1, "low": 0.2, "high": 0.3}}, "0 <= low <= median <= high"),
        ({"gain": {"median": -0.1, "low": -0.2, "high": 0.3}}, "0 <= low <= median <= high"),
        ({"source": "a guess"}, "source"),
        ({"other": 1}, "other"),
        ({"num_untried": -1}, "num_untried"),
    ],
)
def test_what_breaks_the_format_is_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = tmp_path / "regret.json"
    write_json_atomic(path, {**dump(REGRET), **change})
    with pytest.raises(ConfigError, match=r"regret\.json") as caught:
        read_regret(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "regret.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="a JSON object; this is a list"):
        read_regret(path)
