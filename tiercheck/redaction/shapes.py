"""Credentials that are known by their looks, whatever stands before them. Every pattern is searched in linear time."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

GONE = "REDACTED"

_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}-----")
_KEY_BODY = re.compile(r"[^\n]*(?:\n[ \t]*[A-Za-z0-9+/]+={0,2}[ \t\r]*(?=\n|\Z))*")

_EDGE = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"
"""The beginning of a word; in quoted JSON a line's end is two characters of which one is a letter."""
_LOOKS = re.compile(
    # GitHub, GitLab, npm, PyPI, Hugging Face, Slack, Vault, Docker, DigitalOcean, Shopify, Linear, Atlassian, age
    r"(?:gh[pousr]_|github_pat_|gl[a-z]{2,5}-|npm_|pypi-|hf_|api_org_|xox[a-z]-|xapp-|hv[sbr]\.|dckr_[a-z]{2,4}_|do[opr]_v1_"
    r"|shp[a-z]{2}_|lin_api_|ATATT3|AGE-SECRET-KEY-|PMAK-|NRAK-|SG\.)[A-Za-z0-9_.=-]{10,}"
    # AWS key ids, Google, JSON web tokens
    r"|(?<![A-Z0-9])A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{10,}"
    r"|LS0tLS1CRUdJTi[A-Za-z0-9+/=]{10,}"  # PEM in base64
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"
    # OpenAI, Anthropic and others, Stripe, NVIDIA, Groq, Replicate, Tailscale, Weights & Biases, Databricks
    rf"|{_EDGE}(?:sk-|[rps]k_(?:live|test)_|nvapi-|gsk_|r8_|xai-|pplx-|tskey-|wandb_v1_|dapi|sl\.)[A-Za-z0-9_-]{{16,}}"
)
_LOOKS_HINTS = (
    "gh", "github_pat_", "gl", "npm_", "pypi-", "hf_", "api_org_", "xox", "xapp-", "hv", "dckr_", "_v1_", "shp", "lin_api_", "atatt3", "age-secret-",
    "pmak-", "nrak-", "sg.", "akia", "asia", "abia", "acca", "aiza", "ya29.", "ls0tls1", "eyj", "sk-", "k_live_", "k_test_", "nvapi-",
    "gsk_", "r8_", "xai-", "pplx-", "tskey-", "dapi", "sl.",
)  # fmt: skip
_OLD_VAULT = re.compile(r"s\.(?:(?<![A-Za-z0-9_-]s\.)|(?<=\\[nrt]s\.))[A-Za-z0-9]{20,}")
_HOOK = re.compile(
    r"(?i)(hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot)[^\s\"']+"
)
_HEADER_VALUE = re.compile(
    r"(?i)((?:invalid|illegal|bad|wrong|forbidden|control characters? in|newlines?[a-z ]{0,40} in)[^\n:'\"]{0,40}"
    r"\bheaders?\b[^\n:'\"]{0,24}[: ]\s*|\bheader (?:part|value)s?\b[^\n'\"(]{0,12})(b?['\"(].*)"
)
"""What HTTP libraries say of a header that they refuse: its value follows."""
_SCHEME = re.compile(
    r"(?i)\b(bearer|basic|token|digest|negotiate|ntlm|apikey|aws4-hmac-sha256)(\s{1,4})((?!redacted)[A-Za-z0-9._~+/:=-]{8,})"
)
_LOGIN = re.compile(
    r"(?i)(\blogin\s{1,4}(?:--?[a-z-]{1,24}(?:[ =](?!-)\S{1,80})?\s{1,4}){0,6})([A-Za-z0-9_.~+/=-]{12,})"
)
_SHORT_OPTION = re.compile(
    r"(\b(?:(?:login|sshpass|mysql|mysqldump)\b[^\n]{0,200}?\s-p|redis-cli\b[^\n]{0,200}?\s-a)[ =]?)(?!\s)(?:'[^']*'|\"[^\"]*\"|[^\s-]\S*)"
)
_USER = re.compile(
    r"((?:^|\s|[\"'])(?:-u|-U|--user|--proxy-user)[ =]?[\"']?)([^\s\"':]{0,80}:(?!\d+(?:\s|$))[^\s\"']+)"
)
_USER_AT = re.compile(r"((?<![\w/])[A-Za-z][\w.-]{0,64}:)[^\s/@:'\"]{4,256}@(?!sha\d)(?=[A-Za-z0-9-]{1,64}[.:/])")
_SCHEMED = re.compile(r"://")
_ADDRESS = re.compile(r"[^\s\"'`<>\\]*")
_RUN = re.compile(r"[A-Za-z0-9+/_=-]{32,}")


def without_keys(text: str) -> str:
    """Private keys in PEM, whole or cut off."""
    parts, done = [], 0
    endless = False
    for found in _KEY.finditer(text):
        if found.start() < done:
            continue
        end = None if endless else _KEY_END.search(text, found.end())
        endless = end is None
        if end is None:
            end = _KEY_BODY.match(text, found.end())
        assert end is not None
        parts += [text[done : found.start()], GONE]
        done = end.end()
    return "".join(parts) + text[done:] if parts else text


def without_shapes(line: str) -> str:
    """One line without what looks like a credential."""
    low = line.lower()
    for hints, rule in _RULES:
        if any(hint in low for hint in hints):
            line = rule(line)
    return _RUN.sub(lambda m: GONE if _random(m[0]) else m[0], line)


def opaque(word: str) -> bool:
    """Whether a word can hardly be one of a language: letters and digits mixed, or capitals within."""
    letters = any(c.isalpha() for c in word)
    return letters and (any(c.isdigit() for c in word) or not (word[1:].islower() or word.isupper()))


def _random(run: str) -> bool:
    """Whether upper case, lower case and digits follow one another as by chance. Digests and UIDs have one case."""
    kinds = ["u" if c.isupper() else "l" if c.islower() else "d" if c.isdigit() else "" for c in run]
    if not {"u", "l", "d"} <= set(kinds):
        return False
    changes = sum(1 for a, b in pairwise(kinds) if a and b and a != b)
    return changes >= 0.4 * len(run)


def _addresses(line: str) -> str:
    """user:password@ in an address; the password may hold what an address may not."""
    parts, done = [], 0
    for found in _SCHEMED.finditer(line):
        begin = found.end()
        if begin < done:
            continue
        address = _ADDRESS.match(line, begin)
        assert address is not None
        rest = address[0].partition("://")[0]
        at = rest.partition("/")[0].rfind("@")
        port = rest.partition("/")[0].partition(":")[2]
        if at < 0 and port and not port.isdigit():
            at = rest.rfind("@")
        if at >= 0 and not rest[at:].startswith("@sha256:"):
            parts += [line[done:begin], GONE]
            done = begin + at
    return "".join(parts) + line[done:] if parts else line


_RULES: tuple[tuple[tuple[str, ...], Callable[[str], str]], ...] = (
    (("://",), _addresses),
    (_LOOKS_HINTS, lambda line: _LOOKS.sub(GONE, line)),
    (("s.",), lambda line: _OLD_VAULT.sub(GONE, line)),
    (("hooks", "discord", "telegram"), lambda line: _HOOK.sub(rf"\1{GONE}", line)),
    (("header",), lambda line: _HEADER_VALUE.sub(rf"\1{GONE}", line)),
    (
        ("bearer", "basic", "token", "digest", "negotiate", "ntlm", "apikey", "hmac-sha256"),
        lambda line: _SCHEME.sub(lambda m: f"{m[1]}{m[2]}{GONE}" if opaque(m[3]) else m[0], line),
    ),
    (("login",), lambda line: _LOGIN.sub(lambda m: m[1] + GONE if opaque(m[2]) else m[0], line)),
    (("login", "sshpass", "mysql", "redis-cli"), lambda line: _SHORT_OPTION.sub(rf"\1{GONE}", line)),
    (("-u", "user"), lambda line: _USER.sub(rf"\1{GONE}", line)),
    (("@",), lambda line: _USER_AT.sub(rf"\1{GONE}@", line)),
)
"""Each with words, in lower case, of which a line must have one: most lines have none, and most of a log is such lines."""
