"""Small drawing functions for SVG inside a page: elements, escaped text, scales with round ticks, axes.

Colours are classes of the page's style, so that a drawing follows light, dark and print. Coordinates are
pixels of the drawing's own box, y downwards.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from quartet_plugin.protocol.masking import masked

Attribute = str | float | int | None


def element(name: str, *content: str, **attributes: Attribute) -> str:
    """One element. `content` is markup already; attributes are escaped, None leaves one out.

    `cls` stands for class and `_` for `-`.
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            label = "class" if key == "cls" else key.rstrip("_").replace("_", "-")
            words.append(f'{label}="{escape(number(value) if isinstance(value, float) else str(value))}"')
    inner = "".join(content)
    return f"<{' '.join(words)}>{inner}</{name}>" if inner else f"<{' '.join(words)}/>"


def number(value: float) -> str:
    """A coordinate with two digits and no needless zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"


def text(
    x: float, y: float, words: str, *, cls: str = "", anchor: str = "start", rotate: float | None = None
) -> str:
    """Text that nothing in it can leave; `anchor` is start, middle or end."""
    turn = None if rotate is None else f"rotate({number(rotate)} {number(x)} {number(y)})"
    return element(
        "text", escape(masked(words)), x=x, y=y, cls=cls or None, text_anchor=anchor, transform=turn
    )


def title(words: str) -> str:
    """The words that are shown while a pointer is over the element."""
    return element("title", escape(masked(words)))


def drawing(width: float, height: float, *parts: str, label: str) -> str:
    """The drawing; `label` describes it for screen readers."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def rectangles(boxes: Sequence[tuple[float, float, float, float]]) -> str:
    """The path of many boxes (x, y, width, height) in one: one element however many there are."""
    return "".join(f"M{number(x)} {number(y)}h{number(w)}v{number(h)}h{number(-w)}z" for x, y, w, h in boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From values between `low` and `high` to pixels between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @classmethod
    def over(
        cls,
        values: Sequence[float],
        *,
        start: float,
        end: float,
        margin: float = 0.06,
        include: Sequence[float] = (),
        is_log: bool = False,
    ) -> "Scale":
        """A scale that holds all finite `values` and `include`, with a margin on both sides."""
        finite = [value for value in (*values, *include) if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(finite), max(finite)
        if is_log and low > 0:
            factor = max(high / low, 1.05) ** margin
            return cls(low=low / factor, high=high * factor, start=start, end=end, is_log=True)
        span = (high - low) or abs(high) or 1.0
        return cls(low=low - margin * span, high=high + margin * span, start=start, end=end)

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside the axis are clamped to its ends."""
        if self.is_log:
            part = math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + min(max(part, 0.0), 1.0) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the scale."""
        if self.is_log:
            ticks = _log_ticks(self.low, self.high)
            if len(ticks) >= 2:
                return ticks
        step = _round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(index * step, 12) for index in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) <= 12 else (1,)
    values = (factor * 10.0**power for power in powers for factor in factors)
    return [value for value in values if low <= value <= high]


def short(value: float) -> str:
    """A tick's words."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def x_axis(scale: Scale, y: float, *, top: float, words: str, unit: str = "", count: int = 6) -> str:
    """Ticks below `y` with faint lines up to `top`, and what the axis shows."""
    parts = []
    for tick in scale.ticks(count):
        x = scale(tick)
        parts.append(element("line", x1=x, x2=x, y1=top, y2=y, cls="grid"))
        parts.append(text(x, y + 16, f"{short(tick)}{unit}", cls="tick", anchor="middle"))
    parts.append(text((scale.start + scale.end) / 2, y + 34, words, cls="axis", anchor="middle"))
    return "".join(parts)


def y_axis(scale: Scale, x: float, *, right: float, words: str, unit: str = "") -> str:
    """Ticks left of `x` with faint lines to `right`, and what the axis shows."""
    parts = []
    for tick in scale.ticks():
        y = scale(tick)
        parts.append(element("line", x1=x, x2=right, y1=y, y2=y, cls="grid"))
        parts.append(text(x - 8, y + 4, f"{short(tick)}{unit}", cls="tick", anchor="end"))
    middle = (scale.start + scale.end) / 2
    parts.append(text(x - 50, middle, words, cls="axis", anchor="middle", rotate=-90))
    return "".join(parts)
