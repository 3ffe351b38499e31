"""A text of one line or of many, without credentials: the keys that go over lines, then line by line."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tiercheck.redaction.names import is_secret_name, without_named
from tiercheck.redaction.shapes import GONE, without_keys, without_shapes

LONGEST_LINE = 4096
"""Characters of a line that are kept."""
_SHORTEST_KNOWN = 6
_ENTRY = re.compile(r"[\s-]*[\"']?name[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9_.-]{1,128})[\"']?\s*,?\s*\Z")
_MAPPING = re.compile(r"\s*(?:[-{\[]|[^\s:]+\s*:(?:\s|\Z)|#)")
_ITS_VALUE = re.compile(r"(\s*[\"']?value[\"']?\s*[:=]\s*).*\Z", re.DOTALL)


def redacted(text: str, known: Iterable[str] = ()) -> str:
    """`text` with REDACTED in place of what is, or looks like, a credential; lines of more than `LONGEST_LINE` are cut.

    `known`: credentials that are to be taken out wherever they stand.
    """
    for value in sorted({entry for entry in known if len(entry) >= _SHORTEST_KNOWN}, key=len, reverse=True):
        text = text.replace(value, GONE)
    lines = []
    goes_on, below, named = "", 0, False
    """Whether lines that are indented by more than `below` belong to a secret value; whether a name was that of a secret."""
    for whole in without_keys(text).split("\n"):
        line = _cut(whole)
        indent = len(line) - len(line.lstrip())
        if goes_on == "block" and (not line.strip() or indent > below):
            lines.append(line[:indent] + GONE if line.strip() else line)
            continue
        if goes_on == "line" and indent > below and not _MAPPING.match(line):
            line = line[:indent] + GONE
        if named and (found := _ITS_VALUE.match(line)):
            line = found[1] + GONE
        entry = _ENTRY.match(line)
        named = entry is not None and is_secret_name(entry[1])
        line, goes_on = without_named(without_shapes(line))
        below = indent
        lines.append(line)
    return "\n".join(lines)


def _cut(line: str) -> str:
    """A word at the end that was cut in two would not be known for what it is, so it goes as a whole."""
    if len(line) <= LONGEST_LINE:
        return line
    kept = 1 + max(line.rfind(mark, 0, LONGEST_LINE - 40) for mark in " \t,;\"'")
    return f"{line[:kept]}... {len(line) - kept} more characters"
