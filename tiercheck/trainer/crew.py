"""A copy that several threads share: the saver's begins it, and a training thread that has to wait for it lends a hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class Crew:
    """Pieces (target, source) to be copied on the CPU, each by whoever comes first. Any thread may `help`."""

    def __init__(self, pieces: Iterable[tuple[Tensor, Tensor]], copy: Callable[[Tensor, Tensor], None]) -> None:
        """`copy(target, source)` must let go of the interpreter lock for large pieces."""
        self._pieces = iter(list(pieces))
        self._copy = copy
        self._idle = threading.Condition()
        self._copying = 0
        self._error: Exception | None = None

    @torch.no_grad()
    def help(self) -> None:
        """Copy until no piece is left to begin. Raises nothing: `join` does."""
        while True:
            with self._idle:
                piece = next(self._pieces, None) if self._error is None else None
                if piece is None:
                    return
                self._copying += 1
            error: Exception | None = None
            try:
                self._copy(*piece)
            except Exception as raised:  # told by `join`, in the thread that can deal with it
                error = raised
            finally:
                with self._idle:
                    self._copying -= 1
                    self._error = self._error or error
                    self._idle.notify_all()

    def join(self) -> None:
        """Copy what is left, and return when nobody copies any more. Raises what the copying of a piece raised."""
        self.help()
        with self._idle:
            self._idle.wait_for(lambda: self._copying == 0)
            if self._error is not None:
                raise self._error
