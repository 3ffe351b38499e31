"""What all pictures have in common: matplotlib draws them, and the same content gives the same file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import Any

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tiercheck",
    "text.parse_math": False,  # a name with dollars in it is a name
    "font.size": 10.0,
}


@contextmanager
def new_figure(width: float, height: float, layout: Any = "constrained") -> Iterator[Any]:
    """A sheet of that many inches, to be drawn on and written within the `with`."""
    # Imported here: it takes half a second, and most commands draw nothing.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        yield Figure(figsize=(width, height), layout=layout)


def svg_of(figure: Any, description: str) -> str:
    """The element alone, for a page; `description` is for those who cannot see it."""
    sink = StringIO()
    figure.savefig(
        sink, format="svg", facecolor="white", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    content = sink.getvalue()
    return f'<svg role="img" aria-label="{escape(description)}"{content[content.index("<svg") + 4 :]}'


def remove_frame(axes: Any, grid: str) -> None:
    """Leaves the lower and left edge, and pale lines across `grid` ("x" or "y")."""
    axes.grid(axis=grid, color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
