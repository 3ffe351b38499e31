"""Names a training and records what its script was given, so that a resume reports what has changed."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

_PLAIN = (bool, int, float, str, type(None))
TRAINING = "training"
"""The key of these facts in a snapshot."""
_MANY = 64
"""The number of parameter groups that are recorded."""


def name_of(run: str | None) -> str:
    """Returns the name of the training: `run`, else the script's file."""
    if run:
        return run
    path = PurePath(sys.argv[0] if sys.argv else "")
    return str(PurePath(path.parent.name, path.name)) if path.stem == "__main__" else path.name


_ended: Counter[tuple[str, str]] = Counter()
"""The number of trainings of this process that have ended, by folder and name."""


def name_run(folder: Path | str | None, run: str | None) -> str | None:
    """Returns the name of the training that begins: `run`, numbered from the process's second one on."""
    ended = _ended[str(folder), name_of(run)]
    return f"{name_of(run)}.{ended + 1}" if ended else run


def end_run(folder: Path | str | None, run: str | None) -> None:
    """Records that the training named `run` has ended: the next one in this process is another training."""
    _ended[str(folder), name_of(run)] += 1


def fingerprint(name: str) -> int:
    """Returns a 32-bit fingerprint of a training's name."""
    return zlib.crc32(name.encode())


@dataclass(frozen=True)
class TrainingIdentity:
    """The arguments and hyper-parameters that this run's script was given, as each snapshot stores them."""

    arguments: int
    """The fingerprint of the command line."""
    given: Mapping[str, Any]
    """The hyper-parameters and batch sizes before anything was restored, by where they are set."""

    @staticmethod
    def look(optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> TrainingIdentity:
        """Reads the values from the script's objects, before these are loaded."""
        given = {
            f"{_place_of(index, number)}{key}": value
            for index, optimizer in enumerate(optimizers)
            for number, group in enumerate(optimizer.param_groups[:_MANY])
            for key, value in _first_of(group).items()
        }
        for name, each in state.items():
            try:
                size = getattr(each, "batch_size", None)
            except Exception:  # of its own __getattr__, which may raise KeyError
                continue
            if type(size) is int:
                given[f"state[{name!r}]: batch_size"] = size
        return TrainingIdentity(zlib.crc32("\0".join(sys.argv[1:]).encode()), given)

    def facts(self) -> dict[str, Any]:
        return {"arguments": self.arguments, "given": dict(self.given)}

    def changes(self, saved: Mapping[str, Any]) -> list[str]:
        """Returns what differs from the run that saved these facts: where, the old and the new value."""
        before = saved.get("given", {})
        found = [
            f"{place} is {now!r} here, it was {before[place]!r}"
            for place, now in self.given.items()
            if place in before and before[place] != now
        ]
        if not found and saved.get("arguments", self.arguments) != self.arguments:
            found.append("the command line has other arguments")
        return found


def keys_given(facts: Mapping[str, Any], index: int) -> list[list[str]]:
    """Returns the keys that the groups of an optimizer had when the run began that saved `facts`."""
    given = facts.get(TRAINING, {}).get("given", {})
    places = [_place_of(index, number) for number in range(len(facts["optimizers"][index]["groups"][:_MANY]))]
    return [[key.removeprefix(place) for key in given if key.startswith(place)] for place in places]


def _place_of(index: int, number: int) -> str:
    return f"optimizer {index}, group {number}: "


def _first_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a parameter group as the script set them, before a schedule moved the rate."""
    values = {key: _plain(value) for key, value in group.items() if key != "params"}
    if "initial_lr" in values:
        values["lr"] = values.pop("initial_lr")
    return {key: value for key, value in values.items() if isinstance(value, (*_PLAIN, tuple))}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if type(value) in (tuple, list):
        return tuple(map(_plain, value)) if all(isinstance(each, (*_PLAIN, Tensor)) for each in value) else ()
    return value
