"""One Checkpointer for one place: two of the same process, as for the two models of a GAN, would write over each other's versions."""

from __future__ import annotations

import os

_held: set[tuple[int, str]] = set()


class Claim:
    """Of a place, until it is released."""

    def __init__(self, place: str) -> None:
        """Raises ValueError if another one of this process has it. A forked one begins anew."""
        self._key = os.getpid(), place
        if self._key in _held:
            raise ValueError(
                f"another Checkpointer of this process saves to {place}: close it first, or give all models and optimizers to"
                " one (torch.nn.ModuleDict, a list of optimizers)"
            )
        _held.add(self._key)

    def release(self) -> None:
        """May be called twice."""
        _held.discard(self._key)
