"""Pages in a real browser: headless Chromium, what it built of them and what its console said."""

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ADVICE = "run `bash tools/system_packages.sh`, which installs what the tests need"
_CONSOLE = re.compile(r":CONSOLE[:(]")
_DARK = "--blink-settings=preferredColorScheme=0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A page after it was loaded: its document as markup, and every line on the console."""

    document: str
    console: tuple[str, ...]


def open_page(path: Path) -> Opened:
    """Load a page without network."""
    done = _chromium("--dump-dom", "--enable-logging=stderr", "--v=0", path=path)
    return Opened(
        document=done.stdout,
        console=tuple(line for line in done.stderr.splitlines() if _CONSOLE.search(line)),
    )


def picture(path: Path, *, to: Path, width: int = 1200, height: int = 4000, dark: bool = False) -> None:
    """Draw a page."""
    words = [f"--screenshot={to}", f"--window-size={width},{height}", "--hide-scrollbars"]
    _chromium(*words, *([_DARK] if dark else []), path=path)


def print_page(path: Path, *, to: Path) -> None:
    """Print a page as PDF."""
    _chromium(f"--print-to-pdf={to}", "--no-pdf-header-footer", path=path)


def _chromium(*words: str, path: Path) -> "subprocess.CompletedProcess[str]":
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, f"no Chromium is installed: {ADVICE}"
    with tempfile.TemporaryDirectory(prefix="quartet-chromium-", ignore_cleanup_errors=True) as profile:
        argv = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            *words,
            path.absolute().as_uri(),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done
