"""The matrix of docs/support.md: rows of releases that have run, each with its day."""

from tools.support_matrix import BEGIN, END, rows_of, update

DOCUMENT = f"# Support\n\n{BEGIN}\nNot made yet.\n{END}\n\nmore\n"
STATE = {"split": "works", "degrees": "works", "custom_schedules": "kept", "date": "2026-01-02"}


def test_a_row_is_written_between_the_marks() -> None:
    text = update(DOCUMENT, {"0.17.1": STATE})
    assert "| 0.17.1 | works | works | - | - | kept | 2026-01-02 |" in text
    assert "Not made yet" not in text
    assert text.startswith("# Support\n")
    assert text.endswith(f"{END}\n\nmore\n")


def test_a_release_that_has_run_again_replaces_its_row_and_others_stay() -> None:
    text = update(DOCUMENT, {"0.17.1": STATE, "0.18.2": STATE})
    text = update(text, {"0.18.2": {**STATE, "date": "2026-03-04"}})
    rows = rows_of(text)
    assert [rows[name][-1] for name in ("0.17.1", "0.18.2")] == ["2026-01-02", "2026-03-04"]
    assert len(rows) == 2
