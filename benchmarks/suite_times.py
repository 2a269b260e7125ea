"""Seconds of tests by file, of runs that kept their times, and what share of them some files take.

    PYTEST_ADDOPTS=--junitxml=fast.xml make test
    PYTEST_ADDOPTS=--junitxml=slow.xml make test-slow
    python -m benchmarks.suite_times fast.xml slow.xml --top 20
    python -m benchmarks.suite_times fast.xml slow.xml --of documents

Processes share the cores, so the sum is larger than the seconds that a run takes.
"""

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# The checks of documents, messages, the report's page and the packages: how their tests' modules begin.
GROUPS = {
    "documents": (
        "tests.cli.test_completion",
        "tests.cli.test_output",
        "tests.report.test_contrast",
        "tests.report.test_live",
        "tests.report.test_page",
        "tests.test_claims",
        "tests.test_contributing",
        "tests.test_docstrings",
        "tests.test_documented_commands",
        "tests.test_documents",
        "tests.test_installed_wheel",
        "tests.test_names",
        "tests.test_packaging",
        "tests.test_reference_pages",
    )
}


def seconds_by_file(reports: Iterable[Path]) -> dict[str, float]:
    """Seconds of each test module in JUnit's XML files, the longest first."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[case.get("classname", "")] += float(case.get("time", "0"))
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--top", type=int, default=10, help="files to list")
    parser.add_argument("--of", choices=sorted(GROUPS), help="list the files of a group alone")
    options = parser.parse_args(arguments)
    seconds = seconds_by_file(options.reports)
    whole = sum(seconds.values())
    if options.of is not None:
        seconds = {name: value for name, value in seconds.items() if name.startswith(GROUPS[options.of])}
    for name, value in list(seconds.items())[: None if options.of else options.top]:
        print(f"{value:8.1f} s  {name}")
    total = sum(seconds.values())
    print(f"{total:8.1f} s of {whole:.1f} s: {100 * total / whole:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
