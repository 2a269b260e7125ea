"""docs/knobs.md has every knob as its descriptor says it."""

from pathlib import Path

from quartet_plugin.space.knobs.registry import KNOBS

DOCUMENT = Path(__file__).parents[3] / "docs" / "knobs.md"


def rows() -> list[str]:
    """The table's rows, from the descriptors."""
    return [
        f"| `{knob.name}` | {knob.meaning} | {knob.change_class} | {knob.default} "
        f"| {', '.join(f'`{name}`' for name in (knob.flag, knob.ds_key) if name) or '-'} | {knob.rule} |"
        for knob in KNOBS
    ]


def test_the_document_has_every_knob_as_its_descriptor_says_it() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("| `")] == rows()
