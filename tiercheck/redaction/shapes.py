"""Takes out credentials that are known by their looks, whatever stands before them.

Every pattern is searched in linear time.
"""

from __future__ import annotations

import base64
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
    # GitHub, GitLab, npm, PyPI, Hugging Face, Slack, Vault, Docker, DigitalOcean, Shopify, Linear, Atlassian,
    # age
    r"(?:gh[pousr]_|github_pat_|gl[a-z]{2,5}-|npm_|pypi-|hf_|api_org_|xox[a-z]-|xapp-|hv[sbr]\.|dckr_[a-z]{2,4}_|do[opr]_v1_"
    r"|shp[a-z]{2}_|lin_api_|ATATT3|AGE-SECRET-KEY-|PMAK-|NRAK-|SG\.|rubygems_|sntry[su]_|xkeysib-|rdme_|pscale_[a-z]{2,5}_|gl[cs]a?_|whsec_"
    r"|sm_[aps]at_|sha256~|pat[A-Za-z0-9]{14}\.(?=[0-9a-f])|EZ[AT]K|sq0[a-z]{3}-|FLWSECK_|CLOJARS_"
    r"|(?i:access-(?:sandbox|development|production))-)[A-Za-z0-9_.=-]{10,}"
    # AWS key ids, Google, JSON web tokens
    r"|(?<![A-Z0-9])A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{12,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{10,}"
    r"|LS0tLS1CRUdJTi[A-Za-z0-9+/=]{10,}"  # PEM in base64
    r"|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"
    # OpenAI, Anthropic and others, Stripe, NVIDIA, Groq, Replicate, Tailscale, Weights & Biases, Databricks
    rf"|{_EDGE}(?:sk-|[rps]k_(?:live|test)_|nvapi-|gsk_|r8_|xai-|pplx-|tskey-|wandb_v1_|dapi|sl\.|pul-|p8e-|tfp_|API-|NRII-|fio-u-|dt0c01\."
    rf"|dp\.[a-z]{{2,5}}\."
    rf"|EAA[A-Z]|GR1348941|s-s4t2u[adf][a-z]?-|LTAI)[A-Za-z0-9_.=-]{{16,}}"
    # Mailgun, Twilio, Telegram, 1Password, Azure, Terraform
    rf"|{_EDGE}(?:key-|SK|AC)[0-9a-f]{{32}}(?![0-9a-f])|{_EDGE}\d{{8,10}}:AA[A-Za-z0-9_-]{{32,}}|{_EDGE}A3-[A-Z0-9]{{6}}-[A-Z0-9-]{{20,}}"
    r"|[A-Za-z0-9_~.]{3}\dQ~[A-Za-z0-9_~.-]{31,}|\.atlasv1\.[A-Za-z0-9_=-]{40,}"
)
_LOOKS_HINTS = (
    "gh", "github_pat_", "gl", "npm_", "pypi-", "hf_", "api_org_", "xox", "xapp-", "hv", "dckr_", "_v1_",
    "shp", "lin_api_", "atatt3",
    "age-secret-", "pmak-", "nrak-", "sg.", "akia", "asia", "abia", "acca", "aiza", "ya29.", "ls0tls1", "eyj",
    "sk-", "k_live_", "k_test_", "nvapi-",
    "gsk_", "r8_", "xai-", "pplx-", "tskey-", "dapi", "sl.", "rubygems_", "sntry", "xkeysib-", "rdme_",
    "pscale_", "gls", "glc", "whsec_",
    "sm_", "sha256~", "pat", "ez", "sq0", "flwseck_", "clojars_", "access-", "pul-", "p8e-", "tfp_", "api-",
    "nrii-", "fio-u-", "dt0c01.", "dp.", "eaa", "gr1348941",
    "s-s4t2u", "ltai", "key-", "sk", "ac", ":aa", "a3-", "q~", ".atlasv1.",
)  # fmt: skip
_OLD_VAULT = re.compile(r"s\.(?:(?<![A-Za-z0-9_-]s\.)|(?<=\\[nrt]s\.))[A-Za-z0-9]{20,}")
_HOOK = re.compile(
    r"(?i)(hooks\.slack\.com/services/|/webhooks?(?:b2)?/|api\.telegram\.org/bot|/hooks?/(?=[^\s\"']{16}))(?=[^\s\"']{0,128}\d)[^\s\"']+"
)
_AUTH = re.compile(
    r"(?i)(auth\w{0,12}[\"']?\s{0,2}[=:]?\s{0,2}[(\[]\s{0,2}b?[\"'][^\"'\n]{0,128}[\"'],\s{0,2}b?)(?:\"[^\"\n]+\"|'[^'\n]+')"
)
_ORACLE = re.compile(r"(jdbc:oracle:[a-z]{3,8}:[^\s/@]{1,64}/)[^\s@]+(?=@)")
_HEADER_VALUE = re.compile(
    r"(?i)((?:invalid|illegal|bad|wrong|forbidden|control characters? in|newlines?[a-z ]{0,40} "
    r"in)[^\n:'\"]{0,40}"
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
    r"(\b(?:(?:login|sshpass|mysql\w{0,12}|mariadb\w{0,12}|mongo\w{0,12})\b[^\n]{0,200}?\s-p|redis-cli\b[^\n]{0,200}?\s-a"
    r"|ldap[a-z]{3,10}\b[^\n]{0,200}?\s-w"
    r"|\s-pass(?:in|out|phrase)?[ =]pass:)[ =]?)(?!\s)(?:'[^']*'|\"[^\"]*\"|[^\s-]\S*)"
)
_PIPED = re.compile(
    r"(\becho\s{1,4}(?:-[neE]{1,3}\s{1,4})?)(?:'[^']*'|\"[^\"]*\"|[^\s|-]\S*)(?=\s*\|[^|\n]{0,200}(?:-stdin\b|\bsudo\s+-S|\bpasswd\b|\bcryptsetup\b))"
)
_LITERAL = re.compile(
    r"(--from-literal[= "
    r"][\"']?[\w.-]{1,128}=)[^\s\"']+|(\bIDENTIFIED\s{1,4}BY\s{1,4}(?:PASSWORD\s{1,4})?['\"])[^'\"\n]+",
    re.IGNORECASE,
)
_HASHED = re.compile(
    r"\$(?:1|2[abxy]|5|6|7|y|apr1|argon2[a-z]{1,2}|pbkdf2[\w-]{0,16}|scrypt)\$[A-Za-z0-9./$=,+_-]{16,}"
)
_USER = re.compile(
    r"((?:^|\s|[\"'])(?:-u|-U|--user|--proxy-user|login=|userpwd=)[ "
    r"=]?[\"']?)([^\s\"':%]{0,80}[:%](?!\d+(?:\s|$))[^\s\"']+)"
)
_USER_AT = re.compile(
    r"((?<![\w/])[A-Za-z][\w.-]{0,64}:)[^\s/@:'\"]{4,256}@(?!sha\d)(?=[A-Za-z0-9-]{1,64}[.:/])"
)
_SCHEMED = re.compile(r"://")
_ADDRESS = re.compile(r"[^\s\"'`<>\\]*")
_RUN = re.compile(r"[A-Za-z0-9+/_-]{20,}={0,2}")
_STRETCH = re.compile(r"[a-z0-9]{24,}|[A-Z0-9]{24,}|[A-Za-z0-9]{20,}")
_DIGIT = re.compile("[0-9]")
_UID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_MANGLED = re.compile(r"_{1,3}Z[A-Z]{0,4}\d{1,3}[A-Za-z_]{2}")
"""A name of C++, as in a trace of CUDA."""
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_BEYOND_HEX = re.compile(r"[G-Zg-z]")
_WEB_SAFE = str.maketrans("-_", "+/")
_ENCODED = re.compile(r"[A-Za-z0-9+/_-]{12,}={0,2}")
_PAIR = re.compile(r"[^\s:]{1,128}:\S{3,}|\{\s*[\"'].*", re.DOTALL)


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
    line = _RUN.sub(lambda m: GONE if has_random_run(m[0]) else m[0], line)
    return _ENCODED.sub(lambda m: GONE if _pair(m[0]) else m[0], line)


def is_opaque(word: str) -> bool:
    """Whether a word can hardly be one of a language: letters and digits mixed, or capitals within."""
    letters = any(c.isalpha() for c in word)
    return letters and (any(c.isdigit() for c in word) or not (word[1:].islower() or word.isupper()))


def has_random_run(run: str) -> bool:
    """Whether upper case, lower case and digits follow one another as by chance. Digests and UIDs have one
    case and no letter after F."""
    if _MANGLED.match(run):
        return False
    run = _UID.sub("", run)
    if len(run) >= 32 and _two_cases(run) and _changes(run) >= 0.4:
        return True
    return any(
        _DIGIT.search(part) and len(_CAMEL.findall(part)) >= 0.37 * len(part)
        if _two_cases(part)
        else _changes(part) >= 0.28
        for part in _STRETCH.findall(run)
    )


def _changes(run: str) -> float:
    """How often, of once a letter, the kind of letter changes; 0 where there is no digit, and for what may be
    hexadecimal."""
    if not _DIGIT.search(run) or not (_two_cases(run) or _BEYOND_HEX.search(run)):
        return 0
    kinds = ["u" if c.isupper() else "l" if c.islower() else "d" if c.isdigit() else "" for c in run]
    return sum(1 for a, b in pairwise(kinds) if a and b and a != b) / len(run)


def _two_cases(run: str) -> bool:
    return not (run.islower() or run.isupper())


def _pair(word: str) -> bool:
    """Whether it is `user:password`, or an object, in base64."""
    bare = word.rstrip("=").translate(_WEB_SAFE)
    if len(bare) % 4 == 1:
        return False
    content = base64.b64decode(bare + "=" * (-len(bare) % 4))
    return (
        content.isascii()
        and _PAIR.fullmatch(content.decode("ascii")) is not None
        and content.decode("ascii").isprintable()
    )


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


_NAMED_LATER = re.compile(
    r"(?i)\s(?:is|was|are|as|for)\s(?:(?:not|now|an?|the|your|my|our|their|(?:in)?valid|wrong|right|correct|new|old|[a-z]{1,16}'s)\s){0,4}"
    r"(?:[a-z]{1,12}\s)?"
    r"(?P<name>password|passphrase|passcode|psk|secret|token|api[ _-]?key|credentials?)(?!\w|[ "
    r"_-](?!(?:for|of|to|on|and|but|or)\b)[a-z])"
    r"|(?P<bracket>\s\()(?:[a-z]{1,16}[/,]\s?)?(?P<listed>password|passphrase|secret|token|api[ _-]?key)\)"
)
_BEFORE = re.compile(
    r"(?P<quote>[\"'`])(?P<quoted>[^\"'`{}\n]{4,128})(?P=quote)\Z|(?P<bare>[^\s\"'`,;:=()]{6,128})\Z"
)


def _named_later(line: str) -> str:
    """`x7 is the password`: a bare value has to look like one."""
    parts, done = [], 0
    for found in _NAMED_LATER.finditer(line):
        before = _BEFORE.search(line, max(done, found.start() - 130), found.start())
        if before is None:
            continue
        group = "bare" if before["bare"] else "quoted"
        low, high = before.span(group)
        if group == "bare" and "/" in before["bare"]:
            low = line.rfind("/", low, high) + 1
        value, name = line[low:high], (found["name"] or found["listed"]).lower()
        if value != GONE and (
            is_mixed(value) or (group == "quoted" and name.startswith("pass") and " " not in value)
        ):
            parts += [line[done:low], GONE]
            done = high
    return "".join(parts) + line[done:] if parts else line


def is_mixed(word: str) -> bool:
    """Whether it has digits and letters."""
    return any(c.isdigit() for c in word) and any(c.isalpha() for c in word)


_RULES: tuple[tuple[tuple[str, ...], Callable[[str], str]], ...] = (
    (("://",), _addresses),
    (_LOOKS_HINTS, lambda line: _LOOKS.sub(GONE, line)),
    (("s.",), lambda line: _OLD_VAULT.sub(GONE, line)),
    (("hook", "telegram"), lambda line: _HOOK.sub(rf"\1{GONE}", line)),
    (("header",), lambda line: _HEADER_VALUE.sub(rf"\1{GONE}", line)),
    (
        ("bearer", "basic", "token", "digest", "negotiate", "ntlm", "apikey", "hmac-sha256"),
        lambda line: _SCHEME.sub(lambda m: f"{m[1]}{m[2]}{GONE}" if is_opaque(m[3]) else m[0], line),
    ),
    (("login",), lambda line: _LOGIN.sub(lambda m: m[1] + GONE if is_opaque(m[2]) else m[0], line)),
    (
        ("login", "sshpass", "mysql", "maria", "mongo", "redis-cli", "ldap", "pass:"),
        lambda line: _SHORT_OPTION.sub(rf"\1{GONE}", line),
    ),
    (("echo",), lambda line: _PIPED.sub(rf"\1{GONE}", line)),
    (("--from-literal", "identified"), lambda line: _LITERAL.sub(lambda m: (m[1] or m[2]) + GONE, line)),
    (("$",), lambda line: _HASHED.sub(GONE, line)),
    (("auth",), lambda line: _AUTH.sub(rf"\1'{GONE}'", line)),
    (("jdbc:oracle",), lambda line: _ORACLE.sub(rf"\1{GONE}", line)),
    (("-u", "user", "login="), lambda line: _USER.sub(rf"\1{GONE}", line)),
    ((" is ", " was ", " are ", " as ", " for ", " ("), _named_later),
    (("@",), lambda line: _USER_AT.sub(rf"\1{GONE}@", line)),
)
"""Each with words, in lower case, of which a line must have one: most lines have none, and most of a log is
such lines."""
