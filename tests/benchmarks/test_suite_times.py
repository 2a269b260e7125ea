"""The seconds of tests by file, from JUnit's XML files."""

from pathlib import Path

import pytest

from benchmarks import suite_times

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_names" name="a" time="1.5"/>
<testcase classname="tests.test_names" name="b" time="0.5"/>
<testcase classname="tests.cost.test_memory" name="c" time="6"/>
</testsuite></testsuites>"""


def test_files_are_summed_and_a_group_has_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "fast.xml"
    report.write_text(REPORT)
    assert list(suite_times.seconds_by_file([report, report])) == [
        "tests.cost.test_memory",
        "tests.test_names",
    ]
    assert suite_times.main([str(report), "--of", "documents"]) == 0
    assert capsys.readouterr().out.split("\n")[:2] == [
        "     2.0 s  tests.test_names",
        "     2.0 s of 8.0 s: 25.0 %",
    ]


def test_every_module_of_a_group_is_there() -> None:
    root = Path(suite_times.__file__).parents[1]
    for begin in suite_times.GROUPS["documents"]:
        folder, _, name = begin.rpartition(".")
        assert list((root / folder.replace(".", "/")).glob(f"{name}*.py"))
