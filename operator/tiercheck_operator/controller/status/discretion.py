"""Takes credentials out of the status, which everyone with `view` may read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tiercheck.redaction import redacted

_EXACT = {"members", "sidecarImage", "hash", "node", "nodes", "type", "phase"}
"""Fields that decisions read back as they were."""

_LONGEST = 4000
"""Characters; what is longer already gets no longer by what stands in place of a credential."""


def without_credentials(status: dict[str, Any]) -> dict[str, Any]:
    """A rendered status with REDACTED in place of credentials. Once more changes nothing."""
    return {key: value if key in _EXACT else _without(value) for key, value in status.items()}


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return _hide(value)
    if isinstance(value, dict):
        return without_credentials(value)
    if isinstance(value, list):
        return [_without(entry) for entry in value]
    return value


@lru_cache(maxsize=4096)
def _hide(text: str) -> str:
    return redacted(text)[: max(len(text), _LONGEST)]
