"""Brings a delta into its slot: encodes, copies and seals it with fingerprints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
from tiercheck.trainer.deltas.untold import Untold
from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.flight import Flight
from tiercheck.trainer.save.slot_context import Cancelled, Desk
from tiercheck.trainer.state.slot_file import USER_BLOB, USER_BYTES, bytes_into
from tiercheck.trainer.tensors.leaves import NotCapturable
from tiercheck.trainer.tensors.samples import Sample

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


class DeltaJob:
    kind = Kind.DELTA

    def __init__(self, desk: Desk, delta: Delta, script: Script) -> None:
        self.pending = self._delta = delta
        self._desk = desk
        self._script = script
        self._path = ""
        self._views: dict[str, Tensor] = {}
        self._layout: SlotLayout
        self._plan: DeltaPlan
        self._by_name: dict[str, Item] = {}
        self._hashes: state_hash.Folded
        self._flight: Flight | None = None
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
        desk.give_back_on_failure(delta, self.kind, self._path, lambda: self._copy(plan, turn))
        self.seconds = time.monotonic() - begun

    def land(self) -> None:
        if self._flight is not None and self._delta.ready is not None:
            self._desk.give_back_on_failure(self._delta, self.kind, self._path, self._land)

    def finish(self) -> None:
        begun = time.monotonic()
        self._desk.give_back_on_failure(self._delta, self.kind, self._path, self._finish)
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

    def _non_finite(self) -> str | None:
        """Name of the first gradient with an infinity or a NaN that an update was made of. After
        `Flight.land`."""
        left_out = {id(event) for event in self._delta.events if event.left_out()}
        names = [
            item.name for item in self._plan.items if item.must_be_finite and id(item.event) not in left_out
        ]
        if self._flight is not None:
            return self._flight.non_finite(frozenset(names))
        return staging.non_finite([(name, self._views[name]) for name in names])

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
            if name := self._non_finite():
                self._desk.sanity.refused(delta.step)
                raise Skipped("NotFinite", f"{name} holds an infinity or a NaN")
            self._desk.sanity.good(delta.step)
        self._desk.open(self._path).finish(
            self._layout,
            self._desk.rank,
            self._desk.version(delta.step),
            self._desk.world_size,
            {USER_BYTES: str(len(delta.blob.written())), REPLAY_BYTES: str(len(blob))},
            kind=self.kind,
        )
