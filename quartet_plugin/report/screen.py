"""Where a command shows how far it is: a live screen on a terminal, a line an event elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from quartet_plugin.protocol.terminal import terminal_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


def has_screen(console: "Console") -> bool:
    """Whether a console is a terminal that can be drawn anew."""
    return console.is_terminal and not console.is_dumb_terminal


def print_line(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class Lines:
    """One line an event: for logs and pipes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def __enter__(self) -> Self:
        """Enter the block; lines need no preparation."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the block; lines need no cleaning up."""

    def message(self, text: str) -> None:
        """Write `text` as a line of its own."""
        self._write(terminal_line(text))


class Screen(ABC):
    """A live display, redrawn `refresh_per_second` times a second while its block runs."""

    refresh_per_second = 4

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Show the display until the end of the block."""
        from rich.live import Live

        self._live = Live(
            get_renderable=self.render, console=self._console, refresh_per_second=self.refresh_per_second
        )
        self._live.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the last content on the screen."""
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def message(self, text: str) -> None:
        """Print a line above the display."""
        from rich.text import Text

        self._console.print(Text(terminal_line(text)))

    @abstractmethod
    def render(self) -> "RenderableType":
        """The display's current content."""
