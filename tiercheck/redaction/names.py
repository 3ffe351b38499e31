"""Takes out values that are secret because of the name before them: `password: x`, `--hf-token x`.

The keyword is looked for first, then the name around it and the value after it, so that no place of a line is
looked at twice.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tiercheck.redaction.shapes import GONE, has_random_run, is_mixed, is_opaque

_KEYWORD = re.compile(
    r"(?i)p(?:as)?sw(?:or)?[dt]|pass[-_. "
    r"]?phrase|passcode|pwd?(?![a-z])|secret|token|credential|authorization|cookie"
    r"|pass(?=[\"'`\]]*\s{0,2}(?:[=:]|\Z))|(?<=[a-z_.-])pass(?![a-z])|psk(?![a-z])|(?<![a-z])creds(?![a-z])"
    r"|mnemonic|(?:seed|recovery)[-_. ]?phrase"
    r"|kennwort|mot de passe|contrase.{1,2}a|wachtwoord|senha(?![a-z])|парол|密[码碼]|パスワード"
    r"|(?:api|access|account|private|signing|encryption|master|shared|service|auth|license|subscription)"
    r"[-_. ]?key|key[-_]?data"
    r"|(?<![a-z])x-auth|(?<![a-z])(?:auth|jwt|otp|sig|signature|session(?:[-_]?id)?|sid|dsn|(?<=[?&])code)(?![a-z])|key(?![a-z])"
)
_HINTS = (
    "pass", "pw", "psw", "psk", "mnemonic", "phrase", "wort", "woord", "contrase", "senha", "парол", "密",
    "パスワ",
    "secret", "token", "credential", "creds", "authoriz", "auth", "cookie", "key", "jwt", "otp", "sig",
    "session", "dsn",
    "sid=", "sid:", "sid\"", "sid'", "sid ", "code=",
)  # fmt: skip
"""In lower case: a line without any of them has no keyword, and most of a log is such lines."""
_WEAK = re.compile(r"(?i)(?:code|auth|jwt|otp|sig|signature|session.*|sid|dsn|key)\Z")
"""Keywords that many harmless things are called by: the value has to look secret as well."""
_PASSWORD = re.compile(
    r"(?i)pass|psw|pwd?(?![a-z])|psk|phrase|mnemonic|kennwort|woord|contrase|senha|парол|密|パスワ"
)
_SHORT = re.compile(r"(?i)(?:pass|psk)\Z")
"""Keywords whose values are one word, or quoted: there is a forward pass, and a bypass."""
_OTHER_PASSES = {
    "by", "com", "encom", "over", "under", "sur", "tres", "forward", "backward", "first", "second", "last",
    "single", "multi", "one", "two",
    "each", "low", "high", "band", "all", "dry", "validation", "eval", "test", "train",
}  # fmt: skip
_A_FILE = re.compile(r"\.(?:json|ya?ml|toml|txt|py|model|bin|pt|pth|log|go|rs|md)\Z")
_CALL = re.compile(r"[A-Za-z_][\w.]*\(\)\s*\Z")
"""Code, as in a traceback: `password = getpass()`."""
_SAID = re.compile(
    r"(?i)(?:must|should|cannot|can't|required|invalid|missing|unexpected|expected|unknown|expired|denied|refused"
    r"|refreshed|rotated|loaded|forbidden|failed|unauthorized|unsupported|error)\b[a-z "
    r",.:'-]*(?:\b\d{1,6}\b[a-z ,.:'-]*){0,3}\Z"
)
"""What is said about a value in place of it: `password: must have 12 characters`."""
_HEADER = re.compile(r"(?i)authorization|cookie|x-auth|-(?:token|key|secret|signature|auth)$")
_LEFT = re.compile(r"[A-Za-z0-9_.-]*\Z")
_RIGHT = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_SAME_WORD = re.compile(r"[a-z]+|[A-Z]+")
_TAILS = {"s", "key", "keys", "id", "value", "data", "hash", "string", "str", "text", "env", "json", "header"}
"""How a name may go on in the same word; otherwise it is another word: tokenizer, secretary."""
_POINTERS = {
    "name", "names", "ref", "refs", "selector", "namespace", "namespaces", "path", "paths", "file", "files",
    "dir", "folder", "type",
    "types", "count", "counts", "counter", "per", "sec", "second", "seconds", "ttl", "expiry", "expires",
    "expiration", "url", "uri",
    "endpoint", "length", "len", "size", "limit", "limits", "budget", "version", "error", "errors", "manager",
    "store", "class",
    "parallelism", "ids", "stdin", "audience", "total", "rate", "provider", "source", "review", "missing",
    "required",
}  # fmt: skip
"""Last words of names whose values only tell where a secret is, or how much of it."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_QUOTE = r"(?:\"\"\"|'''|\\*[\"'`]|&quot;|&#(?:34|39|x22|x27);|%2[27]|\\+u002[27]|[“”‘’«»„‚‹›])"
_SEPARATOR = re.compile(
    rf"(?P<closed>{_QUOTE}?\]?)(?:\s+[Ii][Dd]\b|(?P<valued>\s+value)\b)?(?:\s+(?:for|FOR)\s+\S{{1,64}}(?=\s*=))?(?:"
    r"(?P<pair>,?(?:\s[\w-]{1,20}=\"[^\"<>]{0,80}\"){0,3}\s*\\*[\"']?[Vv]alue\\*[\"']?\s*[:=]\s*)"
    r"|(?P<assigned>(?:\s+(?:is|was|are))?\s*(?:=>|:=|==|-+>|[=:>→⇒⟶↦➜≔≡]|%3[AaDd]"
    r"|\s[\w:.-]{1,40}=(?:\"[^\"<>]{0,80}\"|'[^'<>]{0,80}')\s*>)\s*"
    r"(?:(?:Invalid|Unsupported|Duplicate) value:\s+(?=[\"']))?)"
    r"|(?P<comma>\s*,\s*)|(?P<loose>(?:\s+[A-Za-z]{1,12}){1,4}:\s+|\s*\|\s*)|"
    r"(?P<blank>\s+(?P<verb>(?:(?:is|was|are|has "
    r"been)\s+)?(?P<told>(?:re)?(?:set|changed|rotated|equal|updated)\s+(?:to|from)\s+)?)))"
)
"""`loose`: what follows is a value only if it looks like one, as in `invalid API key provided: x` or in a
table."""
_OPENING = re.compile(
    rf"(?P<bracket>(?:[A-Z]\w{{0,40}}\(|\[\]byte\(|[\[(])*)\s*[bBuUrRfF]?(?P<quote>{_QUOTE})"
)
_WORD = re.compile(r"(?:[^\s\"'`;&,<>]|,(?!\s|$))*")
_PHRASE = re.compile(r"[^;&\n]*")
_FLAG_VALUE = re.compile(r"(?!-)[^\s\"'`,;]+")
_LINE_BEGINS = re.compile(r"[\s#>+-]*(?:(?:export|set|env|setx|ARG|ENV)\s+)?[\"']?\Z")
_BLOCK = re.compile(r"(?:[|>][+-]?\d?[+-]?|[\[(])\s*\Z")
_NOTHING = re.compile(
    r"(?i)(?:null|none|nil|true|false|yes|no|unset|empty|redacted|\*+|</?[A-Za-z "
    r"_.|-]*>|\\|\$[({]{0,2}\w+[)}]{0,2})?\Z"
)
_NUMBER = re.compile(r"[-+~]?\d[\d.,_]{0,14}(?:e[-+]?\d+)?\s?[kKMGTB]?(?:/s)?%?\Z")
_NUMBERS = re.compile(
    r"(?:[a-z][\w.]{0,16}\()?[\[(][-+\d.,\s\[\]()]*(?:,?\s*(?:dtype|device)=[\w.:']{1,24}){0,2}\)?\Z"
)
_DURATION = re.compile(r"[\d.,]+\s?[a-zA-Z%/]{0,3},?\Z")
_PROSE = {
    "is", "was", "to", "or", "and", "must", "not", "with", "for", "in", "has", "from", "as", "if", "the", "a",
    "an", "of", "on",
    "flag", "option", "options", "argument", "needs", "requires", "given", "cannot", "can", "should", "may",
    "takes", "are", "be", "expire",
    "incorrect", "invalid", "wrong", "missing", "mismatch", "empty", "authentication", "prompt", "reset",
    "change", "policy", "field",
}  # fmt: skip
_LONGEST_NAME = 64
_LISTED = re.compile(r"[\"']\s*,\s*[\"']")
FENCES = ('"""', "'''")
_ENDS = re.compile(r"[\"'\]]*\s*(,?)\s*\Z")
_CHANGED = re.compile(r"[\"'`]?\s+to\s+[\"'`]?([^\s\"'`]+)")
_A_SUFFIX = re.compile(r"(?i)(?<=[a-z])(?:pw|pass)\Z")
_CODE = set("/()[]{}=.*")


@lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether the value of a field, variable or option of this name is a credential."""
    found = [each for each in _KEYWORD.finditer(name) if not _WEAK.match(each[0])]
    return any(_judge(name, each[0], each.end()) for each in found)


def without_named(line: str) -> tuple[str, str]:
    """One line, and where the value of its last name goes on: "" nowhere; "line", "rest": on the next, if it
    looks so and anyway; "block": on all that are indented more; "name", "listed": it begins on the next,
    after a colon, or in quotes; quotes: up to those.
    """
    lowered = line.lower()
    if not any(hint in lowered for hint in _HINTS):
        return line, ""
    parts: list[str] = []
    done = 0
    goes_on = ""
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
        name = line[begin:end]
        if not _judge(name, found[0], found.end() - begin) or (
            _A_FILE.search(name) and line[end : end + 1] != "="
        ):
            continue
        weak = bool(_WEAK.match(found[0]))
        value = _value(line, begin, end, weak=weak, short=bool(_SHORT.match(found[0])))
        if value is None:
            last = _ENDS.match(line, end)
            if last and not weak:
                goes_on = "listed" if last[1] else "name"
            continue
        low, high = value
        if low == high or _BLOCK.fullmatch(line, low, high):
            last_three = line.rstrip()[-3:]
            goes_on = (
                last_three
                if last_three in FENCES
                else "block"
                if low < high
                else "rest"
                if line.rstrip().endswith("\\")
                else "line"
            )
            return "".join(parts) + line[done:], goes_on
        parts += [line[done:low], GONE]
        done = high
        if high == len(line) and line[low - 3 : low] in FENCES:
            goes_on = line[low - 3 : low]
        elif high == len(line) and line[low - 1] in "\"'":
            goes_on = line[low - 1]
        changed = _CHANGED.match(line, high) if line[:low].rstrip("\"'`").endswith("from ") else None
        if changed:
            parts += [line[done : changed.start(1)], GONE]
            done = changed.end()
    return "".join(parts) + line[done:], goes_on


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
    if _SHORT.match(keyword) and any(
        word.lower() in _OTHER_PASSES for word in _WORDS.findall(name[: end - len(keyword)])
    ):
        return False
    words = [word.lower() for word in _WORDS.findall(rest)]
    return not words or words[-1] not in _POINTERS


def _value(line: str, begin: int, end: int, *, weak: bool, short: bool) -> tuple[int, int] | None:
    """Where the value of the name at [begin, end) lies; None: there is none, or a harmless one."""
    name = line[begin:end]
    between = _SEPARATOR.match(line, end)
    if between is None:
        return None
    low, flag, password = between.end(), name.startswith("-"), bool(_PASSWORD.search(name))
    opening, assigned, closed = _OPENING.match(line, low), between["assigned"] or "", bool(between["closed"])
    blank, comma, loose = not assigned and not between["pair"], bool(between["comma"]), bool(between["loose"])
    if (comma and opening and not (flag or closed)) or (flag and between["verb"]):
        return None
    if loose and " not" in between[0] and name.lower().endswith(("secret", "secrets")):
        return None  # `secret not found: x`
    an_object = line[begin - 1 : begin] == "/" or (closed and assigned in (" : ", " = "))
    if assigned.endswith(" ") and an_object and (opening is None or opening["bracket"][-1:] == "("):
        return None  # `secret train/token: not found`, `volume "credentials" : no such secret`
    if opening is not None:
        low, high = _quoted(line, opening)
        schemed = name.lower().endswith("authorization")
        sure = (
            not blank
            or comma
            or (not loose and (bool(between["valued"]) or flag or password or schemed or name.isupper()))
        )
    elif blank:
        word = _FLAG_VALUE.match(line, low)
        if word is None:
            return None
        high = word.end()
        told = flag or (password and _is_told(line, begin, name, high, between["told"] or ""))
        sure = told and word[0].lower() not in _PROSE and not loose and not comma
        if comma and not flag and set(word[0]) & _CODE:
            return None
    else:
        high = _unquoted(line, begin, low, name, closed=closed, password=password)
        sure = True
    content = line[low:high]
    if (assigned or flag) and line[low:].strip() in ("", "\\"):
        return None if weak or not (assigned or line[low:].strip()) else (len(line), len(line))
    if assigned and line[low:].strip() in ("[", "("):
        return None if weak else (low, len(line))
    if opening is None and (
        (assigned.lstrip()[:1] == ":" and _SAID.match(line, low)) or _CALL.match(content)
    ):
        return None
    if short and opening is None and (" " in content or len(content) < 4 or _DURATION.match(content)):
        return None
    if content[:1] == "{" and (password or not set(content) & {":", "=", '"'}):
        low, sure = low + 1, sure and password
        end = line.find("}", low)
        high = end if end >= 0 else len(line)
        content = line[low:high]
    placed = bool(assigned or between["pair"]) or (opening is not None and not loose)
    asked = bool(assigned) and line[begin - 1 : begin] in ("?", "&")
    return (
        (low, high)
        if _is_secret(name, content, sure=sure, placed=placed, weak=weak and not flag, asked=asked)
        else None
    )


def _is_told(line: str, begin: int, name: str, high: int, verb: str) -> bool:
    """Whether a word after the name of a password is its value: `login bob password x`, `bindpw x`, `password
    set to x`, a line of two."""
    alone = len(line[begin:high].split()) == 2 and not line[:begin].strip(" \t-*") and not line[high:].strip()
    return alone or bool(_A_SUFFIX.search(name)) or bool(verb) or "login " in line[:begin]


def _is_secret(name: str, content: str, *, sure: bool, placed: bool, weak: bool, asked: bool) -> bool:
    """Whether what stands where the value of `name` belongs is a credential.

    `sure`: it is a value; `placed`: it stands where one belongs; `asked`: in an address.
    """
    if (
        content[:1] == "{"
        or content[:2] == "[{"
        or all(_NOTHING.match(one) for one in _LISTED.split(content))
    ):
        return False
    if "token" in name.lower() and (
        _NUMBER.match(content.partition(" ")[0].rstrip(",;")) or _NUMBERS.match(content)
    ):
        return False  # how many of a text
    if asked:
        return True
    password = bool(_PASSWORD.search(name))
    if weak and not placed:
        return has_random_run(content)
    if weak:
        least = 8 if name.lower().endswith("auth") else 16
        return (
            len(content) >= least
            and " " not in content
            and ("/" not in content or has_random_run(content))
            and is_opaque(content)
            and not _DURATION.match(content)
        )
    if not sure and not (len(content) >= (6 if password else 8) and " " not in content and is_mixed(content)):
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


def _closing(line: str, begin: int, quote: str) -> int:
    """Where a quoted value ends: before the next quote of the same kind, or with the line."""
    if quote.lstrip("\\") not in ('"', "'", "`"):
        end = line.find(
            {"“": "”", "‘": "’", "„": "“", "‚": "‘", "«": "»", "»": "«", "‹": "›"}.get(quote, quote), begin
        )
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
        if (
            (at - before == slashes)
            or (slashes == 0 and (at - before) % 2 == 0)
            or (slashes and at - before < slashes)
        ):
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
