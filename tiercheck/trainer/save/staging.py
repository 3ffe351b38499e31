"""The copy of an artifact: lazy, so training goes on meanwhile, yet never torn.

State changes only inside `optimizer.step`. The copy runs in a thread between two updates, and the barrier in
front of the next update waits for what is left of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercheck.failpoints import failpoint
from tiercheck.trainer.deltas.watch import VersionCounters
from tiercheck.trainer.proof.proof import StateProof
from tiercheck.trainer.state.user_state import Packed
from tiercheck.trainer.tensors.leaves import Entry
from tiercheck.trainer.tensors.pending import Pending

CHUNK = 16 * 1024 * 1024
"""Bytes per copy call: long enough to be efficient, short enough that other threads get the interpreter in
between."""


class Crew:
    """Pieces (target, source) to be copied on the CPU, each by whoever comes first. Any thread may `help`:
    the saver's begins, and a training thread that has to wait for the copy lends a hand.
    """

    def __init__(
        self, pieces: Iterable[tuple[Tensor, Tensor]], copy: Callable[[Tensor, Tensor], None]
    ) -> None:
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
        """Copy what is left, and return when nobody copies any more. Raises what the copying of a piece
        raised."""
        self.help()
        with self._idle:
            self._idle.wait_for(lambda: self._copying == 0)
            if self._error is not None:
                raise self._error


@dataclass(kw_only=True)
class Snapshot(Pending):
    """A capture of the whole state. Its tensors are those of the model itself; small ones are already
    copies.
    """

    entries: Sequence[Entry]
    blob: Packed
    proof: StateProof
    """What the state was when `step` was called."""
    crew: Crew | None = None
    """Set before the copy begins, where the training thread can take part in it."""
    _changed: set[str] | None = None

    def __post_init__(self) -> None:
        self._lazy = [entry for entry in self.entries if entry.lazy]
        # Those of the live tensors: if one moves during the copy, the copy is torn.
        self._counters = VersionCounters(
            [entry.tensor if entry.origin is None else entry.origin for entry in self._lazy]
        )
        self._seen = self._counters.read()

    def changed(self) -> set[str]:
        """Names of tensors that something else than the optimizer has changed since the capture. Whoever asks
        first decides: when the copy has ended, or the next update begins.
        """
        with self._lock:
            if self._changed is None:
                moved = self._counters.moved(self._seen, self._counters.read())
                self._changed = {self._lazy[number].name for number in moved}
            return self._changed

    def let_go(self) -> None:
        if self.device is not None:
            self.changed()  # the copy goes on while the update changes everything, as seen by this thread
        super().let_go()


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """CPU to CPU, releasing the interpreter lock; chunked, so that no single call is long."""
    for to, chunk in _chunks(target, source):
        failpoint("mid-copy")
        to.copy_(chunk)


def pieces(items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(target, source) of every chunk of the named tensors."""
    return [piece for name, tensor in items for piece in _chunks(views[name], tensor)]


def _chunks(target: Tensor, source: Tensor) -> list[tuple[Tensor, Tensor]]:
    if not source.is_contiguous():
        return [(target, source)]
    count = max(1, CHUNK // source.element_size())
    flat, to = source.view(-1), target.view(-1)
    return [(to[at : at + count], flat[at : at + count]) for at in range(0, flat.numel(), count)] or [
        (to, flat)
    ]


def non_finite(named: Sequence[tuple[str, Tensor]]) -> str | None:
    """Name of the first floating-point tensor in the slot that holds an infinity or a NaN."""
    for name, view in named:
        if not view.is_floating_point() or view.element_size() < 2 or not view.numel():
            continue
        flat = view.view(-1)
        count = max(1, CHUNK // view.element_size())
        for start in range(0, flat.numel(), count):
            low, high = torch.aminmax(flat[start : start + count])
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None
