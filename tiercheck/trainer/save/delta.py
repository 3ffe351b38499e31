"""Decides which deltas are worth taking, and brings one into its slot: encoded, copied and sealed.

The bytes of deltas decide how often snapshots are taken, and whether memory holds them. Their time decides
whether they are taken at all: training waits for the copy of one step before it makes the next. Deltas that
take as long as steps do would slow it down, so all are taken or none: a chain with a gap leads nowhere.

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

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.backend import Skipped
from tiercheck.trainer.deltas.delta_format import (
    REPLAY_BLOB,
    REPLAY_BYTES,
    Delta,
    DeltaPlan,
    Item,
    Planner,
    replay_blob,
)
from tiercheck.trainer.deltas.unseen import Untold
from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.slot_context import Cancelled, Desk, Job
from tiercheck.trainer.save.staging import Flight
from tiercheck.trainer.state.slot_file import USER_BLOB, USER_BYTES, bytes_into
from tiercheck.trainer.tensors.leaves import NotCapturable
from tiercheck.trainer.tensors.samples import Sample

MOST = 0.8
"""The part of a step that its delta may take. What is left is for the update itself, during which nothing is
copied, and for snapshots."""
AGAIN = 0.4
"""The same where none are taken: further below, so that the answer does not change with every breath of the
machine."""
ASKED, ASKED_AGAIN = 0.05, 0.025
"""The part of a step that modules may take to tell what they keep beside their tensors. Training stands still
meanwhile: some (TransformerEngine's with fp8) wait for the device, each of them, so that the lead of the host
is lost."""
WINDOW_SECONDS = 60.0
WINDOW_STEPS = 8
"""Both must have passed before there is an answer: the first deltas pay for memory that is touched for the
first time."""
_KEPT = 1024
"""Measurements of a window."""


def there_is_time(taken: bool, delta: float, step: float, asked: float = 0.0) -> bool:
    """Whether deltas shall be taken at every step. `taken`: whether they are now. Seconds that one takes the
    saver, that a step takes without what it waits for copies, and that modules take of it to tell their extra
    state.
    """
    return delta <= (MOST if taken else AGAIN) * step and asked <= (ASKED if taken else ASKED_AGAIN) * step


class Pace:
    """Measures both. The saver's thread reports deltas, the training thread all else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deltas: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[float] = deque(maxlen=_KEPT)
        self._asked: deque[float] = deque(maxlen=_KEPT)
        self._waited = 0.0
        self._last = self._window = clock()
        self.delta = self.asked = 0.0
        """Seconds of a delta, by the newest window that had enough of them."""
        self.step = 0.0
        """Seconds of a step."""

    def begin_step(self) -> None:
        """The first step begins now."""
        self._last = self._window = self._clock()
        self._waited = 0.0

    def note_work(self, seconds: float) -> None:
        """Saver: a delta is in its slot after so much work."""
        self._deltas.append(seconds)

    def note_wait(self, seconds: float) -> None:
        """For copies, where nothing else could go on meanwhile."""
        self._waited += seconds

    def note_extra_state(self, seconds: float) -> None:
        """So long modules took to tell their extra state."""
        self._asked.append(seconds)

    def ends_step(self, taken: bool) -> bool:
        """A step ends. Whether deltas shall be taken from now on, given whether they are now."""
        now = self._clock()
        self._steps.append(max(0.0, now - self._last - self._waited))
        self._last, self._waited = now, 0.0
        enough = len(self._steps) >= WINDOW_STEPS and (not taken or len(self._deltas) >= WINDOW_STEPS)
        if not enough or now - self._window < WINDOW_SECONDS:
            return taken
        # Evaluations, and slots that are touched for the first time, are not the rule: so medians.
        self.step = median(self._steps)
        if taken:
            self.delta = median(list(self._deltas))
            self.asked = median(list(self._asked)) if self._asked else 0.0
        self._window = now
        self._deltas.clear()
        self._steps.clear()
        self._asked.clear()
        return there_is_time(taken, self.delta, self.step, self.asked)


class Unbroken:
    """Which steps a chain can reach. Both the training thread and the saver's report here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = False
        self._gap = 0
        """Newest step whose delta is missing."""
        self._bases: set[int] = set()
        """Steps of snapshots taken, or being taken, from which every delta since was taken as well."""

    @property
    def begun(self) -> bool:
        """Whether there was ever a snapshot to begin from."""
        return self._begun

    def restored(self, step: int) -> None:
        """Training begins from a version that the tiers hold, chain and all."""
        with self._lock:
            self._begun = True
            self._bases = {step}
            self._gap = step

    def snapshot(self, step: int) -> None:
        """A snapshot was begun. It counts at once: if deltas waited until it is complete, they would leave a
        gap behind it."""
        with self._lock:
            self._begun = True
            self._bases.add(step)
            self._bases = set(sorted(self._bases)[-2:])

    def snapshot_failed(self, step: int) -> None:
        with self._lock:
            self._bases.discard(step)

    def delta_missing(self, step: int) -> None:
        with self._lock:
            self._gap = max(self._gap, step)

    def reaches(self, step: int) -> bool:
        """Whether the delta of `step` would continue a chain."""
        with self._lock:
            return any(self._gap <= base < step for base in self._bases)


_UNIT = 64 * 1024
_BLANK = "0" * 32  # a fingerprint not yet known has the length of one


@dataclass(frozen=True)
class Script:
    """What deltas are taken of, as far as the saver's thread must know it."""

    optimizers: Sequence[Optimizer]
    planner: Planner
    copy_at_once: Callable[[int, Sequence[int]], None]
    """Told which gradients of an optimizer were overwritten while they were read."""
    is_still: Callable[[list[int]], bool]
    """`Watch.elsewhere`."""
    untold: Untold


class Measured(Exception):
    """The delta was only to be measured."""


class DeltaJob(Job):
    kind = Kind.DELTA

    def __init__(self, desk: Desk, delta: Delta, script: Script) -> None:
        super().__init__(desk, delta)
        self._delta = delta
        self._script = script
        self._layout: SlotLayout
        self._plan: DeltaPlan
        self._by_name: dict[str, Item] = {}
        self._hashes: state_hash.Folded
        self._looked: tuple[Mapping[str, Tensor], Sample] | None = None
        self.seconds = 0.0
        """What it took this thread so far, without what it waited for a device to come to the end of the
        step."""

    def copy(self) -> None:
        """Raises Measured as well."""
        delta, desk = self._delta, self._desk
        begun = time.monotonic()
        desk.follow(delta)
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
        self._path = desk.backend.begin(delta.step, self._layout.size, self.kind)
        self._guarded(lambda: self._copy(plan, turn))
        self.seconds = time.monotonic() - begun

    def land(self) -> None:
        if self._flight is not None and self._delta.ready is not None:
            self._guarded(self._land)

    def finish(self) -> None:
        begun = time.monotonic()
        self._guarded(self._finish)
        self._desk.backend.complete(self._path, self._delta.step, self._layout.size, self.kind)
        self.seconds += time.monotonic() - begun

    def _make_room(self) -> None:
        """Have slots made that this delta, and a little larger ones, fit into; never more than dense ones
        need."""
        size = self._layout.size
        if size <= self._desk.delta_room:
            return
        outgrew = self._desk.delta_room > 0
        tensors = sum(item.tensor.nbytes for item in self._plan.items)
        dense = size - tensors + self._script.planner.dense_bytes(self._delta) + _UNIT
        room = max(size, min(dense, size + size // 4))
        self._desk.delta_room = -(-room // _UNIT) * _UNIT
        self._desk.backend.reserve(self._desk.snapshot_room, self._desk.delta_room)
        if outgrew:
            raise Skipped("DeltaOutgrew", f"it needs {size} bytes; larger slots are reserved")

    @torch.no_grad()
    def _copy(self, plan: DeltaPlan, turn: list[Tensor]) -> None:
        delta = self._delta
        writer = self._desk.open(self._path)
        self._views = writer.begin(self._layout)
        if delta.device is not None:
            writer.pin()  # before anybody waits for this artifact: it may take seconds
        if not delta.start():
            raise Cancelled
        self._by_name = {item.name: item for item in plan.items}
        if delta.device is None:
            self._copy_items(plan.items)
        # The state stays as it is until the barrier lets the next update begin.
        self._hashes = state_hash.fold(turn)
        if not self._script.is_still(delta.seen):
            raise Skipped(
                "Inexact", "something else than an update changed the state before its fingerprint was taken"
            )
        if delta.device is not None:
            self._looked = self._script.untold.look()
            self._flight = Flight(delta.device)
            must = frozenset(item.name for item in plan.items if item.must_be_finite)
            items = (item.hand_over() for item in plan.items)
            self._flight.begin(items, self._views, must if self._desk.gate() else ())
            delta.done = delta.device.passed()

    def _copy_items(self, items: list[Item]) -> None:
        """Each gradient is let go as soon as it is copied. Raises Skipped if one was overwritten before."""
        for item in items:
            name, tensor = item.hand_over()
            staging.copy_tensor(self._views[name], tensor)
            item.copied()
        self._refuse_torn()

    def _land(self) -> None:
        assert self._flight is not None
        assert self._delta.ready is not None
        self._delta.ready.synchronize()
        begun = time.monotonic()
        self._flight.land(lambda name: self._by_name[name].copied())
        self._refuse_torn()
        self.seconds += time.monotonic() - begun

    def _consumed(self) -> list[str]:
        """Names of the gradients that an update was made of."""
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

    def _refuse_untold(self) -> None:
        """Raises Skipped if something was changed that the delta does not tell of."""
        if self._looked is not None:
            told = {f"model/{name}" for name, _ in self._delta.buffers}
            if name := self._script.untold.delta(self._delta.step, self._looked, told):
                raise Skipped(
                    "Inexact", f"{name}, which no optimizer updates, was changed behind torch's counters"
                )

    def _finish(self) -> None:
        delta = self._delta
        self._refuse_untold()
        blob = replay_blob(self._plan, self._hashes.texts(), delta.threads)
        bytes_into(self._views[REPLAY_BLOB], blob)
        bytes_into(self._views[USER_BLOB], delta.blob.written())
        if self._desk.gate():
            self._refuse_non_finite(self._consumed())
        self._desk.open(self._path).finish(
            self._layout,
            self._desk.rank,
            self._desk.version(delta.step),
            self._desk.world_size,
            {USER_BYTES: str(len(delta.blob.written())), REPLAY_BYTES: str(len(blob))},
            kind=self.kind,
        )
