"""YAML that people write: short, plain, and read in a moment whatever it holds."""

from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BeforeValidator, Field, model_validator

from quartet_plugin.errors import ConfigError
from quartet_plugin.model.sections import MAX_CONFIG_BYTES, Section, load_yaml, validate


def load(folder: Path, text: str) -> object:
    path = folder / "q.yaml"
    path.write_text(text, encoding="utf-8")
    return load_yaml(path)


def test_a_short_file_is_read(tmp_path: Path) -> None:
    assert load(tmp_path, "a: {b: [1, 2.5, x]}\n") == {"a": {"b": [1, 2.5, "x"]}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "# " + "x" * MAX_CONFIG_BYTES,
            f"longer than {MAX_CONFIG_BYTES} bytes; a large cluster goes into a file",
        ),
        (f"a: [{'0,' * 200_000}0]", "about 200001 values; must be at most 100000"),
        ("- 0\n" * 60_000, "values; must be at most 100000; a large cluster goes into a file"),
        ("[" * 110_000, "values; must be at most 100000"),
        ("[" * 5_000, "not YAML that is safe to read"),
        ("{a: 1, b: 2, a: 3}", "'a' appears twice"),
        ("a: &x [1]\nb: *x\n", "aliases are not read"),
        ("? [1, 2]\n: 3\n", "not YAML that is safe to read"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_not_short_and_plain_is_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "q.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ConfigError, match="longer than"):
        load_yaml(path)


def test_a_cluster_of_4096_nodes_is_read(tmp_path: Path) -> None:
    node = "    - {name: node0001, device: H100-80GB-SXM, devices: 8, nvlink_domain: 1234}\n"
    text = "cluster:\n  nodes:\n" + node * 4096
    assert len(text) > 1 << 18
    assert str(load(tmp_path, text)).count("node0001") == 4096


class Inner(Section):
    """A section with required keys."""

    hidden_size: int
    num_layers: int = Field(ge=1)


class Outer(Section):
    """Values that may have several forms."""

    inner: Inner | None = None
    measure: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    crop: Literal["auto", "none"] | Annotated[int, Field(ge=1)] = "auto"
    degrees: Annotated[tuple[int, ...] | None, BeforeValidator(lambda value: (value,))] = None

    @model_validator(mode="after")
    def _is_cropped(self) -> "Outer":
        if self.crop == 7:
            raise ValueError("7 is no number of layers")
        return self


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"inner": {"hidden_sze": 8, "num_layers": 1}},
            "inner.hidden_sze: 8: unknown key; did you mean hidden_size? (and 1 more)",
        ),
        ({"inner": {"hidden_size": 8}}, "inner.num_layers: missing; the key is required"),
        ({"measure": 0}, "measure: 0: should be 'auto', or should be greater than or equal to 1"),
        (
            {"measure": "atuo"},
            "measure: 'atuo': should be 'auto', or should be a valid integer; did you mean auto?",
        ),
        ({"crop": "x"}, "crop: 'x': should be 'auto' or 'none', or should be a valid integer"),
        ({"degrees": "Auto"}, "degrees: 'Auto': should be a valid integer; did you mean auto?"),
        ({"crop": 7}, "the file: {'crop': 7}: 7 is no number of layers"),
        ({"inner": 3}, "inner: 3: must be a section, with keys of its own"),
        (
            {"crop": 0, "measure": 0},
            "measure: 0: should be 'auto', or should be greater than or equal to 1 (and 1 more)",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fault_names_the_key_that_was_written_and_the_nearest_word(data: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Outer, data, where="q.yaml")
    assert str(caught.value) == f"q.yaml: {line}"
