"""Decides whether deltas are taken, and writes a delta to its slot: encoded, copied and sealed.

The size of deltas determines how often snapshots are taken, and whether the deltas fit into memory. Their
duration determines whether they are taken at all: training waits for the copy of one step before the next, so
long deltas would slow it down. All are taken or none, because a chain with a gap cannot be replayed.

After a gap, none is taken until there is a new snapshot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.backend import Skipped
from tiercheck.trainer.deltas.delta_format import (
    REPLAY_BLOB,
    REPLAY_BYTES,
    Delta,
    DeltaPlan,
    Planner,
    replay_blob,
)
from tiercheck.trainer.deltas.unseen import UntrackedTensors
from tiercheck.trainer.deltas.watch import Mark
from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.slot_context import Cancelled, Job, SaveContext
from tiercheck.trainer.save.staging import DeviceCopy
from tiercheck.trainer.state.slot_file import USER_BLOB, USER_BYTES, bytes_into
from tiercheck.trainer.tensors.samples import Sample
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

MOST = 0.8
"""The part of a step that its delta may take.

The rest is for snapshots, and for the update itself, during which nothing is copied."""
AGAIN = 0.4
"""The part of a step below which paused deltas resume; lower, so that small variations have no effect."""
ASKED, ASKED_AGAIN = 0.05, 0.025
"""The part of a step that `get_extra_state` of modules may take, and the part to resume deltas.

Training is blocked meanwhile. Some modules (TransformerEngine's with fp8) each wait for the device, so that
the host loses its lead."""
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 8
"""The time and number of steps that must pass before a decision: first deltas touch new memory."""
_KEPT = 1024
"""The most measurements kept of a window."""


def there_is_time(taken: bool, delta: float, step: float, asked: float = 0.0) -> bool:
    """Returns whether deltas should be taken at every step. `taken`: whether they are already taken.

    `delta`: seconds of the saver for one delta. `step`: seconds of a step without waiting for copies, of
    which modules take `asked` for their extra state."""
    return delta <= (MOST if taken else AGAIN) * step and asked <= (ASKED if taken else ASKED_AGAIN) * step


class DeltaBudget:
    """Measures deltas, reported by the saver thread, and steps, reported by the training thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deltas: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._asked: deque[float] = deque(maxlen=_KEPT)
        self._waited = 0.0
        self._last = self._window = clock()
        self.delta = self.asked = 0.0
        """Seconds per delta and for extra state, in the newest window with enough of them."""
        self.step = 0.0
        """Seconds per step."""

    def begin_step(self) -> None:
        """Starts the measurement at the first step."""
        self._last = self._window = self._clock()
        self._waited = 0.0

    def note_work(self, seconds: float) -> None:
        """Adds the seconds of work for a delta. Called by the saver thread."""
        self._deltas.append(seconds)

    def note_wait(self, seconds: float) -> None:
        """Adds seconds in which training only waited for copies."""
        self._waited += seconds

    def note_extra_state(self, seconds: float) -> None:
        self._asked.append(seconds)

    def ends_step(self, taken: bool) -> bool:
        """Ends a step. Returns whether to take deltas from here on. `taken`: whether they are taken now."""
        now = self._clock()
        self._steps.append(max(0.0, now - self._last - self._waited))
        self._last, self._waited = now, 0.0
        enough = len(self._steps) >= WINDOW_STEPS and (not taken or len(self._deltas) >= WINDOW_STEPS)
        if not enough or now - self._window < WINDOW_SECONDS:
            return taken
        # Medians, because evaluations and first touches of slots are exceptions.
        self.step = median(self._steps)
        if taken:
            self.delta = median(list(self._deltas))
            self.asked = median(list(self._asked)) if self._asked else 0.0
        self._window = now
        self._deltas.clear()
        self._steps.clear()
        self._asked.clear()
        return there_is_time(taken, self.delta, self.step, self.asked)


class DeltaChain:
    """Tracks the steps that a chain can reach, from reports of the training and the saver thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begun = False
        """True once there was a snapshot from which to begin."""
        self._gap = 0
        """The newest step without a delta."""
        self._bases: set[int] = set()
        """The steps of the newest snapshots, complete or being taken, from which a chain may begin."""

    def restored(self, step: int) -> None:
        """Begins at a restored version, which the tiers hold with its whole chain."""
        with self._lock:
            self.begun = True
            self._bases = {step}
            self._gap = step

    def snapshot(self, step: int) -> None:
        """Adds a snapshot when it begins: waiting for its completion would leave a gap of deltas after it."""
        with self._lock:
            self.begun = True
            self._bases.add(step)
            self._bases = set(sorted(self._bases)[-2:])

    def snapshot_failed(self, step: int) -> None:
        with self._lock:
            self._bases.discard(step)

    def delta_missing(self, step: int) -> None:
        with self._lock:
            self._gap = max(self._gap, step)

    def reaches(self, step: int) -> bool:
        """Returns whether the delta of `step` would continue a chain."""
        with self._lock:
            return any(self._gap <= base < step for base in self._bases)


_UNIT = 64 * 1024
_BLANK = "0" * 32  # a placeholder with the length of a fingerprint


@dataclass(frozen=True)
class Script:
    """The properties of the script that the saver thread needs for deltas."""

    optimizers: Sequence[Optimizer]
    planner: Planner
    copy_at_once: Callable[[int, Sequence[int]], None]
    """A function called with an optimizer's gradients that were overwritten while they were read."""
    is_still: Callable[[Mark], bool]
    """The function returned by `Watch.elsewhere`."""
    untracked: UntrackedTensors


class Measured(Exception):
    """Ends the job of a delta that was only to be measured."""


class DeltaJob(Job):
    kind = Kind.DELTA

    def __init__(self, context: SaveContext, delta: Delta, script: Script) -> None:
        super().__init__(context, delta)
        self._delta = delta
        self._script = script
        self._plan: DeltaPlan
        self._hashes: state_hash.Folded
        self._looked: tuple[Mapping[str, Tensor], Sample] | None = None
        self.seconds = 0.0
        """Seconds of work in this thread, without waiting for a device to reach the end of the step."""

    def copy(self) -> None:
        """Copies the delta, or starts the copy on a device. Also raises Measured."""
        delta, context = self._delta, self._context
        begun = time.monotonic()
        context.follow(delta)
        try:
            plan = self._script.planner.plan(delta)
            turn = [tensor for _, tensor in state_hash.state_of_turn(self._script.optimizers, delta.step)]
            longest = replay_blob(plan, [_BLANK] * len(turn), delta.threads)
            self._layout = self._script.planner.layout(plan.items, len(longest), len(delta.blob.written()))
        except NotCapturable as error:
            raise Skipped("NotCapturable", str(error)) from error
        self._plan = plan
        self._make_room()
        if delta.only_measure:
            raise Measured
        self._path = context.backend.begin(delta.step, self._layout.size, self.kind)
        self._guarded(lambda: self._copy(plan, turn))
        self.seconds = time.monotonic() - begun

    def land(self) -> None:
        if self._device_copy is not None and self._delta.ready is not None:
            self._guarded(self._land)

    def finish(self) -> None:
        begun = time.monotonic()
        super().finish()
        self.seconds += time.monotonic() - begun

    def _make_room(self) -> None:
        """Reserves slots for this delta and slightly larger ones, at most for dense deltas."""
        size = self._layout.size
        if size <= self._context.delta_room:
            return
        outgrew = self._context.delta_room > 0
        tensors = sum(item.tensor.nbytes for item in self._plan.items)
        dense = size - tensors + self._script.planner.dense_bytes(self._delta) + _UNIT
        room = max(size, min(dense, size + size // 4))
        self._context.delta_room = -(-room // _UNIT) * _UNIT
        self._context.backend.reserve(self._context.snapshot_room, self._context.delta_room)
        if outgrew:
            raise Skipped("DeltaOutgrew", f"it needs {size} bytes; larger slots are reserved")

    @torch.no_grad()
    def _copy(self, plan: DeltaPlan, turn: list[Tensor]) -> None:
        delta = self._delta
        writer = self._context.slots.open(self._path)
        self._views = writer.begin(self._layout)
        if delta.device is not None:
            writer.pin()  # before training waits for this artifact: it may take seconds
        if not delta.start():
            raise Cancelled
        if delta.device is None:
            for item in plan.items:
                name, tensor = item.hand_over()
                staging.copy_tensor(self._views[name], tensor)
                item.copied()  # its gradient is released at once
            self._refuse_torn()
        # The state does not change until the barrier lets the next update begin.
        self._hashes = state_hash.fold(turn)
        if not self._script.is_still(delta.seen):
            raise Skipped(
                "Inexact", "something else than an update changed the state before its fingerprint was taken"
            )
        if delta.device is not None:
            self._looked = self._script.untracked.look()
            self._device_copy = DeviceCopy(delta.device)
            must = frozenset(item.name for item in plan.items if item.must_be_finite)
            items = (item.hand_over() for item in plan.items)
            self._device_copy.begin(items, self._views, must if self._context.gate() else ())
            delta.done = delta.device.passed()

    def _land(self) -> None:
        assert self._device_copy is not None
        assert self._delta.ready is not None
        self._delta.ready.synchronize()
        begun = time.monotonic()
        by_name = {item.name: item for item in self._plan.items}
        self._device_copy.land(lambda name: by_name[name].copied())
        self._refuse_torn()
        self.seconds += time.monotonic() - begun

    def _consumed(self) -> list[str]:
        """Returns the names of the gradients that an update used."""
        left_out = {id(event) for event in self._delta.events if event.left_out()}
        return [
            item.name for item in self._plan.items if item.must_be_finite and id(item.event) not in left_out
        ]

    def _refuse_torn(self) -> None:
        """Raises Skipped if a gradient was overwritten before it was copied."""
        torn = [event for event in self._delta.events if event.torn]
        for event in torn:
            self._script.copy_at_once(event.optimizer, event.torn)
        if torn:
            raise Skipped(
                "GradientReused", "one was overwritten while it was copied; it is copied at once from now on"
            )

    def _finish(self) -> None:
        delta = self._delta
        if self._looked is not None:
            told = {f"model/{name}" for name, _ in delta.buffers}
            if name := self._script.untracked.delta(delta.step, self._looked, told):
                raise Skipped(
                    "Inexact", f"{name}, which no optimizer updates, was changed behind torch's counters"
                )
        blob = replay_blob(self._plan, self._hashes.texts(), delta.threads)
        bytes_into(self._views[REPLAY_BLOB], blob)
        bytes_into(self._views[USER_BLOB], delta.blob.written())
        if self._context.gate():
            self._refuse_non_finite(self._consumed())
        self._seal({USER_BYTES: str(len(delta.blob.written())), REPLAY_BYTES: str(len(blob))})
