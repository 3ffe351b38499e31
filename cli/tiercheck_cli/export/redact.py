"""Takes out of objects and logs what must not leave the company: values of environment variables, credentials, signed addresses.

It is better to lose a harmless value than to give a secret away, so values of environment variables go whatever they are called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

GONE = "REDACTED"

_TELLING = re.compile(
    r"(?i)(token|passw(or)?d|passphrase|secret|api[-_]?key|access[-_]?key|private[-_]?key|credential|authorization|cookie)"
)
_REFERENCE = re.compile(r"(Name|Ref|Refs|Names|Secrets|namespace|name|Key|Path|key)$")
"""Ends of keys whose values only point to a secret."""
_NOISE = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
_FIELDS_OF_VALUES = {"env"}

_IN_TEXT = (
    # user:password@ in an address
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s@'\"]+@"), rf"\1{GONE}@"),
    # Authorization headers
    (re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}"), rf"\1 {GONE}"),
    # signed addresses
    (re.compile(r"(?i)([?&](?:x-amz-[a-z-]*(?:signature|credential|token)|sig|signature|sv|se|token)=)[^&\s'\"]+"), rf"\1{GONE}"),
    # keys of AWS, tokens of GitHub, Hugging Face, Weights & Biases, Google, Slack, and JSON web tokens by their looks
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), GONE),
    (re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|xox[abpr]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,})"), GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), GONE),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL), GONE),
    # --token=..., --api-key ..., PASSWORD: ...
    (
        re.compile(
            r"(?i)((?:--?)?[a-z0-9_.-]*(?:token|passw(?:or)?d|passphrase|secret|api[-_]?key|access[-_]?key|private[-_]?key)"
            r"[a-z0-9_.-]*[\"']?\s*[=:]\s*[\"']?)([^\s\"',;&]+)"
        ),
        rf"\1{GONE}",
    ),
)  # fmt: skip
_OPTION = re.compile(r"^--?[A-Za-z0-9_.-]+$")


def text(content: str) -> str:
    """A line of a log, or a whole one."""
    for pattern, replacement in _IN_TEXT:
        content = pattern.sub(replacement, content)
    return content


def thing(content: Any) -> Any:
    """An object of the API, or a part of one: a new one, without values that may be secret and without noise."""
    if isinstance(content, Mapping):
        return {str(key): _value(str(key), value) for key, value in content.items() if key not in _NOISE}
    if isinstance(content, list):
        return (
            _words(content)
            if content and all(isinstance(item, str) for item in content)
            else [thing(x) for x in content]
        )
    return text(content) if isinstance(content, str) else content


def _value(key: str, value: Any) -> Any:
    if key in _FIELDS_OF_VALUES and isinstance(value, list):
        return [_variable(entry) for entry in value]
    if _TELLING.search(key) and not _REFERENCE.search(key) and isinstance(value, str | int | float | list):
        return GONE
    return thing(value)


def _variable(entry: Any) -> Any:
    """The name says enough."""
    if not isinstance(entry, Mapping):
        return GONE
    return {str(key): GONE if key == "value" else thing(value) for key, value in entry.items()}


def _words(command: list[str]) -> list[str]:
    """Of a command: what follows --token goes too."""
    found: list[str] = []
    for word in command:
        before = found[-1] if found else ""
        if _OPTION.match(before) and _TELLING.search(before) and not word.startswith("-"):
            found.append(GONE)
        else:
            found.append(text(word))
    return found
