"""Takes out of objects and logs what must not leave the company: values, credentials, addresses.

It is better to lose a harmless value than to give a secret away, so values of environment variables go
whatever they are called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiercheck.redaction import GONE, is_secret_name, redacted

_NOISE = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
_FIELDS_OF_VALUES = {"env"}
_OPTION = re.compile(r"^--?[A-Za-z0-9_.-]+$")


def clean(content: Any) -> Any:
    """An object of the API, or a part of one: a new one, without values that may be secret and without
    noise."""
    if isinstance(content, Mapping):
        return {str(key): _value(str(key), value) for key, value in content.items() if key not in _NOISE}
    if isinstance(content, list):
        return (
            _words(content)
            if content and all(isinstance(item, str) for item in content)
            else [clean(x) for x in content]
        )
    return redacted(content) if isinstance(content, str) else content


def _value(key: str, value: Any) -> Any:
    if key in _FIELDS_OF_VALUES and isinstance(value, list):
        return [_variable(entry) for entry in value]
    listed = isinstance(value, list) and not any(isinstance(item, Mapping) for item in value)
    if is_secret_name(key) and (listed or isinstance(value, str | float) or type(value) is int):
        return GONE
    return clean(value)


def _variable(entry: Any) -> Any:
    """The name says enough."""
    if not isinstance(entry, Mapping):
        return GONE
    return {str(key): GONE if key == "value" else clean(value) for key, value in entry.items()}


def _words(command: list[str]) -> list[str]:
    """Of a command: what follows --token goes too."""
    found: list[str] = []
    for word in command:
        before = found[-1] if found else ""
        secret = is_secret_name(before) or before.lower().endswith(("key", "auth"))
        if secret and _OPTION.match(before) and not word.startswith("-"):
            found.append(GONE)
        else:
            found.append(redacted(word))
    return found
