"""Removes credentials from text that users read: status, Events, annotations, logs and exports.

docs/operate/security.md lists what is found and what is not. A harmless word may be removed too. The text is
untrusted, so each pattern takes time linear in the length of a line: repetitions are possessive, bounded, or
begin where no other can.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

GONE = "REDACTED"
LONGEST_LINE = 4096
"""The number of characters of a line that are kept."""
_SHORTEST_KNOWN = 8
"""The number of characters. A shorter credential may be a common word such as `none`."""

_NAMES = (
    r"(?:pass(?:word|wd|phrase|code)|pwd|(?-i:_PASS)|(?:db|user|smtp|proxy)[-_]?pass"
    r"|secret|token|credential|creds|authorization|cookie|signature(?==)|connection[-_]?string|key[-_]data"
    r"|(?:api|access|account|private|secret|shared|storage|service|subscription|license|signing|encryption"
    r"|master|auth|ssh|wandb)[-_ ]?key)"
    r"(?:(?<!token)s|[-_]?(?:id|value|hash|string|\d{1,2}))?"
)
"""Matches the ends of names of credentials. `tokens` is left out: it counts those of a text."""
_IS_NAME = re.compile(rf"(?i){_NAMES}\Z")
_QUOTE = r"\\{0,8}[\"'`]"
"""Allows backslashes, which precede a quote in JSON within JSON."""
_TO_QUOTE = rf"b?(?P<mark>{_QUOTE})(?P<quoted>(?:(?!(?<!\\)(?P=mark))[^\n])*+)"
_VALUE = (
    rf"(?:{_TO_QUOTE}"
    r"|(?P<list>[\w.]{0,40}(?:\[\]\w{0,8})?[(\[][^)\]\n]*+[)\]]?)"  # [a, b]  Secret('a')  []byte("a")
    r"|(?!\{)(?P<word>(?:[^\s\"'`,;&<>\\]|,(?!\s|\Z)|\\(?!\\{0,8}[\"'`]))++))"
)
_BLANKS = r"[ \t]{0,4}"
_REFUSAL = (
    rf"(?!(?:{_QUOTE})?(?:(?:forbidden|internal error|not found|too (?:long|many|few)"
    r"|validation (?:error|failure)):|unauthorized\b|serviceaccounts? \"|(?-i:Get|Post|Put) \"http))"
)
"""Excludes what Kubernetes, Kyverno and Go say of a field or request after its name, in place of a value."""
_NAMED = re.compile(
    rf"(?i)(?P<before>(?:(?<!non-existent ){_NAMES}"
    rf"|(?<=[?&])(?:sig|key|code)|(?<=login\()key|(?<=[\"'])auth(?={_QUOTE})|_auth(?==))"
    rf"(?:{_QUOTE})?(?:\]?{_BLANKS}(?:={{1,2}}|=>|:=|->){_BLANKS}"  # name = value  environ["name"] = value
    rf"|:(?!:){_BLANKS}|{_BLANKS}:{_BLANKS}(?=\\{{0,8}}[\"'])"  # name: value  "name" : "value"
    rf"|,?\s{{1,40}}(?:{_QUOTE})?value(?:{_QUOTE})?{_BLANKS}[:=]{_BLANKS}|>))"  # {name: x, value: y}  <name>x
    + _REFUSAL
    + _VALUE
)
_OPTION = re.compile(
    rf"(?i)(?P<before>(?:(?<![\w-])--?[\w.-]*?{_NAMES}(?:{_QUOTE})?,?"
    rf"|\bwandb login(?:[ \t]+--[\w-]{{1,20}}+(?:[= ]\w{{1,8}}://[^\s\"']{{1,200}}+)?+){{0,4}}+)"
    rf"[ \t]+(?!-)){_VALUE}"
)
_PROSE = "(?:is|was|has|not|and|or|must|needs|required|invalid|missing|expired|unexpected|unknown|failed)"
"""Words that appear after a name in a sentence, in place of a value."""
_LINE_OF_YAML = re.compile(
    rf"(?im)^(?P<before>[ \t]*+(?:-[ \t]+)?(?:{_QUOTE})?[\w.-]*?{_NAMES}(?:{_QUOTE})?:[ \t]+)"
    rf"{_REFUSAL}(?![\"'\[{{]|{_PROSE}\s)(?P<word>[^\n]+)"
)
"""Matches a line of YAML. Its value may contain blanks."""
_HEADER = re.compile(
    r"(?i)(?P<before>(?P<outer>\\{0,8}[\"'])?(?:(?:proxy-)?authorization|(?:set-)?cookie)"
    rf"(?:{_QUOTE})?{_BLANKS}(?:[:=]?[=>]|:){_BLANKS})"
    rf"(?:{_TO_QUOTE}|(?P<word>(?(outer)(?:(?!(?P=outer))[^\n])|[^\n])*+))"
)
"""Matches a header. Its value extends to the end of the line, or of the quotes around the header."""
_SCHEME = re.compile(r"(?i)\b((?:bearer|basic)[ \t]{1,4})(?=[A-Za-z._~+/=-]{0,128}\d)[\w.~+/=-]{10,}+")
_USER_IN_URL = re.compile(
    r"(?<=://)(?:[^\s/\"'<>@]*+@(?:[^\s/\"'<>@]*+@)*+|[^\s/\"'<>@:]*+:(?!\d+/)[^\s\"'<>@]{1,256}@)"
)
"""Matches the user in a URL. The second form has a slash in the password.

Libraries refuse such a URL and quote it."""
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}-----")
_CUT_OFF_KEY = re.compile(r"[^\n]*(?:\n[ \t]*[A-Za-z0-9+/]+={0,2}[ \t\r]*(?=\n|\Z))*")
_EDGE = r"(?:(?<![\w-])|(?<=\\[nrt]))"
"""The beginning of a word; in quoted JSON a line break is two characters, one of them a letter."""
_TOKEN = re.compile(
    # GitHub, GitLab, Hugging Face, npm, PyPI, Docker, Vault, NVIDIA, Weights & Biases, Slack, Google,
    # OpenAI and Anthropic; AWS; JSON web tokens
    r"(?:gh[oprsu]_|github_pat_|glpat-|hf_|npm_|pypi-|dckr_pat_|hv[bs]\.|nvapi-|wandb_v1_|xox[a-z]-|xapp-|ya29\."
    rf"|AIza|{_EDGE}sk-)[\w.-]{{16,}}+"
    rf"|(?<![A-Z0-9])A[KS]IA[A-Z0-9]{{12,}}+|{_EDGE}eyJ[\w-]{{8,}}+\.[\w-]{{8,}}+(?:\.[\w-]*+)?"
)
_HARMLESS = re.compile(
    rf"(?i)(?:{GONE}|null|none|nil|true|false|unset|empty|\*+|</?\w*>?|{_PROSE}"
    r"|\$[({]{0,2}(?-i:[A-Z][A-Z0-9_]*)[)}]{0,2})?[\[(]?[\])},.:]*\Z"
)
_OF_COUNT = re.compile(r"(?i)(?:token(?:[-_]?id)?|secrets)[^a-z]*+\Z")
_NUMBER = re.compile(r"(?i)[-+~]?\d[\d.,_]*(?:e[-+]?\d+)?[\])},]*\Z")
_OF_PWD = re.compile(r"(?i)pwd[^a-z]*+\Z")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]?)?")


def redacted(text: str, known: Iterable[str] = ()) -> str:
    """Returns `text` with credentials replaced by REDACTED, long lines cut at `LONGEST_LINE`, no colours.

    `known`: credentials that are removed wherever they occur.
    """
    for value in sorted(known, key=len, reverse=True):
        if len(value) >= _SHORTEST_KNOWN:
            text = text.replace(value, GONE)
    text = _ESCAPE.sub("", text) if "\x1b" in text else text
    text = _without_keys(text)
    text = "\n".join(_cut(line) for line in text.split("\n"))
    text = _USER_IN_URL.sub(f"{GONE}@", text)
    for pattern in (_HEADER, _LINE_OF_YAML, _NAMED, _OPTION):
        text = pattern.sub(_without_value, text)
    return _TOKEN.sub(GONE, _SCHEME.sub(rf"\1{GONE}", text))


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal or reorder text, except the tab and the line feed."""


def escape_controls(text: str, *, breaks: bool = False) -> str:
    """Returns `text` with control characters, and with `breaks` line feeds too, escaped as in \\x1b."""
    text = CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text.replace("\n", "\\n") if breaks else text


def is_secret_name(name: str) -> bool:
    """Returns whether the value of a field, variable or option of this name is a credential."""
    return _IS_NAME.search(name) is not None


def known_secrets(env: Mapping[str, str], *files: Path) -> frozenset[str]:
    """Returns the values of variables with credential names, and the contents of `files`.

    Each file holds one credential. A file that cannot be read is skipped."""
    found = {env[name].strip() for name in env if is_secret_name(name) and not env[name].startswith("/")}
    for path in files:
        with contextlib.suppress(OSError, ValueError):
            found.add(path.read_text().strip())
    return frozenset(value for value in found if len(value) >= _SHORTEST_KNOWN)


def log_redacted(level: int | str = logging.INFO, known: Iterable[str] = ()) -> None:
    """Makes the root logger write to stderr without credentials, and logs unhandled exceptions there.

    `known`: credentials that this process holds.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Redacting(known))
    logging.basicConfig(level=level, handlers=[handler])
    sys.excepthook = _process_ended
    threading.excepthook = _thread_ended


class _Redacting(logging.Formatter):
    def __init__(self, known: Iterable[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._known = tuple(known)

    def format(self, record: logging.LogRecord) -> str:
        whole = super().format(record)
        said = self.formatMessage(record)  # a traceback may follow
        message = escape_controls(redacted(said, self._known), breaks=True)
        # Indented: otherwise a line of an exception's text could look as if it were a log line.
        lines = escape_controls(redacted(whole[len(said) :], self._known)).split("\n")
        return "\n    ".join([message, *lines[1:]])


def _process_ended(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    logging.getLogger(__name__).critical("the process ends unexpectedly", exc_info=(kind, error, trace))


def _thread_ended(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_value is None or issubclass(ended.exc_type, SystemExit):
        return
    name = ended.thread.name if ended.thread is not None else "?"
    what = (ended.exc_type, ended.exc_value, ended.exc_traceback)
    logging.getLogger(__name__).critical("thread %s ended unexpectedly", name, exc_info=what)


def _without_value(found: re.Match[str]) -> str:
    groups = found.groupdict()
    mark, before = groups.get("mark") or "", found["before"]
    value = groups.get("quoted") or groups.get("list") or groups.get("word") or ""
    if _HARMLESS.match(value) or (_OF_COUNT.search(before) and _NUMBER.match(value)):
        return found[0]
    if _OF_PWD.search(before) and value.startswith("/"):
        return found[0]  # the working directory
    return before + mark + GONE


def _without_keys(text: str) -> str:
    """Returns the text without private keys in PEM, whole or cut off."""
    parts, done, endless = [], 0, False
    for found in _KEY_BEGINS.finditer(text):
        if found.start() < done:
            continue
        end = None if endless else _KEY_ENDS.search(text, found.end())
        endless = end is None
        end = end or _CUT_OFF_KEY.match(text, found.end())
        assert end is not None
        parts += [text[done : found.start()], GONE]
        done = end.end()
    return "".join(parts) + text[done:]


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    # A credential that is cut in two would not be found, so the last word is removed entirely.
    kept = 1 + max(line.rfind(mark, 0, LONGEST_LINE - 40) for mark in " \t,;\"'")
    return f"{line[:kept]}... {len(line) - kept} more characters"
