"""Draws the three tiers of the README.

python docs/images/tiers.py > docs/images/tiers.svg
"""

from __future__ import annotations

TIERS = (
    ("own memory", "tier local", ("every step",), "survives a crash", "#dbeafe"),
    (
        "memory of peers",
        "tier peer",
        ("every step,", "in other racks or zones"),
        "survives a lost node or rack",
        "#dcfce7",
    ),
    (
        "object store",
        "tier remote",
        ("every few hundred steps,", "S3 or a shared directory"),
        "survives the loss of everything",
        "#fef3c7",
    ),
)
WIDTH, HEIGHT, BOX, GAP, TOP = 880, 216, 232, 74, 18


def text(
    x: float, y: float, words: str, size: int = 14, *, weight: str = "normal", colour: str = "#1f2937"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{words}</text>'


def box(left: float, tier: tuple[str, str, tuple[str, ...], str, str]) -> list[str]:
    """A tier: what it is, what it holds, and below it what it survives."""
    name, field, holds, survives, colour = tier
    middle = left + BOX / 2
    frame = (
        f'<rect x="{left:g}" y="{TOP}" width="{BOX}" height="130" rx="10" fill="{colour}" stroke="#6b7280"/>'
    )
    lines = [text(middle, TOP + 80 + 20 * number, line) for number, line in enumerate(holds)]
    return [
        frame,
        text(middle, TOP + 32, name, 18, weight="bold"),
        text(middle, TOP + 54, field, 13, colour="#4b5563"),
        *lines,
        text(middle, TOP + 158, survives, weight="bold"),
    ]


def arrow(left: float) -> list[str]:
    """From where a restore looks first to where it looks next."""
    y, right = TOP + 65, left + GAP - 8
    path = f'd="M {left + 6:g} {y} H {right:g}" stroke="#374151" stroke-width="2"'
    line = f'<path {path} marker-end="url(#head)"/>'
    return [line, text(left + GAP / 2, y - 10, "else", 13)]


def drawing() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        ' font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#374151"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    left = (WIDTH - 3 * BOX - 2 * GAP) / 2
    for number, tier in enumerate(TIERS):
        parts += box(left, tier)
        if number < len(TIERS) - 1:
            parts += arrow(left + BOX)
        left += BOX + GAP
    restored = "After a failure each rank takes the nearest complete copy, and every byte is verified."
    parts += [text(WIDTH / 2, HEIGHT - 14, restored, 13, colour="#4b5563"), "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(drawing(), end="")
