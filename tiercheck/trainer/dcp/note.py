"""Writes what DCP must know of a slot beside its tensors: JSON and checked bytes, never a pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tiercheck.protocol.artifacts.contents import DCP, DCP_BYTES, DCP_PREFIX
from tiercheck.protocol.plain_json import parse_json
from tiercheck.trainer.state.readable import must_come_back, read_plain, write_plain
from tiercheck.trainer.tensors.leaves import NotCapturable

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Note:
    """Of one rank."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Entries whose name is not `dcp/` and the tensor's name: a rank may hold several chunks of one tensor.
    """
    grad: frozenset[str] = frozenset()
    """Names of tensors that require a gradient."""
    pinned: frozenset[str] = frozenset()
    """Names of tensors that were page-locked."""
    items: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Where in entry `dcp_bytes` the items lie that are no tensors."""
    planner: Mapping[str, Path] | None = None
    """The default planner's: where each name was in the nested state."""

    def fqn(self, entry: str) -> str:
        """The tensor's name in the state."""
        return self.names.get(entry, entry.removeprefix(DCP_PREFIX))

    def written(self) -> bytes:
        """As JSON."""
        return json.dumps(
            {
                "names": dict(self.names),
                "grad": sorted(self.grad),
                "pinned": sorted(self.pinned),
                "bytes": {fqn: list(place) for fqn, place in self.items.items()},
                "planner": None
                if self.planner is None
                else [[fqn, list(path)] for fqn, path in self.planner.items()],
            },
            separators=(",", ":"),
        ).encode()

    @staticmethod
    def read(text: bytes) -> Note:
        """Raises ValueError, KeyError, TypeError or AttributeError if it is none."""
        raw = parse_json(text)
        planner = raw["planner"]
        return Note(
            {str(entry): str(fqn) for entry, fqn in raw["names"].items()},
            frozenset(raw["grad"]),
            frozenset(raw["pinned"]),
            {str(fqn): (int(place[0]), int(place[1])) for fqn, place in raw["bytes"].items()},
            None if planner is None else {str(fqn): tuple(path) for fqn, path in planner},
        )


LENGTHS = {DCP: "dcp_length", DCP_BYTES: "dcp_bytes_length"}
"""Metadata keys with the bytes that are used of these entries."""


def planner_paths(data: Any) -> dict[str, Path] | None:
    """A plan's `planner_data`, if it is what torch's own planner puts there. Raises NotCapturable."""
    if data is None:
        return None
    plain = isinstance(data, Mapping) and all(
        isinstance(fqn, str)
        and isinstance(path, (tuple, list))
        and all(type(part) in (str, int) for part in path)
        for fqn, path in data.items()
    )
    if not plain:
        raise NotCapturable(
            "the planner's own data is not names and paths, so it could only be stored as a pickle"
        )
    return {fqn: tuple(path) for fqn, path in data.items()}


def readable(fqn: str, content: bytes, value: Callable[[], Any] | None) -> bytes:
    """`content` if it can be read without running code; otherwise `value`, if a planner shows it, written so
    that it can. Raises NotCapturable."""
    try:
        read_plain(content, fqn)
    except NotCapturable:
        if value is None:
            raise
        must_come_back(found := value(), fqn)
        return write_plain(found, fqn)
    return content


def rewrite_for_planner(fqn: str, content: bytes) -> io.BytesIO:
    """For a planner, which unpickles without any check: the same value, written anew. Raises NotCapturable.

    What was stored never reaches that unpickler itself.
    """
    buffer = io.BytesIO()
    torch.save(read_plain(content, fqn), buffer)
    buffer.seek(0)
    return buffer
