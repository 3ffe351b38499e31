"""Takes credentials out of a text: keys that go over lines first, then line by line.

Rules look at the text as somebody reads it too: without colours, with escapes of ordinary characters
resolved. So none of them needs to know of colours, of wide letters or of `%70`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from tiercheck.redaction.names import FENCES, is_secret_name, without_named
from tiercheck.redaction.shapes import GONE, without_keys, without_shapes

_UNUSUAL = re.compile(r"[^\t\n\r -~]|\\(?:x1b|u001b|033|e)|\^\[", re.IGNORECASE)
_ESCAPE = r"(?:\x1b|\\(?i:x1b|u001b)|\\033|\\e|\^\[)"
_COLOUR = re.compile(rf"(?:{_ESCAPE}\[|\x9b)[0-?]{{0,64}}[ -/]{{0,8}}[@-~]")
_LINK = re.compile(rf"{_ESCAPE}\]\d{{0,4}};?(?:[\w=:.-]{{0,64}};)?|\x07|\x1b\\")
"""The marks around an address or a title: those are text too."""
_STRUCK_OVER = re.compile(r"[^\n\x08]\x08")
_ESCAPED = re.compile(
    r"%(?P<percent>[2-7][0-9A-Fa-f])|(?<!\\)\\{1,16}(?:u00|x|U000000)(?P<code>[2-7][0-9A-Fa-f])"
    r"|&#(?:[xX]0{0,4}(?P<hex>[2-7][0-9A-Fa-f])|0{0,4}(?P<decimal>\d{2,3}));|&(?P<name>quot|apos|amp|lt|gt);"
)
_NAMED = {"quot": '"', "apos": "'", "amp": "&", "lt": "<", "gt": ">"}


def make_visible(text: str) -> str:
    """With as many lines as before."""
    if _UNUSUAL.search(text) is None:
        return text
    text = _STRUCK_OVER.sub("", _LINK.sub(" ", _COLOUR.sub("", text)))
    return text.translate({ord(each): _ordinary(each) for each in set(text) if not " " <= each <= "~"})


def unescape_once(line: str) -> str:
    """One layer of escapes less."""
    return _ESCAPED.sub(_resolved, line)


def _ordinary(character: str) -> str:
    """Letter by letter: to normalise a whole text is not linear in its length."""
    if character in "\t\n\r":
        return character
    kind = unicodedata.category(character)
    if kind in ("Cc", "Cf", "Mn", "Me"):
        return ""
    return " " if kind == "Zs" else unicodedata.normalize("NFKC", character)


def _resolved(found: re.Match[str]) -> str:
    if found["name"]:
        return _NAMED[found["name"]]
    code = (
        int(found["decimal"])
        if found["decimal"]
        else int(found["percent"] or found["code"] or found["hex"], 16)
    )
    return chr(code) if 32 <= code < 127 else found[0]


LONGEST_LINE = 4096
"""Characters of a line that are kept."""
_SHORTEST_KNOWN = 6
_LAYERS = 3
_ENTRY = re.compile(
    r"[\s-]*[\"']?name[\"']?\s*[:=]\s*[\"']?([A-Za-z0-9_.-]{1,128})[\"']?\s*,?\s*\Z|\[\[?\s*([A-Za-z0-9_.-]{1,128})\s*\]\]?\s*\Z"
)
_PREFIX = re.compile(
    r"\d{4}-\d\d-\d\d[T ][\d:.,+Z-]{6,36} (?:(?:stdout|stderr) (?P<part>[FP]) "
    r")?|\[[a-z]*\d[\d,]*\](?:<[a-z]+>)?: ?|[<>] "
)
"""What writers of logs, torchrun, mpirun and curl put before each line."""
_ALONE = re.compile(r"\s*(?P<quote>[\"']).*(?P=quote)[,;)\]}\s]*\Z")
_BEGINS_WITH_VALUE = re.compile(r"(\s*(?:[:=]|=>)\s*)(?=\S)")
_QUOTES = ('"', "'")
_SECRET_OBJECT = re.compile(
    r"(?m)(?:^|[\s{,])\\*[\"']?kind\\*[\"']?\s{0,4}:\s{0,4}\\*[\"']?Secret\b(?![ \t]*[\w.])"
)
_DATA = re.compile(r"[\s\"'-]*(?:data|stringData)[\"']?\s*:\s*\{?\s*\Z")
_DATA_INLINE = re.compile(r"(\\*[\"']?(?:data|stringData)\\*[\"']?\s{0,4}:\s{0,4}\{)[^{}]+")
_KEYED = re.compile(r"\s*[\"']?[A-Za-z0-9_.-]+[\"']?\s*:\s*")
_MAPPING = re.compile(r"\s*(?:[-{\[]|[^\s:]+\s*:(?:\s|\Z)|#)")
_ITS_VALUE = re.compile(r"(\s*[\"']?value[\"']?\s*[:=]\s*).*\Z", re.DOTALL)


def redacted(text: str, known: Iterable[str] = ()) -> str:
    """`text` with REDACTED in place of what is, or looks like, a credential; lines of more than
    `LONGEST_LINE` are cut.

    `known`: credentials that are to be taken out wherever they stand.
    """
    held = sorted({entry for entry in known if len(entry) >= _SHORTEST_KNOWN}, key=len, reverse=True)
    text = _without(text, held)
    seen = make_visible(text)
    shown = _lines(_without(seen, held) if seen is not text else seen)
    if seen is text:
        return "\n".join(shown)
    before, after = text.split("\n"), seen.split("\n")
    if len(shown) != len(before):  # a key over lines
        return "\n".join(shown)
    # Where nothing was found, a line keeps its colours.
    kept = (_clean(_cut(a))[0] if b == c else c for a, b, c in zip(before, after, shown, strict=True))
    return "\n".join(kept)


def _without(text: str, held: list[str]) -> str:
    for value in held:
        text = text.replace(value, GONE)
    return text


def _lines(text: str) -> list[str]:
    """Line by line, with what goes on over lines."""
    lines: list[str] = []
    goes_on, below, named, partly = "", 0, False, False
    """How the value of a secret name goes on in lines that are indented by more than `below`; whether a name
    was that of a secret; whether the writer of the log broke a line here."""
    a_secret = _SECRET_OBJECT.search(text) is not None
    every = without_keys(text).split("\n")
    for number, whole in enumerate(every):
        line = _cut(whole)
        prefix = _PREFIX.match(line)
        begin = prefix[0] if prefix else ""
        line = line[len(begin) :]
        indent = len(line) - len(line.lstrip())
        if goes_on in FENCES or goes_on in _QUOTES:
            inside, mark, rest = line.partition(goes_on)
            goes_on = goes_on if not mark else ""
            lines.append(begin + (GONE if inside.strip() else inside) + mark + rest)
            continue
        if goes_on in ("block", "map") and (not line.strip() or indent > below):
            entry = _KEYED.match(line) if goes_on == "map" else None
            lines.append(begin + ((entry[0] if entry else line[:indent]) + GONE if line.strip() else line))
            continue
        expected = goes_on == "line" and (partly or (indent > below and not _MAPPING.match(line)))
        if expected or goes_on == "rest" or (goes_on in ("line", "listed") and _ALONE.match(line)):
            line = line[:indent] + GONE
        elif goes_on == "name" and (found := _BEGINS_WITH_VALUE.match(line)):
            line = found[1] + GONE
        if named and (found := _ITS_VALUE.match(line)):
            line = found[1] + GONE
        entry = _ENTRY.match(line)
        named = entry is not None and is_secret_name(entry[1] or entry[2])
        line, goes_on = _clean(line)
        if a_secret:
            if _DATA.match(line):
                goes_on = "map"
            line = _DATA_INLINE.sub(rf"\1{GONE}", line)
        if goes_on in _QUOTES and (
            len(whole) > LONGEST_LINE or not any(goes_on in each for each in every[number + 1 : number + 9])
        ):
            goes_on = ""  # an apostrophe
        below, partly = indent, bool(prefix and prefix["part"] == "P")
        lines.append(begin + line)
    return lines


def _clean(line: str) -> tuple[str, str]:
    """By all rules for one line: as it is, and with one, two and three layers of escapes less."""
    shown, goes_on = without_named(without_shapes(line))
    inner = shown
    for _ in range(_LAYERS):
        plain = unescape_once(inner)
        if plain == inner:
            break
        inner, went_on = without_named(without_shapes(plain))
        if inner != plain:
            shown = inner
        goes_on = went_on or goes_on
    return shown, goes_on


def _cut(line: str) -> str:
    """A word at the end that was cut in two would not be known for what it is, so it goes as a whole."""
    if len(line) <= LONGEST_LINE:
        return line
    kept = 1 + max(line.rfind(mark, 0, LONGEST_LINE - 40) for mark in " \t,;\"'")
    return f"{line[:kept]}... {len(line) - kept} more characters"
