"""Pages in a real browser: headless Chromium, what it built of them and what its console said."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ADVICE = "run `bash tools/system_packages.sh`, which installs what the tests need"
_CONSOLE = re.compile(r":CONSOLE[:(]")
_DARK = "--blink-settings=preferredColorScheme=0"
_LEAST_WINDOW = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A page after it was loaded: its document as markup, and every line on the console."""

    document: str
    console: tuple[str, ...]


def open_page(path: Path, *, dark: bool = False) -> Opened:
    """Load a page without network."""
    words = ["--dump-dom", "--enable-logging=stderr", "--v=0", *([_DARK] if dark else [])]
    done = _chromium(*words, path=path)
    return Opened(
        document=done.stdout,
        console=tuple(line for line in done.stderr.splitlines() if _CONSOLE.search(line)),
    )


# What a browser makes of a page in a window of a given width. A window of headless Chromium has 500 pixels at
# least, a frame may have fewer; the frame's page keeps its own policy, and is dark where the window is. The
# ground of a drawing's letters is the last shape before them that has them inside, else the page's.
_MEASURE = """
<!DOCTYPE html><meta charset="utf-8"><style>:root {{ color-scheme: light dark }}</style>
<iframe id="frame" style="border: 0; width: {width}px; height: 4000px"
 srcdoc="{page}"></iframe><pre id="measured"></pre><script>
const frame = document.getElementById("frame");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const found = {{texts: [], columns: [], scrolled: [], cells: [], letters: []}};
  found.page_width = page.documentElement.scrollWidth;
  for (const text of page.querySelectorAll("svg text")) {{
    if (!text.getClientRects().length) continue;
    const turn = text.getScreenCTM();
    const size = parseFloat(view.getComputedStyle(text).fontSize) * Math.hypot(turn.a, turn.b);
    found.texts.push([text.textContent, size, text.closest("svg").getAttribute("aria-label")]);
  }}
  const none = "rgba(0, 0, 0, 0)", style = (part) => view.getComputedStyle(part);
  const words = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {{
    const holder = words.currentNode.parentElement, drawn = holder.closest("svg");
    if (!words.currentNode.data.trim() || !holder.getClientRects().length || holder.tagName == "title")
      continue;
    let ground = null;
    if (drawn) {{
      const box = holder.getBBox(), at = new DOMPoint(box.x + box.width / 2, box.y + box.height / 2);
      for (const shape of drawn.querySelectorAll("path, rect, circle")) {{
        const before = shape.compareDocumentPosition(holder) & Node.DOCUMENT_POSITION_FOLLOWING;
        if (before && style(shape).fill != "none" && shape.isPointInFill(at)) ground = style(shape).fill;
      }}
    }}
    for (let part = holder; !ground && part; part = part.parentElement)
      if (style(part).backgroundColor != none) ground = style(part).backgroundColor;
    const colour = drawn ? style(holder).fill : style(holder).color;
    found.letters.push([words.currentNode.data.trim(), colour, ground]);
  }}
  for (const head of page.querySelectorAll("th")) {{
    const box = head.getBoundingClientRect();
    found.columns.push([head.textContent, box.left, box.right]);
  }}
  for (const cell of page.querySelectorAll("td")) {{
    const lines = new Set(), texts = page.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {{
      const range = page.createRange();
      range.selectNodeContents(texts.currentNode);
      for (const box of range.getClientRects()) lines.add(Math.round(box.bottom));
    }}
    const table = cell.closest("[aria-label]").getAttribute("aria-label");
    found.cells.push([cell.textContent, lines.size, table]);
  }}
  for (const part of page.querySelectorAll("main *")) {{
    const moves = ["auto", "scroll"].includes(view.getComputedStyle(part).overflowX);
    if (moves && part.scrollWidth > part.clientWidth)
      found.scrolled.push([
        part.getAttribute("aria-label"), part.tabIndex, view.getComputedStyle(part).backgroundAttachment,
      ]);
  }}
  document.getElementById("measured").textContent = JSON.stringify(found);
}};
</script>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Pixels of a page: its width, the size of each text in its charts, with the chart, and columns' ends.

    `scrolled` are the names of the parts that are moved sideways, with their places in a keyboard's order and
    what their backgrounds are attached to: `local` to the content, `scroll` to the edges. `cells` are the
    words of tables' cells with the number of their lines and the table. `letters` are all visible words with
    their colour and the ground's, as `rgb(R, G, B)`.
    """

    page_width: float
    texts: tuple[tuple[str, float, str], ...]
    columns: tuple[tuple[str, float, float], ...]
    scrolled: tuple[tuple[str, int, str], ...]
    cells: tuple[tuple[str, int, str], ...]
    letters: tuple[tuple[str, str, str], ...]


def measure_page(markup: str, *, width: int, folder: Path, dark: bool = False) -> Measured:
    """The sizes and colours of a page in a window of `width` pixels."""
    wrapper = folder / f"measure-{width}.html"
    wrapper.write_text(_MEASURE.format(width=width, page=escape(markup)), encoding="utf-8")
    document = open_page(wrapper, dark=dark).document
    content = re.search(r'<pre id="measured">(.*?)</pre>', document, re.DOTALL)
    assert content is not None
    assert content[1], "the page was not measured"
    found = json.loads(unescape(content[1]))
    return Measured(
        page_width=found["page_width"],
        texts=tuple(map(tuple, found["texts"])),
        columns=tuple(map(tuple, found["columns"])),
        scrolled=tuple(map(tuple, found["scrolled"])),
        cells=tuple(map(tuple, found["cells"])),
        letters=tuple(map(tuple, found["letters"])),
    )


# A window of headless Chromium has 500 pixels at least: a narrower page is drawn in a frame.
_FRAMED = """
<!DOCTYPE html><meta charset="utf-8"><style>:root {{ color-scheme: light dark }} body {{ margin: 0 }}</style>
<iframe style="border: 0; display: block; width: {width}px; height: {height}px" srcdoc="{page}"></iframe>
"""


def pictures_folder(otherwise: Path) -> Path:
    """The folder that QUARTET_TEST_PICTURES names, made if need be; without it `otherwise`."""
    folder = Path(os.environ.get("QUARTET_TEST_PICTURES") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def picture(path: Path, *, to: Path, width: int = 1200, height: int = 4000, dark: bool = False) -> None:
    """Draw a page; what a window has at the right of one that is narrow stays empty."""
    if width < _LEAST_WINDOW:
        framed = to.with_suffix(".html")
        markup = escape(path.read_text(encoding="utf-8"))
        framed.write_text(_FRAMED.format(width=width, height=height, page=markup), encoding="utf-8")
        picture(framed, to=to, width=_LEAST_WINDOW, height=height, dark=dark)
        framed.unlink()
        return
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
