"""A placement as a picture: domains on a circle, and a curve from each worker to whoever keeps its copies, in its domain's colour."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tiercheck_cli.failure import CannotDo
from tiercheck_cli.layout import Layout
from tiercheck_cli.plan.links import Links, links
from tiercheck_cli.plan.screen import colour
from tiercheck_cli.report.words import plural

_SIZE, _CENTRE, _RADIUS = 860.0, 430.0, 290.0
_GAP = 0.035
"""Radians between two domains, at most."""
_DOTS = 400
"""Workers, up to which each is drawn."""
_LABELS = 64
_RED = "#c24e00"


def draw(path: Path, layout: Layout) -> None:
    """SVG, or a page with it, by the name's end. Raises CannotDo."""
    content = svg(layout)
    if path.suffix in (".html", ".htm"):
        title = escape(f"{layout.name}: who keeps whose copies")
        content = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f'<body style="margin:0 auto;max-width:900px">{content}</body></html>\n'
        )
    elif path.suffix != ".svg":
        raise CannotDo(f"{path} must end with .svg or .html", 2)
    try:
        path.write_text(content)
    except OSError as error:
        raise CannotDo(f"{path} cannot be written: {error.strerror}") from error


def svg(layout: Layout) -> str:
    """The same for the same placement."""
    drawn = links(layout)
    spots = _spots(drawn)
    placement = layout.placement
    survives = "; ".join(placement.tolerates)
    head = f"{layout.name}: {plural(len(layout.sites), 'worker')} in {plural(len(drawn.domains), drawn.level)}"
    foot = f"survives the loss of {survives}" if survives else "survives no loss of a pod"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE:.0f} {_SIZE:.0f}" role="img" '
        f'aria-label="{escape(head)}; {escape(foot)}" font-family="system-ui, sans-serif">',
        f'<rect width="{_SIZE:.0f}" height="{_SIZE:.0f}" fill="#ffffff"/>',
        _text(24, 38, head, 20, weight=650),
        _text(24, 62, foot, 14, fill="#0a7a52" if survives else _RED),
        *(_chords(drawn, spots) if len(spots) <= _DOTS else _bundles(drawn, spots)),
        *_rim(drawn, spots),
    ]
    if placement.unprotected and (any(placement.holders) or placement.groups):
        parts.append(
            _text(24, 84, f"{plural(len(placement.unprotected), 'worker')} unprotected (ringed)", 14, fill=_RED)
        )
    what = "block of its group" if drawn.group else "copy"
    parts.append(
        _text(
            24,
            _SIZE - 20,
            f"a curve leads from a worker to each keeper of its {what}; colours are its {drawn.level}",
            12,
            fill="#5d646d",
        )
    )
    return "".join([*parts, "</svg>\n"])


def _spots(drawn: Links) -> dict[int, float]:
    """By worker: the angle, domain after domain."""
    gap = min(_GAP, math.pi / max(1, len(drawn.domains)))
    workers = sum(len(domain.workers) for domain in drawn.domains)
    unit = (2 * math.pi - gap * len(drawn.domains)) / workers
    angle, found = -math.pi / 2, {}
    for domain in drawn.domains:
        for worker in domain.workers:
            found[worker] = angle + unit / 2
            angle += unit
        angle += gap
    return found


def _chords(drawn: Links, spots: dict[int, float]) -> list[str]:
    where = drawn.domain_of
    strength = 0.75 if len(spots) <= 64 else 0.4
    return [
        _curve(spots[owner], spots[keeper], colour(where[owner]), 1.6 if len(spots) <= 64 else 1.0, strength)
        for owner, kept in drawn.keepers.items()
        for keeper in kept
    ]


def _bundles(drawn: Links, spots: dict[int, float]) -> list[str]:
    counts = drawn.between()
    most = max(counts.values(), default=1)
    middle = [_mean([spots[worker] for worker in domain.workers]) for domain in drawn.domains]
    return [
        _curve(middle[owner], middle[keeper], colour(owner) if owner != keeper else _RED, 0.6 + 5 * count / most, 0.55)
        for (owner, keeper), count in sorted(counts.items())
    ]


def _rim(drawn: Links, spots: dict[int, float]) -> list[str]:
    parts = []
    every = -(-len(drawn.domains) // _LABELS)
    for index, domain in enumerate(drawn.domains):
        angles = [spots[worker] for worker in domain.workers]
        parts.append(_arc(angles[0] - 0.006, angles[-1] + 0.006, _RADIUS + 16, colour(index)))
        if index % every == 0:
            name = (
                domain.name
                if not domain.parent or len({d.name for d in drawn.domains}) == len(drawn.domains)
                else f"{domain.parent}/{domain.name}"
            )
            parts.append(_label(_mean(angles), _RADIUS + 30, name))
        if len(spots) <= _DOTS:
            for worker in domain.workers:
                x, y = _at(spots[worker], _RADIUS)
                size = 6.0 if len(spots) <= 64 else 2.5
                ring = f' stroke="{_RED}" stroke-width="3"' if worker in drawn.unprotected else ""
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour(index)}"{ring}><title>worker {worker}</title></circle>'
                )
                if len(spots) <= 64:
                    x, y = _at(spots[worker], _RADIUS - 17)
                    parts.append(
                        f'<text x="{x:.1f}" y="{y + 4:.1f}" font-size="11" text-anchor="middle" fill="#1c1f23">{worker}</text>'
                    )
    return parts


def _curve(start: float, end: float, stroke: str, width: float, opacity: float) -> str:
    x1, y1 = _at(start, _RADIUS - 8)
    x2, y2 = _at(end, _RADIUS - 8)
    return (
        f'<path d="M{x1:.1f} {y1:.1f} Q{_CENTRE:.0f} {_CENTRE:.0f} {x2:.1f} {y2:.1f}" fill="none" stroke="{stroke}" '
        f'stroke-width="{width:.1f}" stroke-opacity="{opacity}"/>'
    )


def _arc(start: float, end: float, radius: float, stroke: str) -> str:
    x1, y1 = _at(start, radius)
    x2, y2 = _at(end, radius)
    large = int(end - start > math.pi)
    return f'<path d="M{x1:.1f} {y1:.1f} A{radius:.0f} {radius:.0f} 0 {large} 1 {x2:.1f} {y2:.1f}" fill="none" stroke="{stroke}" stroke-width="7"/>'


def _label(angle: float, radius: float, content: str) -> str:
    x, y = _at(angle, radius)
    anchor = "middle" if abs(math.cos(angle)) < 0.2 else "start" if math.cos(angle) > 0 else "end"
    return _text(x, y + 4 + 6 * math.sin(angle), content, 12, anchor=anchor)


def _text(
    x: float, y: float, content: str, size: int, *, anchor: str = "start", fill: str = "#1c1f23", weight: int = 400
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def _at(angle: float, radius: float) -> tuple[float, float]:
    return _CENTRE + radius * math.cos(angle), _CENTRE + 15 + radius * math.sin(angle)


def _mean(angles: Sequence[float]) -> float:
    return (angles[0] + angles[-1]) / 2
