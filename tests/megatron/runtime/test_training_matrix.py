"""The table of docs/gpu.md from pytest's logs, with and without workers, of runs that were ended early."""

from tools.training_matrix import BEGIN, DOCUMENT, END, cases_of, states_of, table

FILE = "tests/megatron/runtime/test_training.py"
CASES = f"""
{FILE}::test_core[zb-h1 pp2 uneven]
{FILE}::test_core[zb-v pp2 tied]
{FILE}::test_groups_as_strict_as_nccl[interleaved pp4]
{FILE}::test_long_matrix[zb-h1 pp4 engine]
{FILE}::test_layers_of_the_engine_are_profiled
"""
LOG = f"""
{FILE}::test_core[zb-h1 pp2 uneven] PASSED [ 25%]
[gw1] [ 50%] FAILED {FILE}::test_groups_as_strict_as_nccl[interleaved pp4]
[gw0] [ 75%] PASSED {FILE}::test_long_matrix[zb-h1 pp4 engine]
{FILE}::test_core[zb-v pp2 tied]
"""
NEXT = f"{FILE}::test_groups_as_strict_as_nccl[interleaved pp4] PASSED [100%]"


def test_cases_are_counted_by_layers_and_groups() -> None:
    lines = table(states_of(cases_of(CASES), [LOG]), days=["2026-01-02"]).splitlines()
    assert lines[0] == "Made on 2026-01-02 by `make training-matrix`."
    assert lines[4:] == [
        "| Megatron's local | as strict as NCCL | 1 | 0 | 1 | 0 |",
        "| Megatron's local | gloo | 2 | 1 | 0 | 1 |",
        "| Transformer Engine's, as a stand-in | gloo | 1 | 1 | 0 | 0 |",
        "",
        "Failed: interleaved pp4 (as strict as NCCL).",
    ]


def test_a_run_goes_on_with_what_has_not_passed() -> None:
    cases = cases_of(CASES)
    before, after = states_of(cases, [LOG]), states_of(cases, [LOG, NEXT])
    left = [words.split("::")[1] for case, words in cases.items() if before[case] != "PASSED"]
    assert left == ["test_core[zb-v pp2 tied]", "test_groups_as_strict_as_nccl[interleaved pp4]"]
    assert [case for case in cases if after[case] != "PASSED"] == [("gloo", "zb-v pp2 tied")]
    lines = table(after, days=["2026-01-03", "2026-01-02", "2026-01-03"]).splitlines()
    assert lines[0] == "Made on 2026-01-02 to 2026-01-03 by `make training-matrix`."
    assert lines[-1].endswith("| 1 | 1 | 0 | 0 |")


def test_the_document_has_the_marks() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert 0 < text.index(BEGIN) < text.index(END)
