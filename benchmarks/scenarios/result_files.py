"""The result files of the scenarios: one a search, one a launch in turns; the table is made of them alone.

results/SCENARIO/ours-SEED.json, stock-SEED.json, without-AXIS-SEED.json   a search: `SearchRun`
results/SCENARIO/turns.json   their plans in turns: `TurnRounds`
"""

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quartet_plugin.model.files import read_json, write_json_atomic

RESULTS = Path(__file__).with_name("results")
ROOT = Path(__file__).resolve().parents[2]
# What a search and its launches depend on beside the catalogue, whose rows a commit may add.
SEARCH_FILES = (
    "quartet_plugin",
    "patches",
    "benchmarks/scenarios/script.py",
    "benchmarks/scenarios/turns.py",
)
# A commit, and a later one that counts as having the same search although these files differ:
SAME_SEARCHES = {
    # The stock searches of the rows are of the first three commits. The plugin's searches and launches of the
    # fourth are those of all rows but c-slow-link and j-experts-slow-link, whose ranks are in several network
    # namespaces: these are of the last. No commit between them changed what plain TPE may choose for these
    # jobs, nor what the plugin's search proposes where namespaces are hosts.
    "3fda55926859": "19ac5ba5a634",
    "e42a71ebee38": "19ac5ba5a634",
    "921cbc236fe0": "19ac5ba5a634",
    "b3671774df68": "19ac5ba5a634",
}
TURNS = "turns.json"
CHANGED = " with changes"
OURS, STOCK, WITHOUT = "ours", "stock", "without"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One search of a scenario to its end.

    `side` is ours, stock, or without-AXIS. `trials` have number, plan in words, verdict, outcome and reason
    as the study has them, the seconds of the measured iterations, and the peak of memory. `chosen` is the
    content of the plan's file, None for the default. `note` says why the baseline is another than the
    default.
    """

    scenario: str
    side: str
    seed: int
    commit: str
    machine: str
    num_trials: int
    trials: tuple[Mapping[str, Any], ...]
    chosen: Mapping[str, Any] | None
    chosen_words: str
    note: str = ""

    @property
    def name(self) -> str:
        """The name of the side in a launch in turns, and of the file."""
        return f"{self.side}-{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRounds:
    """Relative speeds (work a second) of every side in every round of a scenario's launches in turns."""

    scenario: str
    commit: str
    machine: str
    num_launches: int
    rounds: tuple[Mapping[str, float], ...]


def commit_of(root: Path) -> str:
    """The commit of the working tree; marked where files differ from it. Results themselves do not count."""
    git = ("git", "-C", str(root))
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    changes = subprocess.run(
        [*git, "status", "--porcelain", "--", ".", ":!benchmarks/scenarios/results"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return head.strip()[:12] + (CHANGED if changes.strip() else "")


def has_same_search(first: str, second: str, *, root: Path = ROOT) -> bool:
    """Whether two commits, as `commit_of` writes them, differ in no file that a search depends on.

    False where a tree had changes or git does not know a commit, unless both are written alike. A commit of
    SAME_SEARCHES counts as the later one.
    """
    first, second = (SAME_SEARCHES.get(one, one) for one in (first, second))
    if first == second:
        return True
    if first.endswith(CHANGED) or second.endswith(CHANGED):
        return False
    words = ["git", "-C", str(root), "diff", "--quiet", first, second, "--", *SEARCH_FILES]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def machine_words(num_cores: int) -> str:
    """The machine without its name."""
    return f"{num_cores} cores, {platform.machine()}, {platform.system()}"


def write_result(result: SearchRun | TurnRounds, *, folder: Path = RESULTS) -> Path:
    """Write a result file; its path."""
    name = TURNS if isinstance(result, TurnRounds) else f"{result.name}.json"
    path = folder / result.scenario / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, json.loads(json.dumps({"schema_version": 1, **asdict(result)})))
    return path


def read_runs(scenario: str, *, folder: Path = RESULTS) -> Iterator[SearchRun]:
    """The searches of a scenario, by file name."""
    for path in sorted((folder / scenario).glob("*.json")):
        if path.name != TURNS:
            yield SearchRun(**_fields(path))


def read_turns(scenario: str, *, folder: Path = RESULTS) -> TurnRounds | None:
    """The launches in turns of a scenario; None where there were none."""
    path = folder / scenario / TURNS
    return TurnRounds(**_fields(path)) if path.exists() else None


def _fields(path: Path) -> dict[str, Any]:
    content = dict(read_json(path))
    content.pop("schema_version", None)
    return content
