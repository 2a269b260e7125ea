"""docs/knobs.md has every knob as its descriptor says it."""

from pathlib import Path

from quartet_plugin.space.knobs.registry import KNOBS

DOCUMENT = Path(__file__).parents[3] / "docs" / "knobs.md"


def test_the_document_has_every_knob_as_its_descriptor_says_it() -> None:
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split())
    for knob in KNOBS:
        assert f"- `{knob.name}` (class {knob.change_class}, default {knob.default}" in text
        assert f"{knob.description}. *Legal:* {knob.rule}" in text
