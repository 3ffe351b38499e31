"""A text as somebody reads it: without colours and what nobody sees, and with escapes of ordinary characters resolved.

Rules look at these as well, so that none of them needs to know of colours, of wide letters or of `%70`.
"""

from __future__ import annotations

import re
import unicodedata

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


def visible(text: str) -> str:
    """With as many lines as before."""
    if _UNUSUAL.search(text) is None:
        return text
    text = _STRUCK_OVER.sub("", _LINK.sub(" ", _COLOUR.sub("", text)))
    return text.translate({ord(each): _ordinary(each) for each in set(text) if not " " <= each <= "~"})


def unescaped(line: str) -> str:
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
    code = int(found["decimal"]) if found["decimal"] else int(found["percent"] or found["code"] or found["hex"], 16)
    return chr(code) if 32 <= code < 127 else found[0]
