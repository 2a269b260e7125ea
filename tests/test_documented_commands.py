"""The commands of the documents are run, or docs/index.md says why they are not.

A page's commands are run in its order, in this process and in a folder that has a recorded run. A search is
run with --dry-run, so that nothing is started.
"""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from quartet_plugin.cli.main import main
from tests.test_documents import DOCUMENTS, ROOT

GOLDEN = ROOT / "tests" / "golden"
HEADING = "## Commands that are not run"
FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --global-batch-size 16 --vocab-size 512"
)
# The pages whose commands are run; of the first in code and in sentences, of the others in code alone.
IN_SENTENCES = "docs/how-to/explain-a-result.md"
PAGES = (
    IN_SENTENCES,
    "README.md",
    "docs/deepspeed.md",
    "docs/how-to/bridge.md",
    "docs/how-to/experts.md",
    "docs/how-to/megatron-script.md",
    "docs/how-to/plan-without-a-gpu.md",
    "docs/how-to/schedule-by-hand.md",
    "docs/index.md",
    "docs/knobs.md",
    "docs/partitions.md",
    "docs/schedules.md",
    "docs/search.md",
    "docs/support.md",
    "docs/tutorial.md",
)
# What a page's train.py imports; without an entry it is a script of Megatron's.
IMPORTS = {
    "docs/deepspeed.md": "import deepspeed\n",
    "docs/how-to/bridge.md": "from megatron.bridge.training.pretrain import pretrain\n",
    "docs/support.md": "from megatron.bridge.training.pretrain import pretrain\n",
}
# Shorter than on the page.
SHORTER = {"--time-limit 10": "--time-limit 1"}


def commands_of(page: str) -> list[str]:
    """The `quartet` commands of a page's code, without remarks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    said = re.findall(r"`(quartet [a-z][^`]*)`", text) if page == IN_SENTENCES else []
    said += re.findall(r"^(?: {4,})?(quartet [^\n]*)", text, re.MULTILINE)
    return [re.sub(r"\s{2,}#.*", "", command) for command in said]


def reasons() -> tuple[dict[str, str], dict[str, str]]:
    """The tables of docs/index.md: why commands are not run, by their first words; and why pages are not."""
    text = (
        (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Commands that are not run")[2]
    )
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    commands = {name: why for names, why in rows for name in re.findall(r"`quartet ([^`]+)`", names)}
    pages = {f"docs/{name}": why for names, why in rows for name in re.findall(r"\]\(([^)]+)\)", names)}
    return commands, pages


def is_run(command: str) -> bool:
    """Whether a command of a page in `PAGES` is run: it has no options in brackets, and no reason."""
    words = command.removeprefix("quartet ")
    has_reason = any(re.match(rf"{re.escape(name)}(?![\w-])", words) for name in reasons()[0])
    return not has_reason and re.search(r"[\[|]", command) is None


def words_of(command: str) -> list[str]:
    """The words behind `quartet`, the page's placeholders replaced."""
    command = re.sub(r"\.{3} (pretrain_gpt\.py)(?: ARGS\.{3})?", r"--nproc-per-node 2 \1 ARGS...", command)
    command = command.replace("ARGS...", FLAGS).replace("PLAN ", "plan.json ")
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = shlex.split(command)[1:]
    words = ["runs/NAME" if word in ("RUN", "NAME") and "--recipe" not in words else word for word in words]
    return [*words[:1], "--dry-run", *words[1:]] if words[0] == "tune" and "--dry-run" not in words else words


def write_files(page: str, folder: Path) -> None:
    """What a page's commands read: its own blocks of code that have a name, scripts and a recorded run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in ("NAME", "my-model", "demo"):
        shutil.copytree(GOLDEN / "run_0.1.0", folder / "runs" / name)
    shutil.copy(ROOT / "docs" / "img" / "costs.json", folder / "costs.json")
    shutil.copytree(ROOT / "docs" / "img", folder / "docs" / "img")
    plan = "plan_deepspeed.json" if page == "docs/deepspeed.md" else "plan.json"
    shutil.copy(GOLDEN / plan, folder / "plan.json")
    shutil.copy(ROOT / "examples" / "pretrain_gpt.py", folder)
    (folder / "scripts" / "training").mkdir(parents=True)
    for script in ("train.py", "scripts/training/run_recipe.py"):
        (folder / script).write_text(IMPORTS.get(page, ""), encoding="utf-8")
    (folder / "ds.json").write_text('{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}')
    (folder / "q.yaml").write_text("run: an-example\n", encoding="utf-8")
    for name, block in re.findall(r"`(\w+\.(?:json|yaml))`[^`]*?:\n\n```\w+\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(block, encoding="utf-8")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    write_files(page, tmp_path)
    run = [words_of(command) for command in dict.fromkeys(commands_of(page)) if is_run(command)]
    assert run
    for words in run:
        assert main(words) == 0, (words, capsys.readouterr().err)


def test_every_page_with_a_command_is_run_or_has_a_reason() -> None:
    pages = {str(path.relative_to(ROOT)) for path in DOCUMENTS if commands_of(str(path.relative_to(ROOT)))}
    excused = reasons()[1].keys()
    assert pages - excused == set(PAGES)
    assert excused <= pages, "a reason for a page that has no command"


def test_a_reason_is_of_a_command_that_a_page_has_and_names_tests_that_exist() -> None:
    commands, pages = reasons()
    said = [command for page in PAGES for command in commands_of(page)]
    unused = [name for name in commands if not any(text.startswith(f"quartet {name}") for text in said)]
    named = [
        name for why in (*commands.values(), *pages.values()) for name in re.findall(r"`(tests/[^`]+)`", why)
    ]
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert unused == []
