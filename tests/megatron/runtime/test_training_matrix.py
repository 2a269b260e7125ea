"""The table of docs/gpu.md from the states of the trainings."""

from tools.training_matrix import BEGIN, DOCUMENT, END, cases_of, table

FILE = "tests/megatron/runtime/test_training.py"
STATES = {
    f"{FILE}::test_core[zb-h1 pp2 uneven]": "PASSED",
    f"{FILE}::test_core[zb-v pp2 tied]": "",
    f"{FILE}::test_groups_as_strict_as_nccl[interleaved pp4]": "FAILED",
    f"{FILE}::test_long_matrix[zb-h1 pp4 engine]": "PASSED",
}


def test_cases_are_counted_by_layers_and_groups() -> None:
    lines = table(STATES, days=["2026-01-02"]).splitlines()
    assert lines[0] == "Made on 2026-01-02 by `make training-matrix`."
    assert lines[4:] == [
        "| Megatron's local | as strict as NCCL | 1 | 0 | 1 | 0 |",
        "| Megatron's local | gloo | 2 | 1 | 0 | 1 |",
        "| Transformer Engine's, as a stand-in | gloo | 1 | 1 | 0 | 0 |",
        "",
        "Failed: interleaved pp4 (as strict as NCCL).",
    ]


def test_the_table_names_the_first_and_the_last_day() -> None:
    lines = table(STATES, days=["2026-01-03", "2026-01-02", "2026-01-03"]).splitlines()
    assert lines[0] == "Made on 2026-01-02 to 2026-01-03 by `make training-matrix`."


def test_a_test_without_a_case_is_none() -> None:
    assert cases_of([*STATES, f"{FILE}::test_layers_of_the_engine_are_profiled"]) == list(STATES)


def test_the_document_has_the_marks() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert 0 < text.index(BEGIN) < text.index(END)
