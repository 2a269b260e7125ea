"""What the documents claim: figures that stand twice, what code decides, commands that can be run here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from quartet_plugin.cli.main import main
from quartet_plugin.space.knobs.registry import KNOBS
from quartet_plugin.tuner.config import parse_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# A page, a pattern of its figures, and the pattern of the same figures in docs/benchmarks.md.
SAME = (
    (
        "cost-model.md",
        r"force-balanced \| (\d+) \| mean ([\d.]+) %, median ([\d.]+) %",
        r"\| (\d+) published configurations of experts[^|]*\| ([\d.]+) %, ([\d.]+) %",
    ),
    (
        "cost-model.md",
        r"dense, in low precision \| (\d+) \| mean ([\d.]+) %, median ([\d.]+) %",
        r"\| (\d+) dense ones in low precision[^|]*\| ([\d.]+) %, ([\d.]+) %",
    ),
    (
        "search.md",
        r"all as fast as the baseline \| ([\d.]+) % \| ([\d.]+) ",
        r"like the baseline \| ([\d.]+) % after ([\d.]+) launches",
    ),
    (
        "search.md",
        r"all faster by 1\.1 \| ([\d.]+) % \| ([\d.]+) ",
        r"all are faster by 1\.1 \| ([\d.]+) % after ([\d.]+) launches",
    ),
    (
        "search.md",
        r"iterations inside each: ([\d.]+) against ([\d.]+) %",
        r"iterations inside of them \| ([\d.]+) % against ([\d.]+) %",
    ),
    (
        "clusters.md",
        r"behind shaped links were ([\d.]+) % off in the mean",
        r"8 processes from 4: mean; largest \| ([\d.]+) %",
    ),
    (
        "schedules.md",
        r"5/8 \| V-Half [\d.]+ \| [\d.]+ \| ([\d.]+) ",
        r"at tight caps: most; V-Half's cap \| [\d.]+; ([\d.]+) ",
    ),
    (
        "schedules.md",
        r"16 and 32 the ratio is at most ([\d.]+)\. ",
        r"at tight caps: most; V-Half's cap \| ([\d.]+);",
    ),
    (
        "cost-model.md",
        r"Core: (\d+) rows, mean ([\d.]+), median ([\d.]+)\.",
        r"\| (\d+) published runs.*?\| ([\d.]+) %, ([\d.]+) %",
    ),
    (
        "cost-model.md",
        r"memory, nothing fitted, is ([\d.]+) % for zero-bubble runs, ([\d.]+) %",
        r"5\.7 %; ([\d.]+) %, ([\d.]+) %",
    ),
    (
        "search-cost.md",
        r"two CPU cores \| 74 \| (\d+) \(1 to 1\) \| (\d+) ",
        r"best of 74 plans, against TPE \| (\d+) against (\d+) ",
    ),
    (
        "search-cost.md",
        r"data_parallel: 1`\) \| 72 \| (\d+) \([^|]*\| ([\d.]+) ",
        r"with a pipeline \| (\d+) against ([\d.]+)",
    ),
    (
        "search-cost.md",
        r"two devices \| 112 \| (\d+) \([^|]*\| (\d+) ",
        r"space of 112 plans \| (\d+) against (\d+) ",
    ),
    ("faults.md", r"baseline ([\d.]+) % ended with a winner", r"like the baseline \| ([\d.]+) % after"),
)


def text_of(name: str) -> str:
    """A page with its lines joined."""
    return " ".join((DOCS / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "here", "there"), SAME, ids=[f"{row[0]}-{at}" for at, row in enumerate(SAME)]
)
def test_a_figure_that_stands_twice_is_one_figure(page: str, here: str, there: str) -> None:
    found, measured = re.search(here, text_of(page)), re.search(there, text_of("benchmarks.md"))
    assert found is not None
    assert measured is not None
    assert found.groups() == measured.groups()


def tables_of(page: Path) -> list[list[list[str]]]:
    """The cells of every row of every table, its header first."""
    tables: list[list[list[str]]] = [[]]
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            tables.append([])
        elif not re.fullmatch(r"[-:| ]+", line):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in tables if table]


def test_every_row_of_figures_has_the_day_of_its_measurement() -> None:
    figure, undated = re.compile(r"\d\.\d|\d %|\d s\b|\d of \d"), []
    for header, *rows in tables_of(DOCS / "benchmarks.md"):
        at = header.index("date") if "date" in header else None
        for row in rows:
            day = "" if at is None else row[at]
            if any(map(figure.search, row)) and not re.fullmatch(r"20\d\d-[01]\d-[0-3]\d", day):
                undated.append(row)
    assert undated == []


def test_what_a_command_leaves_to_be_filled_in_is_said() -> None:
    page = DOCS / "benchmarks.md"
    prose = " ".join(
        line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")
    )
    commands = [
        row[header.index("command")]
        for header, *rows in tables_of(page)
        if "command" in header
        for row in rows
    ]
    left_open = {
        word for command in commands for word in re.findall(r"\b[A-Z]{2,}(?:\.json)?(?=[` ])", command)
    }
    assert left_open >= {"DATA.json", "RUN"}
    assert {word for word in left_open if f"`{word}`" not in prose} == set()


def test_the_waiting_beside_the_readmes_pictures_is_that_of_their_costs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"(\d+) % of device time is waiting \| ZB-V, one of the schedules tried: (\d+) %", text)
    assert shown is not None
    waiting = []
    for name in ("1f1b", "zb-v"):
        path = tmp_path / f"{name}.json"
        assert main(["schedule", "named", name, str(DOCS / "img" / "costs.json"), "-o", str(path)]) == 0
        waiting.append(json.loads(path.read_text(encoding="utf-8"))["predicted"]["bubble_fraction"])
    assert [f"{100 * part:.0f}" for part in waiting] == list(shown.groups())


def test_what_a_search_keeps_unless_it_is_asked() -> None:
    page = (DOCS / "support.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| B \| [^|]* \| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)
    assert ("TP, DP, micro-batch", "by default") in rows
    assert all(search == "by default" or search.startswith("where `search` asks") for _, search in rows)
    listed = re.search(r"unless `search` asks for it: (.*?)\.", text_of("support.md"))
    assert listed is not None
    kept = {knob.name for knob in KNOBS if knob.default == "stock" and knob.change_class != "D"}
    assert set(re.findall(r"`(\w+)`", listed[1])) == kept


# What the documents call the knobs whose default is the command's own value, besides their names.
WORDS_OF_KEPT = {
    "shape": ("width and depth",),
    "context_parallel": ("context parallel",),
    "distributed_optimizer": ("distributed optimizer", "optimizer's settings", "options"),
    "sequence_parallel": ("sequence parallel",),
    "tensor_partition": ("tensor partition", "matrix products"),
    "moe_token_dispatcher": ("token dispatcher",),
    "overlap_grad_reduce": ("overlap of gradient", "overlaps"),
    "overlap_param_gather": ("overlap of parameter",),
    "ddp_bucket_size": ("bucket size of DDP",),
}
SEARCHED = re.compile(
    r"\b(?:search|searches|tuner|it|quartet_plugin) (?:also )?(?:covers|chooses|tunes|varies|tries)\b"
    r"|\b(?:is|are) (?:searched|tuned)\b|\bby default\b|\ball (?:native )?axes are there\b",
    re.IGNORECASE,
)
ASKED = re.compile(
    r"\b(?:only|unless|if|asks?|asked|names?|named|scaling|where|default stock|with (?:the key|a))\b"
)


def claims_that_a_kept_knob_is_searched(text: str) -> list[str]:
    """The sentences and rows that say so of a knob whose default is stock, without a condition."""
    names = [knob.name for knob in KNOBS if knob.default == "stock"]
    words = [word for name in names for word in (f"`{name}`", *WORDS_OF_KEPT.get(name, ()))]
    kept = re.compile(rf"\brecompute\b|{'|'.join(map(re.escape, words))}", re.IGNORECASE)
    text = re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text)
    said = [part for block in blocks for part in re.split(r"(?<=[.]) ", " ".join(block.split()))]
    return [part for part in said if kept.search(part) and SEARCHED.search(part) and not ASKED.search(part)]


def test_no_page_says_that_a_search_covers_what_it_keeps() -> None:
    assert WORDS_OF_KEPT.keys() <= {knob.name for knob in KNOBS if knob.default == "stock"}
    claims = {
        str(path.relative_to(ROOT)): claims
        for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
        if (claims := claims_that_a_kept_knob_is_searched(path.read_text(encoding="utf-8")))
    }
    assert claims == {}


@pytest.mark.parametrize(
    "wrong",
    [
        "The search covers everything: split, micro-batch, recompute and the optimizer's settings.",
        "All native axes are there: split, mapping, recompute, options.",
        "Layouts are searched, with `sequence_parallel`.",
    ],
)
def test_a_wrong_claim_is_seen(wrong: str) -> None:
    assert claims_that_a_kept_knob_is_searched(f"A page.\n\n- {wrong} An end.") != []


def test_the_list_of_schedules_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "list"]) == 0
    rows = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    page = {line.strip() for line in (DOCS / "schedules.md").read_text(encoding="utf-8").splitlines()}
    assert [row for row in rows if row.strip() not in page] == []


@pytest.mark.parametrize("page", ["tutorial.md", "how-to/experts.md"])
def test_the_configurations_of_a_page_are_read(page: str) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        parse_config(yaml.safe_load(block), where=page)


def test_every_program_of_the_benchmarks_is_there() -> None:
    text = text_of("benchmarks.md")
    modules = re.findall(r"`python -m benchmarks\.(\w+)", text)
    files = [
        *re.findall(r"`python (benchmarks/\w+\.py)", text),
        *re.findall(r"pytest (tests/[\w/]+\.py)", text),
    ]
    assert len(modules) + len(files) > 15
    places = [ROOT / "benchmarks" / name for name in modules]
    assert [place for place in places if not (place.is_dir() or place.with_suffix(".py").is_file())] == []
    assert [name for name in files if not (ROOT / name).is_file()] == []


# What README says of the times of its commands, by the first cell of the row in docs/benchmarks.md.
FROM_NOTHING = {
    "the disk space of `.venv`": r"into `\.venv`, which takes (about \d+ GB)",
    "the demo, installation included": r"the demo takes (\d+ to \d+ minutes), installation included",
    "the tests of every change, after the demo": r"and the tests (\d+ to \d+ minutes) more",
    "the package with Megatron, in another environment": r"\[megatron\]' +# ([\d.]+ minutes)",
    "the package with DeepSpeed, in another environment": r"`\[deepspeed\]` takes ([\d.]+ minutes)",
}


def rows_below(heading: str, page: str = "benchmarks.md") -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell."""
    _, _, text = (DOCS / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    table = re.search(r"(?:^\|.*\n)+", text.partition("\n## ")[0], re.MULTILINE)
    rows = re.findall(r"^\| (.*) \|$", table[0] if table else "", re.MULTILINE)
    return {cells[0]: cells[1:] for row in rows if (cells := row.split(" | "))}


def test_the_times_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    rows = rows_below("From nothing")
    assert rows.keys() - {"what"} == FROM_NOTHING.keys()
    for name, pattern in FROM_NOTHING.items():
        assert re.findall(pattern, readme) == [rows[name][0]], name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", rows[name][1]), name
    contributing = text_of("contributing/index.md")
    tests = rows["the tests of every change, after the demo"][0]
    assert re.findall(r"runs the fast tests: (\d+ to \d+ minutes)", contributing) == [tests]


def test_the_speedups_of_the_readme_are_those_of_the_benchmarks() -> None:
    """A row of the README: a job and its name, the speedups over the best stock plan and the defaults."""
    rows = rows_below("What tuning wins")
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it wins\n")[2]
    shown = re.findall(r"^\| .*: (`[\w-]+`) \| (.*) \| (.*) \|$", text.partition("\n## ")[0], re.MULTILINE)
    assert len(shown) == 3
    assert "| job | winner over best stock | over the defaults |" in text
    assert (rows["job"][0], rows["job"][2]) == ("over best stock", "over the defaults")
    assert [(name, rows[name][0], rows[name][2]) for name, *_ in shown] == shown


def test_the_readme_installs_the_wheel_of_this_version() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"pip install 'dist/quartet_plugin-{version}-py3-none-any.whl[megatron]'" in readme


def test_every_target_that_is_not_run_with_every_change_has_its_last_result() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (names,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    run = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    short = {"check", "clean", "reference", "system-packages"}
    targets = {f"`make {name}`" for name in set(names.split()) - set(run) - short}
    rows = rows_below("Longer runs")
    assert rows.keys() - {"target"} == targets
    assert all(re.fullmatch(r"—|\d{4}-\d\d-\d\d", rows[name][0]) and rows[name][1] for name in targets)
