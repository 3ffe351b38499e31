"""Paths of the API server. Names come from objects that anybody may write: none of them becomes more than the one segment it stands for."""

from __future__ import annotations

from urllib.parse import quote


def fill(path: str, **names: str) -> str:
    """The path with its segments filled in. Raises ValueError for what is no name."""
    for key, name in names.items():
        if name in ("", ".", ".."):  # which clients resolve, quoted or not
            raise ValueError(f"{name!r} is no {key}")
    return path.format(**{key: quote(name, safe="") for key, name in names.items()})
