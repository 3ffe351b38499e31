"""Copies an artifact out of the state lazily, so that training continues, yet never torn.

State changes only inside `optimizer.step`. The copy runs in a thread between two updates, and the barrier
before the next update waits for the rest of it.

A device gets all copies at once and in order. Small tensors are packed, because the cost per copy exceeds
that of their bytes. The check for finite values runs on the device, at the speed of its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercheck.failpoints import failpoint
from tiercheck.trainer.deltas.watch import VersionCounters
from tiercheck.trainer.proof.proof import StateProof
from tiercheck.trainer.state.user_state import Packed
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, Pending
from tiercheck.trainer.tensors.tensor_parts import Entry, has_plain_bytes

CHUNK = 16 * 1024 * 1024
"""Bytes per copy call: enough to be efficient, few enough to let other threads run in between."""


class ParallelCopy:
    """Copies pieces (target, source) on the CPU in all threads that call `assist`.

    The saver thread begins, and a training thread that has to wait for the copy takes part."""

    def __init__(
        self, pieces: Iterable[tuple[Tensor, Tensor]], copy: Callable[[Tensor, Tensor], None]
    ) -> None:
        """`copy(target, source)` must release the interpreter lock for large pieces."""
        self._pieces = iter(list(pieces))
        self._copy = copy
        self._idle = threading.Condition()
        self._copying = 0
        self._error: Exception | None = None

    @torch.no_grad()
    def assist(self) -> None:
        """Copies until no piece is left to begin. Raises nothing; `join` raises errors."""
        while True:
            with self._idle:
                piece = next(self._pieces, None) if self._error is None else None
                if piece is None:
                    return
                self._copying += 1
            error: Exception | None = None
            try:
                self._copy(*piece)
            except Exception as raised:  # raised by `join`, in the thread that can handle it
                error = raised
            finally:
                with self._idle:
                    self._copying -= 1
                    self._error = self._error or error
                    self._idle.notify_all()

    def join(self) -> None:
        """Copies the rest, and waits for other threads' pieces. Raises the first error of a copy."""
        self.assist()
        with self._idle:
            self._idle.wait_for(lambda: self._copying == 0)
            if self._error is not None:
                raise self._error


@dataclass(kw_only=True)
class Snapshot(Pending):
    """A capture of the whole state. Its tensors are those of the model itself, except early copies."""

    entries: Sequence[Entry]
    blob: Packed
    proof: StateProof
    """The proof of the state when `step` was called."""
    parallel_copy: ParallelCopy | None = None
    """The copy in which the training thread can take part; set before the copy begins."""
    _changed: set[str] | None = None

    def __post_init__(self) -> None:
        self._lazy = [entry for entry in self.entries if entry.lazy]
        # The counters of the live tensors: if one changes during the copy, the copy is torn.
        self._counters = VersionCounters(
            [entry.tensor if entry.origin is None else entry.origin for entry in self._lazy]
        )
        self._seen = self._counters.read()

    def changed(self) -> set[str]:
        """Returns the names of tensors that other code than the optimizer has changed since the capture.

        The first call fixes the result: at the end of the copy, or at the start of the next update."""
        with self._lock:
            if self._changed is None:
                moved = self._counters.moved(self._seen, self._counters.read())
                self._changed = {self._lazy[number].name for number in moved}
            return self._changed

    def mark_moved(self) -> None:
        if self.device is not None:
            self.changed()  # the device's copy continues while this thread starts the update
        super().mark_moved()


def copy_tensor(target: Tensor, source: Tensor) -> None:
    """Copies from CPU to CPU without the interpreter lock, in chunks, so that no call is long."""
    for to, chunk in _chunks(target, source):
        failpoint("mid-copy")
        to.copy_(chunk)


def pieces(items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns (target, source) of every chunk of the named tensors."""
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
    """Returns the name of the first floating-point tensor with an infinity or a NaN; None: none."""
    for name, view in named:
        if not _may_be_infinite(view) or not view.numel():
            continue
        flat = view.view(-1)
        count = max(1, CHUNK // view.element_size())
        for start in range(0, flat.numel(), count):
            low, high = torch.aminmax(flat[start : start + count])
            if not (torch.isfinite(low) and torch.isfinite(high)):
                return name
    return None


SMALL = 64 * 1024
"""Bytes. Smaller tensors are packed."""
_STAGE = 64 * 1024 * 1024
"""Bytes between marks, at which earlier tensors may be released."""


@dataclass
class _Stage:
    """Copies that are complete once the device has passed `mark`.

    The tensors are referenced, so that their memory is not reused."""

    mark: Mark
    names: list[str]
    sources: list[Tensor]


@dataclass
class DeviceCopy:
    """Running copies of named tensors from a device. The saver thread calls `begin`, then `land`."""

    device: Accelerator
    _stages: list[_Stage] = field(default_factory=list)
    _packed: Tensor | None = None
    _small: list[tuple[str, Tensor]] = field(default_factory=list)
    """The names and targets of small tensors, in the order of packing."""
    _checked: list[str] = field(default_factory=list)
    _finite: Tensor | None = None
    _judged: list[tuple[str, Tensor]] = field(default_factory=list)
    """The tensors to be checked on the host after their arrival."""

    @torch.no_grad()
    def begin(
        self, items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor], finite: Collection[str] = ()
    ) -> None:
        """Enqueues all copies on the device. `finite`: names of tensors to check with `non_finite`."""
        try:
            self._begin(items, views, finite)
        except BaseException:
            self.device.passed().synchronize()  # no copy may write to a slot that is given back
            raise

    def _begin(
        self, items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor], finite: Collection[str]
    ) -> None:
        small: list[tuple[str, Tensor]] = []
        names: list[str] = []
        sources: list[Tensor] = []
        size = 0
        extremes: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in items:
            target, look = views[name], name in finite
            if not self.device.has(tensor):
                copy_tensor(target, tensor)
                names.append(name)
            elif tensor.nbytes < SMALL and has_plain_bytes(tensor):
                small.append((name, tensor))
            else:
                if look and _may_be_infinite(tensor):
                    low, high = torch.aminmax(tensor)
                    extremes.setdefault(tensor.dtype, []).extend(((name, low), (name, high)))
                    look = False
                self.device.fetch(target, tensor)
                names.append(name)
                sources.append(tensor)
                size += tensor.nbytes
            if look:
                self._judged.append((name, target))
            if size >= _STAGE:
                self._stages.append(_Stage(self.device.passed(), names, sources))
                names, sources, size = [], [], 0
        self._pack(small, views)
        self._fetch_extremes(extremes)
        names += (name for name, _ in small)
        sources += (tensor for _, tensor in small)
        self._stages.append(_Stage(self.device.passed(), names, sources))

    @torch.no_grad()
    def land(self, landed: Callable[[str], None] = lambda name: None) -> None:
        """Waits for all copies. May be called again.

        `landed` is called with each name as soon as its tensor may be released."""
        while self._stages:
            stage = self._stages.pop(0)
            stage.mark.synchronize()
            stage.sources.clear()
            for name in stage.names:
                landed(name)
        if self._packed is not None:
            at = 0
            for _, target in self._small:
                if target.nbytes:
                    target.view(-1).view(torch.uint8).copy_(self._packed[at : at + target.nbytes])
                at += target.nbytes
            self._packed = None

    def non_finite(self, names: Collection[str]) -> str | None:
        """Returns the first of these checked names with an infinity or a NaN, if any. Call after `land`."""
        if self._finite is not None:
            for name, good in zip(self._checked, self._finite.tolist(), strict=True):
                if not good and name in names:
                    return name
        return non_finite([(name, target) for name, target in self._judged if name in names])

    def _pack(self, small: list[tuple[str, Tensor]], views: Mapping[str, Tensor]) -> None:
        if not small:
            return
        together = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in small])
        self._packed = self.device.room(together.numel())
        self._small = [(name, views[name]) for name, _ in small]
        self.device.fetch(self._packed, together)

    def _fetch_extremes(self, found: Mapping[torch.dtype, list[tuple[str, Tensor]]]) -> None:
        if not found:
            return
        finite = torch.cat([torch.stack([value for _, value in each]).isfinite() for each in found.values()])
        self._checked = [name for each in found.values() for name, _ in each]
        self._finite = self.device.room(finite.numel()).view(torch.bool)
        self.device.fetch(self._finite, finite)


def _may_be_infinite(tensor: Tensor) -> bool:
    """Returns whether a tensor's dtype has infinities that can be looked for."""
    return tensor.is_floating_point() and tensor.element_size() >= 2
