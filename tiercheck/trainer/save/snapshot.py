"""Writes a snapshot to its slot."""

from __future__ import annotations

from collections.abc import Collection

from tiercheck.protocol.artifacts.slot import PIECES, PROOF
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.backend import Skipped
from tiercheck.trainer.deltas.unseen import UntrackedTensors
from tiercheck.trainer.proof import proof
from tiercheck.trainer.replicas.equality import REPLICAS, ReplicaSamples
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.slot_context import Cancelled, Job, SaveContext
from tiercheck.trainer.save.staging import DeviceCopy, ParallelCopy, Snapshot
from tiercheck.trainer.state.slot_file import DELTA_ROOM, USER_BLOB, USER_BYTES, bytes_into
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


class SnapshotJob(Job):
    kind = Kind.SNAPSHOT

    def __init__(
        self, context: SaveContext, snapshot: Snapshot, mutating: set[str], untracked: UntrackedTensors
    ) -> None:
        """Adds to `mutating` the names of tensors that are found to change outside the optimizer.

        Sends the snapshot's checksums to the detector of unrecorded changes."""
        super().__init__(context, snapshot)
        self._snapshot = snapshot
        self._mutating = mutating
        self._untold = untracked
        self._pieces = b""
        self._looked: ReplicaSamples
        self._must_be_finite: list[str] | None = None

    def copy(self) -> None:
        snapshot, backend = self._snapshot, self._context.backend
        self._context.follow(snapshot)
        try:
            planned = self._context.layouts.plan(snapshot.entries, len(snapshot.blob.written()))
        except NotCapturable as error:
            backend.pass_over(snapshot.step)
            raise Skipped("NotCapturable", str(error)) from error
        self._layout, self._pieces = planned.slot, planned.pieces
        self._path = backend.begin(snapshot.step, self._layout.size, self.kind)
        self._guarded(self._copy)

    def land(self) -> None:
        if self._device_copy is not None:
            self._guarded(self._device_copy.land)

    def _copy(self) -> None:
        snapshot = self._snapshot
        writer = self._context.slots.open(self._path)
        self._views = writer.begin(self._layout)
        items = [(entry.name, entry.tensor) for entry in snapshot.entries]
        if self._context.gate():
            # Buffers, such as masks, may hold infinities.
            self._must_be_finite = [entry.name for entry in snapshot.entries if entry.must_be_finite]
        if snapshot.device is None:
            snapshot.parallel_copy = ParallelCopy(staging.pieces(items, self._views), staging.copy_tensor)
        else:
            writer.pin()  # before training waits for this artifact: it may take seconds
        if not snapshot.start():
            raise Cancelled
        if snapshot.device is None:
            assert snapshot.parallel_copy is not None
            snapshot.parallel_copy.join()
            self._looked = self._context.equality.look(snapshot.step, snapshot.entries)
            self._refuse_changed()
        else:
            self._looked = self._context.equality.look(snapshot.step, snapshot.entries)
            self._device_copy = DeviceCopy(snapshot.device)
            self._device_copy.begin(items, self._views, frozenset(self._must_be_finite or ()))
            snapshot.done = snapshot.device.passed()
        if self._context.verify_all():
            if self._device_copy is not None:
                self._device_copy.land()
            if other := proof.whole_difference(snapshot.entries, self._views, fetch=True):
                raise self._torn([other])

    def _finish(self) -> None:
        snapshot = self._snapshot
        if self._device_copy is not None:
            self._refuse_changed()
        self._prove()
        bytes_into(self._views[PIECES], self._pieces)
        bytes_into(self._views[PROOF], snapshot.proof.written())
        bytes_into(self._views[USER_BLOB], snapshot.blob.written())
        if self._must_be_finite is not None:
            self._refuse_non_finite(self._must_be_finite)
        self._context.equality.judge(self._looked)
        self._seal(
            {
                USER_BYTES: str(len(snapshot.blob.written())),
                REPLICAS: self._looked.written(),
                DELTA_ROOM: str(self._context.delta_room),
            }
        )

    def _refuse_changed(self) -> None:
        """Raises Skipped if other code than the optimizer wrote to a copied tensor."""
        changed = self._snapshot.changed()
        if changed:
            # The second time, all tensors: code that swaps weights swaps them one after the other, and each
            # copy would find others changed.
            self._mutating |= self._owned_with(changed) if self._mutating else changed
            raise Skipped(
                "ChangedOutsideOptimizer",
                f"{min(changed)} changed while it was copied; it is copied at once from now on",
            )

    def _prove(self) -> None:
        """Raises Skipped if the slot differs from the state at `step`."""
        snapshot = self._snapshot
        torn = snapshot.proof.torn(self._views)
        if not torn and (
            other := proof.whole_difference(snapshot.entries, self._views, snapshot.moved.is_set)
        ):
            torn = [other]
        if torn:
            raise self._torn(torn)
        self._untold.snapshot(
            snapshot.step, dict(zip(snapshot.proof.names, snapshot.proof.sample.sums, strict=False))
        )

    def _torn(self, names: list[str]) -> Skipped:
        # No counter shows such writes, so other tensors may have changed too.
        self._mutating |= self._owned_with(names)
        return Skipped(
            "CopyDiffers", f"{names[0]} was written while it was copied; it is copied at once from now on"
        )

    def _owned_with(self, names: Collection[str]) -> set[str]:
        """Returns all tensors of the same model or optimizer as one of these."""
        owners = {name.partition("/")[0] for name in names}
        return {entry.name for entry in self._snapshot.entries if entry.name.partition("/")[0] in owners}
