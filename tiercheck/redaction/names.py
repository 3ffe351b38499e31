"""Values that are secret because of the name before them: `password: x`, `WANDB_API_KEY x`, `--hf-token x`, `{"secret": "x"}`.

The keyword is looked for first, then the name around it and the value after it, so that no place of a line is looked at twice.
"""

from __future__ import annotations

import re

from tiercheck.redaction.shapes import GONE, opaque

_KEYWORD = re.compile(
    r"(?i)passw(?:or)?d|passphrase|passcode|(?<![a-z])(?:pwd|pw)(?![a-z])|secret|token|credential|authorization|cookie"
    r"|pass(?=[\"']?\s{0,2}[=:])|(?<![a-z])creds(?![a-z])"
    r"|(?:api|access|account|private|signing|encryption|master|shared|service|auth|license|subscription)[-_. ]?key|key[-_]?data"
    r"|(?<![a-z])x-auth|(?<![a-z])(?:auth|jwt|otp|sig|signature|session(?:[-_]?id)?|sid|dsn|key|(?<=[?&])code)(?![a-z])"
)
_HINTS = (
    "pass", "pw", "secret", "token", "credential", "creds", "authoriz", "auth", "cookie", "key", "jwt", "otp", "sig", "session", "dsn",
    "sid=", "sid:", "sid\"", "sid'", "sid ", "code=",
)  # fmt: skip
"""In lower case: a line without any of them has no keyword, and most of a log is such lines."""
_WEAK = re.compile(r"(?i)(?:pass|code|auth|jwt|otp|sig|signature|session.*|sid|dsn|key)\Z")
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
_QUOTE = r"(?:\\*[\"'`]|&quot;|&#(?:34|39|x22|x27);|%2[27]|\\+u002[27]|[“”‘’])"
_SEPARATOR = re.compile(
    rf"(?P<closed>{_QUOTE}?\]?)(?:\s+[Ii][Dd]\b)?(?:"
    r"(?P<pair>,?\s*\\*[\"']?value\\*[\"']?\s*[:=]\s*)|(?P<assigned>(?:\s+(?:is|was|are))?\s*(?:=>|:=|==|-+>|[=:>→]|%3[AaDd])\s*)"
    r"|(?P<comma>\s*,\s*)|(?P<loose>(?:\s+[A-Za-z]{1,12}){1,4}:\s+|\s*\|\s*)|(?P<blank>\s+(?P<verb>(?:is|was|are)\s+)?))"
)
"""`loose`: what follows is a value only if it looks like one, as in `invalid API key provided: x` or in a table."""
_OPENING = re.compile(rf"(?P<bracket>[\[(]*)\s*[bBuUrRfF]?(?P<quote>{_QUOTE})")
_WORD = re.compile(r"(?:[^\s\"'`;&,<>]|,(?!\s|$))*")
_PHRASE = re.compile(r"[^;&\n]*")
_FLAG_VALUE = re.compile(r"(?!-)[^\s\"'`,;]+")
_LINE_BEGINS = re.compile(r"[\s#>+-]*(?:(?:export|set|env|setx|ARG|ENV)\s+)?[\"']?\Z")
_BLOCK = re.compile(r"[|>][+-]?\d?[+-]?\s*\Z")
_NOTHING = re.compile(
    r"(?i)(?:null|none|nil|true|false|yes|no|unset|empty|redacted|\*+|<[A-Za-z _.-]*>|\$[({]{0,2}\w+[)}]{0,2})?\Z"
)
_NUMBER = re.compile(r"[-+~]?\d[\d.,_]{0,14}(?:e[-+]?\d+)?\s?[kKMGTB]?(?:/s)?%?\Z")
_DURATION = re.compile(r"[\d.,]+\s?[a-zA-Z%/]{0,3},?\Z")
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
    lowered = line.lower()
    if not any(hint in lowered for hint in _HINTS):
        return line, ""
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
    low, flag, password = between.end(), name.startswith("-"), bool(_PASSWORD.search(name))
    opening, assigned, closed = _OPENING.match(line, low), between["assigned"] or "", bool(between["closed"])
    blank, comma, loose = not assigned and not between["pair"], bool(between["comma"]), bool(between["loose"])
    if (comma and not (flag or (closed and opening))) or (flag and between["verb"]):
        return None
    an_object = line[begin - 1 : begin] == "/" or (closed and assigned[:1] == " ")
    if opening is None and assigned.endswith(" ") and an_object:
        return None  # `secret train/token: not found`, `volume "credentials" : no such secret`
    if opening is not None:
        low, high = _quoted(line, opening)
        sure = not blank or comma or (not loose and (flag or password or name.isupper()))
    elif blank:
        word = _FLAG_VALUE.match(line, low)
        if word is None:
            return None
        high = word.end()
        told = (flag and word[0].lower() not in _PROSE) or (password and "login " in line[:begin])
        sure = told and not loose and not comma
    else:
        high = _unquoted(line, begin, low, name, closed=closed, password=password)
        sure = True
    content = line[low:high]
    if assigned and low >= len(line.rstrip()):
        return None if weak else (len(line), len(line))
    if content[:1] == "{" and (password or not set(content) & {":", "=", '"'}):
        low, sure = low + 1, sure and password
        end = line.find("}", low)
        high = end if end >= 0 else len(line)
        content = line[low:high]
    asked = bool(assigned) and line[begin - 1 : begin] in ("?", "&")
    return (low, high) if _is_secret(name, content, sure=sure, weak=weak and not flag, asked=asked) else None


def _is_secret(name: str, content: str, *, sure: bool, weak: bool, asked: bool) -> bool:
    """Whether what stands where the value of `name` belongs is a credential. `sure`: it is a value; `asked`: in an address."""
    if _NOTHING.match(content) or content[:1] == "{" or content[:2] == "[{":
        return False
    if "token" in name.lower() and _NUMBER.match(content.partition(" ")[0].rstrip(",;")):
        return False  # how many of a text
    if asked:
        return True
    password = bool(_PASSWORD.search(name))
    if weak:
        least = 6 if password else 8 if name.lower().endswith("auth") else 16
        return (
            len(content) >= least and not set(content) & {" ", "/"} and opaque(content) and not _DURATION.match(content)
        )
    if not sure and not (len(content) >= (6 if password else 8) and " " not in content and _mixed(content)):
        return False
    return not (name.lower().endswith("pwd") and content.startswith("/"))  # the working directory


def _quoted(line: str, opening: re.Match[str]) -> tuple[int, int]:
    """What is between quotes, or between the first and the last of a list."""
    low = opening.end()
    high = _closing(line, low, opening["quote"])
    if "[" in opening["bracket"]:
        end = line.find("]", high)
        high = max(high, line.rfind(opening["quote"], low, len(line) if end < 0 else end))
    return low, high


def _mixed(word: str) -> bool:
    return any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


def _closing(line: str, begin: int, quote: str) -> int:
    """Where a quoted value ends: before the next quote of the same kind, or with the line."""
    if quote.lstrip("\\") not in ('"', "'", "`"):
        end = line.find({"“": "”", "‘": "’"}.get(quote, quote), begin)
        return end if end >= 0 else len(line)
    mark, slashes = quote[-1], len(quote) - 1
    at = line.find(mark, begin)
    while at >= 0:
        before = at
        while before > begin and line[before - 1] == "\\":
            before -= 1
        if mark == "'" and not slashes and line[at + 1 : at + 2] == mark:  # as YAML and SQL write one within
            at = line.find(mark, at + 2)
            continue
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
