"""The q.yaml that `quartet init` writes: every key, explained, legal as it stands and line by line."""

from pathlib import Path

import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.model.sections import Section
from quartet_plugin.space.config import FamilyConfig, ScalingConfig
from quartet_plugin.tuner.config import TuneConfig, parse_config, read_config
from quartet_plugin.tuner.config_template import config_text


def sections() -> list[type[Section]]:
    nested = [type(known.default) for known in TuneConfig.model_fields.values()]
    return [TuneConfig, ScalingConfig, FamilyConfig, *(kind for kind in nested if issubclass(kind, Section))]


def test_every_key_is_explained() -> None:
    for kind in sections():
        assert all(known.description for known in kind.model_fields.values()), kind


def test_as_it_stands_it_asks_for_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "q.yaml"
    assert main(["init", str(path)]) == 0
    assert read_config(path) == TuneConfig()
    assert all(len(line) <= 140 for line in path.read_text().splitlines())


def test_what_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "q.yaml"
    path.write_text("run: mine\n")
    assert main(["init", str(path)]) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert path.read_text() == "run: mine\n"


def test_with_every_comment_taken_away_it_is_read() -> None:
    """Only the keys whose default is nothing then say something: the name, the files and the shapes."""
    lines = config_text().partition("\n\n")[2].splitlines()
    data = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines))
    search = data["search"]
    assert set(data) == set(TuneConfig.model_fields)
    assert set(search["scaling"]) == set(ScalingConfig.model_fields)
    assert set(search["schedule_family"]) == set(FamilyConfig.model_fields)
    changed = {
        "run": None,
        "machine": {},
        "site": None,
        "nodes": None,
        "search": {**search, "scaling": None},
    }
    plain = {name: changed.get(name, value) for name, value in data.items()}
    del plain["run"], plain["search"]["scaling"], plain["search"]["schedule_family"]
    assert parse_config(plain, where="q") == TuneConfig()
    assert parse_config(data, where="q").search.scaling == ScalingConfig()
    assert parse_config(data, where="q").search.schedule_family == FamilyConfig()
