"""Hands out slots as a sidecar does, in this process, over the real socket."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.gpu_acceptance.checks import Setting, Skip
from tests.scripted_sidecar import ScriptedSidecar
from tiercheck.protocol import names
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import (
    AbandonSlot,
    BeginSlot,
    CompleteSlot,
    DeclineDeltas,
    Reply,
    ReportCannotSave,
    ReportMismatch,
    ReportProgress,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends import sidecar_backend
from tiercheck.trainer.backends.sidecar_backend import SidecarBackend
from tiercheck.trainer.state.slot_file import SlotReader

PATIENT = 600.0
"""Seconds within which an answer comes, on however busy a machine: what hangs is ended by the runner."""
Look = Callable[[CompleteSlot], None]


def ensure_room(setting: Setting, size: int) -> None:
    """Raises Skip if the memory volume has not `size` bytes left."""
    about = os.statvfs(setting.memory)
    free = about.f_bavail * about.f_frsize
    if free < size:
        raise Skip(
            f"{setting.memory.parent} has {free / 1e9:.1f} GB left, and {size / 1e9:.1f} GB are needed"
        )


@contextlib.contextmanager
def slot_of(setting: Setting, size: int) -> Iterator[str]:
    """A slot of `size` bytes, there as long as the context is. Raises Skip if there is no room."""
    ensure_room(setting, size)
    path = Path(tempfile.mkdtemp(dir=setting.memory)) / "slot"
    try:
        _allocate(path, size)
        yield str(path)
    finally:
        path.unlink(missing_ok=True)


class Station(ScriptedSidecar):
    """Use it as a context, around the Checkpointer.

    `slots`: of each kind, how many are used again and again, as in a pod; of others there is a new one for
    each artifact. `look`: called with each artifact that is complete, before its slot may be used again; what
    it raises is kept in `wrong`. `patience`: seconds that an update waits for a slot; None: as the product
    waits.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        every: int,
        slots: Mapping[Kind, int] | None = None,
        delta: DeltaMode = DeltaMode.AUTO,
        look: Look | None = None,
        patience: float | None = PATIENT,
    ) -> None:
        folder = Path(tempfile.mkdtemp(dir=setting.memory))
        super().__init__(folder, Welcome(attempt=1, snapshot_every=every, delta=delta), listen=False)
        self._setting, self._run_dir = setting, folder
        self.wrong: list[str] = []
        self.no_deltas = self.cannot_save = self.mismatch = ""
        """What the trainer has said, as the job's status would show it."""
        self._look, self._slots, self._patience = look, dict(slots or {}), patience
        self._size = dict.fromkeys(Kind, 0)
        self._free: dict[Kind, deque[Path]] = {kind: deque() for kind in Kind}
        self._made = 0
        self._cleaning = contextlib.ExitStack()

    def __enter__(self) -> Station:
        waits = PATIENT if self._patience is not None else None
        self._set(sidecar_backend, "ANSWER_SECONDS", waits)
        self._set(sidecar_backend, "RESERVE_SECONDS", PATIENT)
        self._set(SidecarBackend, "patience", self._patience)
        for name, value in ((names.ENV_RUN_DIR, str(self._run_dir)), (names.ENV_ATTEMPT, "1")):
            os.environ[name] = value
            self._cleaning.callback(os.environ.pop, name, None)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._cleaning.close()
        shutil.rmtree(self._run_dir)

    def offer(self, base: int, step: int) -> None:
        if self._setting.spoil:
            _flip_a_bit(self.completed(Kind.SNAPSHOT)[base])
        super().offer(base, step)

    def _set(self, owner: object, name: str, value: float | None) -> None:
        if value is not None:
            self._cleaning.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def behave(self, request: Request) -> Reply | None:
        try:
            if isinstance(request, ReserveSlots):
                self._reserve(Kind.SNAPSHOT, request.bytes)
                self._reserve(Kind.DELTA, request.delta_bytes or 0)
            elif isinstance(request, BeginSlot):
                return self._begin(request)
            elif isinstance(request, CompleteSlot):
                self._complete(request)
            elif isinstance(request, AbandonSlot):
                self._take_back(request.kind, Path(request.path))
        except OSError as error:
            return Reply(False, error=str(error))
        if isinstance(request, DeclineDeltas):
            self.no_deltas = request.message
        elif isinstance(request, ReportCannotSave):
            self.cannot_save = request.message
        elif isinstance(request, ReportMismatch):
            self.mismatch = request.message
        return None if isinstance(request, ReportProgress) else Reply(True)

    def _reserve(self, kind: Kind, size: int) -> None:
        if size <= self._size[kind]:
            return
        self._size[kind], free = size, self._free[kind]
        had = len(free) or self._slots.get(kind, 0)
        while free:
            free.popleft().unlink()
        free.extend(self._make(kind) for _ in range(had))

    def _begin(self, request: BeginSlot) -> Reply:
        kind = request.kind
        if kind not in self._slots:
            self._size[kind] = max(self._size[kind], request.bytes)
            return Reply(True, path=str(self._make(kind)))
        if not self._free[kind]:
            return Reply(True, skip="no slot is free")
        return Reply(True, path=str(self._free[kind].popleft()))

    def _complete(self, request: CompleteSlot) -> None:
        try:
            if self._look is not None:
                self._look(request)
        except Exception as error:  # of the check: it is what the check is about
            self.wrong.append(f"{request.kind.value} of step {request.step}: {error}")
        if request.kind in self._slots:
            self._take_back(request.kind, Path(request.path))

    def _take_back(self, kind: Kind, path: Path) -> None:
        if kind not in self._slots or path.stat().st_size < self._size[kind]:
            path.unlink()
        if kind in self._slots:
            self._free[kind].append(path if path.exists() else self._make(kind))

    def _make(self, kind: Kind) -> Path:
        self._made += 1
        path = self._run_dir / f"{kind.value}-{self._made}"
        _allocate(path, self._size[kind])
        return path


def _allocate(path: Path, size: int) -> None:
    """With all its memory: to find none left while writing would be the end of the process."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _flip_a_bit(path: str) -> None:
    """In a tensor of the model."""
    places = [tensor for tensor in SlotReader.open(path).header.tensors if tensor.name.startswith("model/")]
    place = max(places, key=lambda tensor: tensor.end - tensor.begin)
    with open(path, "r+b") as file:
        file.seek(place.begin)
        byte = file.read(1)[0]
        file.seek(place.begin)
        file.write(bytes([byte ^ 1]))
