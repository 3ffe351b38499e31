"""Restores a rank: finds the version, loads its snapshot, replays the deltas after it.

Ranks that have other shards than those that saved it put theirs together from the snapshots of all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tiercheck.protocol.artifacts.contents import DCP, FORMAT, IMPORT
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.local import ReportMismatch
from tiercheck.protocol.names import ENV_RUN_DIR
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends.backend import (
    Backend,
    Offer,
    RestoreError,
    gather_from_all,
    is_true_anywhere,
    rank_and_world,
)
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.backends.sidecar_backend import SidecarBackend
from tiercheck.trainer.deltas.delta_format import StoredDelta
from tiercheck.trainer.proof.proof import first_difference
from tiercheck.trainer.replicas.equality import REPLICAS, are_unequal, were_saved_as_shares, were_saved_whole
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.restore.grown import add_tensors, more_groups
from tiercheck.trainer.restore.load import DifferentState, fits, load_all, run_load_hooks
from tiercheck.trainer.restore.replay import Mismatch, Replay
from tiercheck.trainer.restore.resharding import SavedRanks, load_resharded
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.capture import loose_parameters, named_parameters_of
from tiercheck.trainer.state.frozen import put_back_modes
from tiercheck.trainer.state.inventories import ATTRIBUTES
from tiercheck.trainer.state.slot_file import DELTA_ROOM, SlotReader
from tiercheck.trainer.tensors.buffers import NON_PERSISTENT_PREFIX
from tiercheck.trainer.tensors.tensor_parts import NotCapturable
from tiercheck.trainer.training import name_of


@dataclass(frozen=True)
class Found:
    """The version to continue from, determined before there is a model to load it into."""

    backend: Backend
    offer: Offer | None

    @property
    def step(self) -> int:
        """Returns the step of the version; 0: a fresh start."""
        return 0 if self.offer is None else self.offer.version.step

    @functools.cached_property
    def state(self) -> Mapping[str, Any]:
        """Returns the script's `state` in that version, by name; that of rank 0 if others saved it.

        It is read before there is anything to load it into. Empty: nothing is found, or it cannot be read,
        for which `restore` raises.
        """
        offer = self.offer
        if offer is None:
            return {}
        try:
            if offer.path:
                content = SlotReader.open(offer.deltas[-1] if offer.deltas else offer.path).content
            else:
                assert offer.borrow is not None
                content = SavedRanks(offer.world_size, offer.borrow).blob(0)
            state: Mapping[str, Any] = content["state"]
        except (OSError, NotASlot, KeyError, ValueError, NotCapturable, RestoreError):
            return {}
        return state


def find(folder: Path | str | None = None, keep: int = 2, run: str | None = None) -> Found:
    """Finds the version for `Checkpointer.restore`. Collective outside a cluster. Raises RestoreError."""
    backend = open_backend(folder, keep, name_of(run))
    return Found(backend, backend.find())


def open_backend(folder: Path | str | None, keep: int, run: str) -> Backend:
    """Returns the sidecar's backend in a cluster, elsewhere a folder's. `run`: see `FolderBackend`."""
    rank, world_size = rank_and_world()
    if run_dir := os.environ.get(ENV_RUN_DIR):
        return SidecarBackend(Path(run_dir), rank, world_size)
    return FolderBackend(Path(folder or "checkpoints"), rank, world_size, keep, run)


@dataclass(frozen=True)
class Loaded:
    """The progress of a restore. The script's own state is still to be put back (`put_back`)."""

    version: Version
    content: Mapping[str, Any]
    """The user blob of the newest slot."""
    facts: Mapping[str, Any]
    """The facts beside tensors, from all slots so far."""
    room: int = 0
    """Bytes. The length of the longest delta; 0: not known."""
    blob_bytes: int = 0
    """Bytes. The length of the longest user blob."""
    imported: bool = False
    """True if only weights were restored: an import has no state of the script."""

    def put_back(self, state: user_state.State) -> None:
        """Loads the script's objects and the random generators. Raises RestoreError.

        Nothing may query these objects from then on until the first step.
        """
        content, mine = self.content, state
        if self.imported:
            mine = {name: each for name, each in state.items() if name in content["state"]}
        with _reported(self.version):
            user_state.put_back(mine, content)


@contextlib.contextmanager
def _reported(version: Version) -> Iterator[None]:
    """Converts errors of torch, or of the script's own objects, into RestoreError."""
    try:
        yield
    except (RestoreError, DifferentState, NotCapturable):
        raise
    except Exception as error:
        raise RestoreError(
            f"{version} was found, but putting it back raises {type(error).__name__}: {error} (it goes "
            "through load_state_dict of the script's objects, and their load hooks)"
        ) from error


class Restoring:
    """Performs one restore, in the training thread."""

    def __init__(self, trained: TrainedState, backend: Backend) -> None:
        self._trained, self._backend = trained, backend
        self._open_slot = functools.lru_cache(maxsize=1)(SlotReader.open)

    def load(self, offer: Offer) -> Loaded:
        """Restores what is offered, except the script's `state`. Raises RestoreError or DifferentState."""
        writer = self._find_writer(offer)
        if writer == DCP:
            raise RestoreError(
                f"{offer.version} was saved by torch.distributed.checkpoint: load it with tiercheck.dcp"
            )
        with _reported(offer.version):
            if offer.path:
                self._add_tensors(self._open_slot(offer.path))
            if self._is_of_other_mesh(offer, writer):
                return self._load_parts(offer, imported=writer == IMPORT)
            return self._load_own(offer)

    def _load_own(self, offer: Offer) -> Loaded:
        """Loads what this very rank saved: its snapshot, then its deltas."""
        trained = self._trained
        loaded = self._load_snapshot(offer)
        if offer.deltas:
            loaded = self._replay(offer, loaded)
        trained.arithmetic.put_back(loaded.facts)
        trained.inventories.attributes.load_state_dict(loaded.facts.get(ATTRIBUTES, {}))
        trained.partitions.loaded()
        run_load_hooks(trained, loaded.facts)
        loose = list(loose_parameters(trained.optimizers, trained.model))
        put_back_modes(trained.model, loaded.facts, loose)
        for name, module in trained.beside.items():
            put_back_modes(module, loaded.facts.get("beside_modes", {}).get(name, {}))
        return loaded

    def _load_snapshot(self, offer: Offer) -> Loaded:
        trained = self._trained
        slot, content = self._open(offer.path, offer.version if not offer.deltas else None, Kind.SNAPSHOT)
        version, facts = slot.header.version, content["facts"]
        if not trained.shares.whole:
            begun = gather_from_all((version, slot.header.metadata.get(REPLICAS, "")))
            self._refuse_others(begun)
            self._refuse_unequal(version, [written for _, written in begun])
        load_all(trained, slot, facts)
        passing = trained.inventories.passing
        for name, value in slot.tensors().items():
            if name.startswith(NON_PERSISTENT_PREFIX):
                short = name.removeprefix(NON_PERSISTENT_PREFIX)
                if not passing.put_back(short, value):
                    passing.make(short, value)
        for name in facts.get("cleared", ()):
            passing.clear(name)
        self._refuse_other_state(version, slot.proof())
        room = int(slot.header.metadata.get(DELTA_ROOM, "0"))
        return Loaded(version, content, facts, room, slot.user_blob_bytes())

    def _replay(self, offer: Offer, loaded: Loaded) -> Loaded:
        trained, saved = self._trained, [each["groups"] for each in loaded.facts["optimizers"]]
        replay = Replay(trained.model, trained.optimizers, trained.shares, saved)
        for path in offer.deltas:
            step, last = loaded.version.step + 1, path == offer.deltas[-1]
            slot, content = self._open(path, offer.version if last else None, Kind.DELTA)
            if slot.header.version.step != step:
                raise RestoreError(f"{path} holds {slot.header.version}, the chain needs step {step}")
            try:
                replay.apply(StoredDelta.read(slot), content["facts"])
            except Mismatch as mismatch:
                message = f"replaying step {step} did not give the state that it was taken from: {mismatch}"
                self._backend.report(ReportMismatch(step, message, Kind.DELTA))
                raise RestoreError(message) from mismatch
            room = max(loaded.room, slot.header.size)
            facts = {**loaded.facts, **content["facts"]}
            blob_bytes = max(loaded.blob_bytes, slot.user_blob_bytes())
            loaded = Loaded(slot.header.version, content, facts, room, blob_bytes)
        return loaded

    def _load_parts(self, offer: Offer, *, imported: bool) -> Loaded:
        """Loads what this rank holds now from the snapshots of all ranks that saved the version."""
        assert offer.borrow is not None
        trained = self._trained
        if offer.deltas:
            raise RestoreError(
                f"{offer.version} was saved on another mesh, on which its deltas cannot be replayed"
            )
        try:
            others = SavedRanks(offer.world_size, offer.borrow)
            trained.shares.whole = ""
            self._refuse_unequal(
                others.beginnings[0].header.version,
                (slot.header.metadata.get(REPLICAS, "") for slot in others.beginnings),
            )
            content, proof = load_resharded(trained, others)
            self._refuse_other_state(others.beginnings[0].header.version, proof)
        except (OSError, NotASlot, KeyError, TypeError, NotCapturable) as error:
            raise RestoreError(f"{offer.version} cannot be read: {error}") from error
        trained.partitions.loaded()
        trained.inventories.attributes.load_state_dict(content["facts"].get(ATTRIBUTES, {}))
        run_load_hooks(trained, content["facts"])
        blob_bytes = len(user_state.pack({}, content))
        return Loaded(offer.version, content, content["facts"], 0, blob_bytes, imported=imported)

    def _find_writer(self, offer: Offer) -> str:
        """Returns what saved it (`contents.FORMAT`); empty: a Checkpointer. Raises RestoreError."""
        path = offer.path or (offer.borrow(0, ()) if offer.borrow is not None else "")
        try:
            return self._open_slot(path).header.metadata.get(FORMAT, "") if path else ""
        except (OSError, NotASlot) as error:
            raise RestoreError(f"{offer.version} cannot be read from {path}: {error}") from error

    def _is_of_other_mesh(self, offer: Offer, writer: str) -> bool:
        """Returns whether another number of ranks, ranks with other shards, or none saved it.

        The answer is the same on each of them.
        """
        if offer.borrow is None:
            return False
        if writer == IMPORT:
            return True
        shares = self._trained.shares
        slot = self._open_slot(offer.path) if offer.path else None
        if slot is not None and were_saved_whole(slot.header.metadata.get(REPLICAS, "")):
            shares.keep_whole(f"replicas differed when {slot.header.version} was saved")
        entries = shares.own(self._trained.inventories.take())
        return is_true_anywhere(slot is None or not (fits(slot, entries) and self._is_kept_here(slot)))

    def _add_tensors(self, slot: SlotReader) -> None:
        try:
            grown = slot.content["facts"].get("grown", ())
        except (KeyError, NotCapturable):
            return  # the load will raise for what is wrong with it
        add_tensors(self._trained.model, self._trained.beside, slot.tensors(), grown)
        self._trained.inventories.passing.begin()  # a weight may be pruned now

    def _is_kept_here(self, slot: SlotReader) -> bool:
        """Returns whether the slot's optimizers had these parameters: under ZeRO each rank has its own."""
        optimizers = self._trained.optimizers
        if self._trained.world_size == slot.header.world_size == 1:
            return True
        try:
            saved = slot.content["facts"]["optimizers"]
        except (KeyError, NotCapturable):
            return True  # the load will raise for what is wrong with it
        if len(saved) != len(optimizers):
            return True
        for optimizer, each in zip(optimizers, saved, strict=True):
            here = [name for name, _ in named_parameters_of(optimizer, self._trained.model)]
            there = list(each["states"])
            if more_groups(optimizer, each):
                there = there[: len(here)]
            if {*here} != {*there}:
                return False
        return True

    def _refuse_others(self, begun: Sequence[tuple[Version, str]]) -> None:
        """Raises RestoreError if shares of several snapshots would be put together.

        The newest of these is then given up, and what depends on it.
        """
        versions = sorted({version for version, _ in begun})
        if len(versions) > 1 and any(were_saved_as_shares(written) for _, written in begun):
            named = " and ".join(map(str, versions[:3]))
            message = f"replicas begin from {named}: shares of different snapshots cannot be put together"
            self._give_up(versions[-1], message)

    def _refuse_unequal(self, version: Version, written: Iterable[str]) -> None:
        """Raises RestoreError if the replicas to be put together did not hold the same."""
        if are_unequal(written):
            self._give_up(
                version,
                f"replicas held different bits when {version} was saved, so that it cannot be put together",
            )

    def _refuse_other_state(self, version: Version, proof: Mapping[str, int]) -> None:
        """Raises RestoreError if the live state is not the snapshot's. No `proof`: an old one had none."""
        if not proof:
            return
        here = {entry.name: entry.tensor for entry in self._trained.inventories.take().entries}
        proof = {
            name: checksum
            for name, checksum in proof.items()
            if name in here or not name.startswith(NON_PERSISTENT_PREFIX)
        }
        if name := first_difference(list(proof), list(proof.values()), here):
            self._give_up(version, f"after {version} was loaded, {name} is not what it was when it was saved")

    def _give_up(self, snapshot: Version, why: str) -> NoReturn:
        """Gives up that snapshot and what depends on it. Raises RestoreError."""
        self._backend.report(ReportMismatch(snapshot.step, why, Kind.SNAPSHOT))
        raise RestoreError(why)

    def _open(self, path: str, version: Version | None, kind: Kind) -> tuple[SlotReader, dict[str, Any]]:
        """Opens a slot and its user blob. Raises RestoreError if it is not what it should be."""
        try:
            slot = self._open_slot(path)
            content = slot.content
        except (OSError, ValueError, KeyError, NotCapturable) as error:
            raise RestoreError(f"{version or kind.value} cannot be read from {path}: {error}") from error
        header = slot.header
        if (header.rank, header.kind) != (self._trained.rank, kind) or (
            version is not None and header.version != version
        ):
            raise RestoreError(f"{path} holds {header.version} of rank {header.rank}, a {header.kind.value}")
        return slot, content
