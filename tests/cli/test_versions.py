"""Row 44: libraries outside of the range that a release was written for."""

from importlib import metadata
from pathlib import Path

import pytest

from quartet_plugin.cli import versions
from quartet_plugin.cli.main import main
from quartet_plugin.errors import ExitCode, SeamError

DECLARED = ["optuna<6,>=5.0", "pydantic<3,>=2.9", 'torch>=2.11; extra == "megatron"', "rich>=13"]


def check(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "requires", lambda name: DECLARED)
    monkeypatch.setattr(versions, "version", version)
    versions.check_versions()


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        ({"optuna": "4.2.0"}, "optuna 4.2.0: not supported, must be <6,>=5.0"),
        ({"optuna": "6.0.0"}, "optuna 6.0.0"),
        ({"optuna": "5.1", "pydantic": "1.10.2"}, "pydantic 1.10.2"),
        ({"torch": "2.4.1"}, "torch 2.4.1: not supported, must be >=2.11"),
    ],
)
def test_a_library_out_of_range_is_named_with_the_range(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], says: str
) -> None:
    with pytest.raises(SeamError) as caught:
        check(monkeypatch, **installed)
    assert says in str(caught.value)
    assert "pip install" in str(caught.value)
    assert caught.value.exit_code is ExitCode.UNSUPPORTED


@pytest.mark.parametrize(
    "installed",
    [{}, {"optuna": "5.0.0", "pydantic": "2.12"}, {"torch": "2.12.0a0+nv25.9"}, {"rich": "1.0"}],
)
def test_what_is_in_range_or_absent_is_taken(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]
) -> None:
    check(monkeypatch, **installed)


def test_what_is_installed_here_is_in_range_and_declared() -> None:
    versions.check_versions()
    declared = " ".join(metadata.requires(versions.DISTRIBUTION) or [])
    for name in versions.CHECKED:
        assert name in declared


def test_tune_refuses_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        versions, "version", lambda name: "4.9" if name == "optuna" else metadata.version(name)
    )
    assert main(["tune", "--run-dir", str(tmp_path / "runs"), "--", "torchrun", "x.py"]) == 4
    assert "optuna 4.9: not supported" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
