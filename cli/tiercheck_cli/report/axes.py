"""Plain SVG axes: scales with round ticks, and text that takes its colour from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] onto pixels from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        return self.begin + (value - self.low) / ((self.high - self.low) or 1.0) * (self.end - self.begin)

    def ticks(self, wanted: int = 6) -> list[float]:
        """Round values within the scale, about `wanted` of them."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        magnitude = 10.0 ** math.floor(math.log10(span / wanted))
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if span / (factor * magnitude) <= wanted)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's label: 0.5, 20, 1,500."""
    return f"{value:,.0f}" if abs(value - round(value)) < 1e-9 else f"{value:,.4g}"


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "tick") -> str:
    """A line of text of the page's class `kind`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(content)}</text>'


def line(points: Sequence[tuple[float, float]], across: Scale, up: Scale, kind: str, style: str = "") -> str:
    """A curve of the page's class `kind`; empty without points."""
    if not points:
        return ""
    path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}" style="{style}"/>'


def frame(across: Scale, up: Scale, across_label: str, up_label: str) -> str:
    """Grid, ticks and the names of both axes."""
    parts = []
    for value in up.ticks(5):
        y = up(value)
        parts.append(f'<line x1="{across.begin:.1f}" x2="{across.end:.1f}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(text(across.begin - 8, y + 4, number(value), "end"))
    for value in across.ticks(8):
        parts.append(text(across(value), up.begin + 18, number(value), "middle"))
    base = f'x1="{across.begin:.1f}" x2="{across.end:.1f}" y1="{up.begin:.1f}" y2="{up.begin:.1f}"'
    parts.append(f'<line {base} class="axis"/>')
    parts.append(text((across.begin + across.end) / 2, up.begin + 38, across_label, "middle", "label"))
    parts.append(text(across.begin, up.end - 22, up_label, "start", "label"))
    return "".join(parts)


def badge(x: float, y: float, content: str) -> str:
    """A small filled circle with a number in it: a fault's mark."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" class="badge"/>'
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" class="badge-text">{escape(content)}</text>'
    )


def picture(width: float, height: float, content: str, description: str) -> str:
    """An SVG that scales with the page; `description` is for those who cannot see it."""
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(description)}" '
        f'xmlns="http://www.w3.org/2000/svg">{content}</svg>'
    )
