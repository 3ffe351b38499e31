"""Values that are secret because of the name before them: `password: x`, `WANDB_API_KEY x`, `--hf-token x`, `{"secret": "x"}`.

The keyword is looked for first, then the name around it and the value after it, so that no place of a line is looked at twice.
"""

from __future__ import annotations

import re

from tiercheck.redaction.shapes import GONE, opaque

_KEYWORD = re.compile(
    r"(?i)passw(?:or)?d|passphrase|passcode|(?<![a-z])(?:pwd|pw|pass(?==))(?![a-z])|secret|token|credential|authorization|cookie"
    r"|(?:api|access|account|private|signing|encryption|master|shared|service|auth|license|subscription)[-_. ]?key|key[-_]?data"
    r"|(?<![a-z])x-auth|(?<![a-z])(?:auth|jwt|otp|sig|signature|session(?:[-_]?id)?|sid|dsn|key)(?![a-z])"
)
_WEAK = re.compile(r"(?i)(?:auth|jwt|otp|sig|signature|session.*|sid|dsn|key)\Z")
"""Keywords that many harmless things are called by: the value has to look secret as well."""
_PASSWORD = re.compile(r"(?i)pass|pwd?(?![a-z])")
_HEADER = re.compile(r"(?i)authorization|cookie|x-auth|-(?:token|key|secret|signature|auth)$")
_LEFT = re.compile(r"[A-Za-z0-9_.-]*\Z")
_RIGHT = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_SAME_WORD = re.compile(r"[a-z]+|[A-Z]+")
_TAILS = {"s", "key", "keys", "id", "value", "data", "hash", "string", "str", "text", "env", "json", "header"}
"""How a name may go on in the same word; otherwise it is another word: tokenizer, secretary."""
_POINTERS = {
    "name", "names", "ref", "refs", "selector", "namespace", "namespaces", "path", "paths", "file", "files", "dir", "folder", "type",
    "types", "count", "counts", "counter", "per", "sec", "second", "seconds", "ttl", "expiry", "expires", "expiration", "url", "uri",
    "endpoint", "length", "len", "size", "limit", "limits", "budget", "version", "error", "errors", "manager", "store", "class",
    "parallelism", "stdin", "audience", "total", "rate", "provider", "source", "review", "missing", "required",
}  # fmt: skip
"""Last words of names whose values only tell where a secret is, or how much of it."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SEPARATOR = re.compile(
    r"(?P<closed>\\*[\"'`]?\]?)(?:"
    r"(?P<pair>,?\s*\\*[\"']?value\\*[\"']?\s*[:=]\s*)|(?P<assigned>\s*(?:=>|:=|==|[=:])\s*)"
    r"|(?P<comma>\s*,\s*(?=[bBuUrR]?\\*[\"'`]))|(?P<blank>\s+(?P<verb>(?:is|was|are)\s+)?))"
)
_OPENING = re.compile(r"(?P<bracket>[\[(]*)\s*[bBuUrRfF]?(?P<quote>\\*[\"'`])")
_WORD = re.compile(r"(?:[^\s\"'`;&,<>]|,(?!\s|$))*")
_PHRASE = re.compile(r"[^;&\n]*")
_FLAG_VALUE = re.compile(r"(?!-)[^\s\"'`,;]+")
_LINE_BEGINS = re.compile(r"[\s#>+-]*(?:(?:export|set|env|setx|ARG|ENV)\s+)?[\"']?\Z")
_BLOCK = re.compile(r"[|>][+-]?\d?[+-]?\s*\Z")
_NOTHING = re.compile(
    r"(?i)(?:null|none|nil|true|false|yes|no|unset|empty|redacted|\*+|<[^<>]*>|\$[({]{0,2}\w+[)}]{0,2})?\Z"
)
_NUMBER = re.compile(r"[-+~]?\d[\d.,_]{0,14}(?:e[-+]?\d+)?\s?[kKMGTB]?(?:/s)?%?\Z")
_PROSE = {
    "is", "was", "to", "or", "and", "must", "not", "with", "for", "in", "has", "from", "as", "if", "the", "a", "an", "of", "on",
    "flag", "option", "options", "argument", "needs", "requires", "given", "cannot", "can", "should", "may", "takes", "are",
}  # fmt: skip
_LONGEST_NAME = 64


def is_secret_name(name: str) -> bool:
    """Whether the value of a field, variable or option of this name is a credential."""
    found = [each for each in _KEYWORD.finditer(name) if not _WEAK.match(each[0])]
    return any(_judge(name, each[0], each.end()) for each in found)


def without_named(line: str) -> tuple[str, str]:
    """One line, and where the value of its last name goes on: "" nowhere, "line" on the next, "block" on all that are indented more."""
    parts: list[str] = []
    done = 0
    for found in _KEYWORD.finditer(line):
        if found.start() < done:
            continue
        left = _LEFT.search(line, max(done, found.start() - _LONGEST_NAME), found.start())
        right = _RIGHT.match(line, found.end())
        assert left is not None
        assert right is not None
        begin, end = left.start(), right.end()
        while end > found.end() and line[end - 1] in ".-":
            end -= 1
        if not _judge(line[begin:end], found[0], found.end() - begin):
            continue
        value = _value(line, begin, end, weak=bool(_WEAK.match(found[0])))
        if value is None:
            continue
        low, high = value
        if low == high or _BLOCK.fullmatch(line, low, high):
            return "".join(parts) + line[done:], "line" if low == high else "block"
        parts += [line[done:low], GONE]
        done = high
    return "".join(parts) + line[done:], ""


def _judge(name: str, keyword: str, end: int) -> bool:
    """`end`: of the keyword in the name."""
    rest = name[end:]
    if rest[:1].isalpha() and rest[0].islower() == keyword[-1].islower():
        word = _SAME_WORD.match(rest)
        tail = word[0].lower() if word else ""
        if tail not in _TAILS and tail[:-1] not in _TAILS:
            return False
    if rest and _WEAK.match(keyword):
        return False
    words = [word.lower() for word in _WORDS.findall(rest)]
    return not words or words[-1] not in _POINTERS


def _value(line: str, begin: int, end: int, *, weak: bool) -> tuple[int, int] | None:
    """Where the value of the name at [begin, end) lies; None: there is none, or a harmless one."""
    name = line[begin:end]
    between = _SEPARATOR.match(line, end)
    if between is None:
        return None
    low = between.end()
    flag = name.startswith("-")
    password = bool(_PASSWORD.search(name))
    blank = between["blank"] is not None
    if (between["comma"] is not None and not between["closed"]) or (flag and between["verb"]):
        return None
    opening, assigned, closed = _OPENING.match(line, low), between["assigned"] or "", bool(between["closed"])
    if (
        opening is None
        and assigned.endswith(" ")
        and (line[begin - 1 : begin] == "/" or (closed and assigned[0] == " "))
    ):
        return None  # an object's name: `secret train/token: not found`, `volume "credentials" : no such secret`
    if opening is not None:
        low, high = opening.end(), _closing(line, opening.end(), opening["quote"])
        if "[" in opening["bracket"]:
            end = line.find("]", high)
            high = max(high, line.rfind(opening["quote"], low, len(line) if end < 0 else end))
        sure = not blank or flag or password or name.isupper()
    elif blank:
        word = _FLAG_VALUE.match(line, low)
        if word is None:
            return None
        high = word.end()
        sure = (flag and word[0].lower() not in _PROSE) or (password and "login " in line[:begin])
    else:
        high = _unquoted(line, begin, low, name, closed=closed, password=password)
        sure = True
    content = line[low:high]
    if assigned and low >= len(line.rstrip()):
        return None if weak else (len(line), len(line))
    if _NOTHING.match(content) or content[:1] == "{" or content[:2] == "[{":
        return None
    if "token" in name.lower() and _NUMBER.match(content.partition(" ")[0].rstrip(",;")):
        return None  # how many of a text
    if line[begin - 1 : begin] in ("?", "&") and between["assigned"] is not None:
        return low, high
    if weak and not flag:
        least = 8 if name.lower().endswith("auth") else 16
        return (low, high) if len(content) >= least and not set(content) & {" ", "/"} and opaque(content) else None
    least = 6 if password else 8
    if not sure and not (len(content) >= least and " " not in content and _mixed(content)):
        return None
    if name.lower().endswith("pwd") and content.startswith("/"):
        return None  # the working directory
    return low, high


def _mixed(word: str) -> bool:
    return any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def _closing(line: str, begin: int, quote: str) -> int:
    """Where a quoted value ends: before the next quote of the same kind, or with the line."""
    mark, slashes = quote[-1], len(quote) - 1
    at = line.find(mark, begin)
    while at >= 0:
        before = at
        while before > begin and line[before - 1] == "\\":
            before -= 1
        if (at - before == slashes) or (slashes == 0 and (at - before) % 2 == 0) or (slashes and at - before < slashes):
            return before
        at = line.find(mark, at + 1)
    return len(line)


def _unquoted(line: str, begin: int, low: int, name: str, *, closed: bool, password: bool) -> int:
    """A line of its own, a header and a password may hold blanks."""
    before = line[begin - 1 : begin]
    if before and before in "\"'`" and not closed:
        slashes = begin - 1
        while slashes and line[slashes - 1] == "\\":
            slashes -= 1
        return _closing(line, low, line[slashes:begin])
    if _HEADER.search(name) and ":" in line[begin + len(name) : low]:
        return len(line)
    if _LINE_BEGINS.match(line[:begin]):
        return len(line.rstrip())
    found = (_PHRASE if password else _WORD).match(line, low)
    return found.end() if found else low
