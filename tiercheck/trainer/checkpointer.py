"""The one object a training script needs: it brings the state back, and keeps it safe while training goes on.

    checkpointer = Checkpointer(model, optimizer, state={"scheduler": scheduler, "data": position})
    for step in range(checkpointer.restore(), steps):
        ...
        optimizer.step()
        scheduler.step()
        checkpointer.step(loss)

In a cluster snapshots go to the sidecar's shared memory; elsewhere to a folder. The script is the same.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.contents import DCP, FORMAT, IMPORT
from tiercheck.protocol.names import ENV_RUN_DIR
from tiercheck.protocol.slot import NotASlot
from tiercheck.protocol.version import Version
from tiercheck.trainer import gloo_threads, stacks, user_state
from tiercheck.trainer.accelerator import accelerator_of
from tiercheck.trainer.backend import Backend, Offer, RestoreError
from tiercheck.trainer.buffers import PASSING
from tiercheck.trainer.capture import Inventory, named_parameters_of
from tiercheck.trainer.claim import Claim
from tiercheck.trainer.copying import Pending, Snapshot
from tiercheck.trainer.delta import StoredDelta
from tiercheck.trainer.deltas import Deltas
from tiercheck.trainer.equality import REPLICAS, Equality, saved_whole, unequal
from tiercheck.trainer.folder_backend import FolderBackend
from tiercheck.trainer.hooks import innermost
from tiercheck.trainer.inventories import Inventories
from tiercheck.trainer.kept import refuse_inner
from tiercheck.trainer.last_words import LastWords
from tiercheck.trainer.layouts import DeltaRoom, UnknownRoom
from tiercheck.trainer.leaves import PLAIN, Entry, NotCapturable
from tiercheck.trainer.live import is_final, refuse_fsdp1
from tiercheck.trainer.load import fits, load_all, more_groups
from tiercheck.trainer.modes import put_back_modes
from tiercheck.trainer.not_given import NotGiven
from tiercheck.trainer.partitioned import Partitions
from tiercheck.trainer.proof import Proof, first_difference
from tiercheck.trainer.ranks import anywhere, everyones, rank_and_world
from tiercheck.trainer.replay import Mismatch, Replay
from tiercheck.trainer.replicas import Shares
from tiercheck.trainer.resharding import Here, OtherRanks, load_resharded
from tiercheck.trainer.samples import Sampler
from tiercheck.trainer.saver import Saver
from tiercheck.trainer.sidecar_backend import SidecarBackend
from tiercheck.trainer.slot_file import DELTA_ROOM, SlotReader
from tiercheck.trainer.unseen import FOREIGN, Unseen
from tiercheck.trainer.wrapped import Wrapped, unwrapped

log = logging.getLogger("tiercheck")

_CLOSE_SECONDS = 60.0
_UNDECIDED = 50
"""Steps between snapshots while the job has not said, without deltas."""
_UNDECIDED_WITH_DELTAS = 4


@dataclass(frozen=True)
class Found:
    """The version to continue from, found out before there is a model to load it into."""

    backend: Backend
    offer: Offer | None

    @property
    def step(self) -> int:
        """0 is a fresh start."""
        return 0 if self.offer is None else self.offer.version.step


def find(folder: Path | str | None = None, keep: int = 2) -> Found:
    """As the beginning of `Checkpointer.restore`. Collective outside a cluster. Raises RestoreError."""
    backend = _backend(folder, keep)
    return Found(backend, backend.find())


def _backend(folder: Path | str | None, keep: int) -> Backend:
    rank, world_size = rank_and_world()
    if run_dir := os.environ.get(ENV_RUN_DIR):
        return SidecarBackend(Path(run_dir), rank, world_size)
    return FolderBackend(Path(folder or "checkpoints"), rank, world_size, keep)


class Checkpointer:
    """Saves and restores the state of one rank.

    `state`: whatever else the next step depends on - objects with `state_dict`/`load_state_dict`, plain dicts, generators
    (torch.Generator, numpy's). Modules in it, such as averaged weights, are stored as tensors like the model.
    The default random number generators (torch, all CUDA devices, python, numpy) are always included.
    `every`: steps between snapshots; None: as the job says, 50 outside a cluster.
    `folder`, `keep`: outside a cluster, where snapshots go and how many complete ones stay.
    One process has one Checkpointer for a folder, and in a cluster one at all, until it is closed: a second one is a ValueError.
    `found`: what `find` returned, for frameworks that must know the step before they make model and optimizer.
    `sanity_gate`: refuse what has a loss, gradient, parameter or optimizer state that is not finite; None: as the job says.
    `verify_all`: compare every byte of a snapshot with the state before the next update, which waits for it; None: as the job says.

    Only `optimizer.step` may change parameters; call `step` after the scheduler and everything else has moved.
    No failure to save raises: it is logged once per kind and counted in `skipped`. What can never be saved is refused here and by
    `restore`: NotCapturable, a TypeError, names it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        state: user_state.State | None = None,
        every: int | None = None,
        folder: Path | str | None = None,
        keep: int = 2,
        sanity_gate: bool | None = None,
        verify_all: bool | None = None,
        found: Found | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        wrapped = Wrapped.look(model)
        model = self._model = wrapped.model
        refuse_fsdp1(model)
        listed = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        self._partitions = Partitions([unwrapped(each) for each in listed])
        self._optimizers = self._partitions.inner
        refuse_inner(self._optimizers)
        given = state or {}
        self._beside = {name: Wrapped.look(each).model for name, each in given.items() if isinstance(each, nn.Module)}
        self._state: user_state.State = {name: each for name, each in given.items() if name not in self._beside}
        self._every = every
        self.rank, self.world_size = rank_and_world()
        """This process among the ranks of the job."""
        self._found = found
        self._backend = _backend(folder, keep) if found is None else found.backend
        self._last_words: LastWords | None = None
        if os.environ.get(ENV_RUN_DIR):
            stacks.answer_with_stacks()
            self._last_words = LastWords(self._backend.failing)
        self._inventories = Inventories(model, self._optimizers, self._beside)
        if all(map(is_final, (model, *self._beside.values()))):
            # What cannot be captured is better said now than after an hour.
            accelerator_of(entry.tensor for entry in self._inventories.take().entries)
        self._sampler = Sampler()
        self._shares = Shares(wrapped, self._partitions)
        self._sanity_gate = sanity_gate
        self._claim = Claim(self._backend.place)
        self._saver = Saver(
            self._backend,
            self.rank,
            self.world_size,
            Equality(self._shares),
            gate=lambda: self.sanity_gate,
            verify_all=lambda: self._backend.verify_all if verify_all is None else verify_all,
        )
        self._unseen = Unseen(self._optimizers)
        self._not_given = NotGiven(
            [model, *self._beside.values()], self._optimizers, self._state.values(), self._saver.warn
        )
        self._lost = ""
        """Why no version holds all of the state, as `NotGiven` knows it."""
        self._deltas = Deltas(model, self._partitions, self._shares, self._backend, self._saver)
        self.step_number = 0
        """Optimizer steps done, restored ones included."""
        self._last_step_at: float | None = None
        self._step_seconds: float | None = None
        self._restored = False
        self._began_with: set[tuple[str, torch.Size, torch.dtype]] = set()
        """What the model's tensors were when `restore` was called."""
        self._began_training: list[list[str]] = []
        """And what each optimizer trained."""
        self._compared: object | None = None
        self._closed = False
        self._pid = os.getpid()
        self._before = [
            optimizer.register_step_pre_hook(partial(self._before_update, index))
            for index, optimizer in enumerate(self._optimizers)
        ]
        self._after = [
            optimizer.register_step_post_hook(partial(self._after_update, index))
            for index, optimizer in enumerate(self._optimizers)
        ]
        self._everybodys = register_optimizer_step_post_hook(self._not_given.updated)
        gloo_threads.wait_at_exit()
        atexit.register(self.close)

    @property
    def attempt(self) -> int:
        """The job's attempt that this process belongs to; 0 outside a cluster."""
        return self._backend.attempt

    @property
    def captured(self) -> int:
        """Snapshots handed over complete."""
        return self._saver.captured

    @property
    def skipped(self) -> int:
        """Snapshots that were due but not taken."""
        return self._saver.skipped

    @property
    def deltas(self) -> int:
        """Deltas handed over complete."""
        return self._saver.deltas

    @property
    def deltas_skipped(self) -> int:
        """Deltas that were wanted but not taken."""
        return self._saver.deltas_skipped

    @property
    def every(self) -> int:
        """Steps between snapshots."""
        undecided = _UNDECIDED_WITH_DELTAS if self._deltas.active else _UNDECIDED
        return self._every or self._backend.every or undecided

    @property
    def sanity_gate(self) -> bool:
        """Whether what is not finite is refused."""
        return self._backend.sanity_gate if self._sanity_gate is None else self._sanity_gate

    @torch.inference_mode(False)
    def restore(self) -> int:
        """Load the version to continue from and return its step; 0 is a fresh start. Call it once, before training.

        Raises RestoreError if the version cannot be found out or read, DifferentState (a ValueError) if it does not fit,
        TypeError if `state` holds something that could not be read back later. Training must not begin then.
        """
        if self._forked:
            raise NotCapturable(
                "this Checkpointer was made before the process was forked: make it in the one that trains"
            )
        self._restored = True
        self._look_at_state()
        found, self._found = self._found, None
        offer = self._backend.find() if found is None else found.offer
        self._inventories.passing.begin()
        room = 0
        if offer is not None:
            room = self._load(offer)
            self.step_number = offer.version.step
            log.info("restored %s", offer.version)
        self._backend.restored(self.step_number)
        if self._beside and self._deltas.active:
            self._deltas.give_up(
                f"the modules in state ({', '.join(sorted(self._beside))}) change outside of the optimizer"
            )
        self._deltas.started(None if offer is None else self.step_number, room)
        if offer is not None:
            # So that slots are made ready during the first steps. To reserve none would tell the job that this rank takes no deltas.
            self._prepare(0 if not self._deltas.active else room or UnknownRoom.KNOWN_SOON)
        self._last_step_at = time.monotonic()
        return self.step_number

    def _look_at_state(self) -> None:
        """Before there is anything to load: it keeps no tensor, or what an optimizer has by now would be there twice during the load."""
        inventory = self._inventories.take()
        self._began_with = _shapes(inventory.entries)
        self._began_training = _trained(inventory)
        user_state.unpack(user_state.pack(self._state, inventory.facts))
        if (device := accelerator_of(entry.tensor for entry in inventory.entries)) is not None:
            self._backend.numa = device.numa_node()

    @torch.inference_mode(False)
    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """Mark the end of an optimizer step. Starts what is due of it; returns without waiting for it.

        `loss`: one number. A tensor on a device is waited for.
        """
        self.step_number += 1
        if self._forked:
            return
        loss = self._number(loss)
        self._partitions.stepped()
        self._look_for_unseen()
        poisoned = self.sanity_gate and loss is not None and not math.isfinite(loss)
        if poisoned:
            self._saver.sanity.refused(self.step_number)
        self._report(loss)
        delta = self._deltas.end_step(self.step_number, self._state, poisoned)
        due = self._deltas.needs_snapshot() or self.step_number % self.every == 0
        if not due and not self._saver.layouts.known:
            self._prepare(UnknownRoom.KNOWN_SOON if delta is not None else UnknownRoom.AS_BEFORE)
        snapshot = self._snapshot(loss, poisoned) if due else None
        if delta is None and not due and loss is not None and not poisoned:
            self._saver.sanity.good(self.step_number)
        taken: list[Pending] = [artifact for artifact in (snapshot, delta) if artifact is not None]
        if taken:
            self._saver.submit(*taken)  # the snapshot first: it has more to copy before the next update
            if self._unseen.found:
                self._saver.barrier()  # nobody will say when the next one begins
        for optimizer, before, after in zip(self._optimizers, self._before, self._after, strict=True):
            innermost(optimizer, before.id, after.id)

    def alive(self) -> None:
        """Say that this rank is well although it makes no step: during a long evaluation, for example. Without it, a pause
        far longer than any before counts as a hang (`failurePolicy.hang`), and the job is restarted."""
        if not self._forked:
            self._backend.progress(self.step_number, None, self._step_seconds, self._saver.sanity.in_a_row)

    def wait(self, timeout: float | None = None) -> bool:
        """Until the snapshot under way is handed over; False if `timeout` seconds were not enough."""
        return not self._forked and self._saver.wait(timeout)

    def close(self) -> None:
        """Finish what is under way, deliver the last progress, let go of the model. May be called twice."""
        if self._closed or self._forked:  # a data-loader worker inherits the exit hook
            return
        self._closed = True
        atexit.unregister(self.close)
        for hook in (*self._before, *self._after, self._everybodys):
            hook.remove()
        if self._last_words is not None:
            self._last_words.close()
        self._saver.close(_CLOSE_SECONDS)
        self._backend.close()
        self._claim.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._last_words is not None:
            self._last_words.say(error)
        self.close()

    @property
    def _forked(self) -> bool:
        """Whether this process is a fork of the one that is saved: here nobody copies anything, and what it trains is its own."""
        return os.getpid() != self._pid

    def _before_update(self, index: int, _: Optimizer, arguments: Any, named: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced once, and never called: `Unseen` finds out
        if self._forked:
            return
        self._saver.barrier()
        if self._unseen.hooked():
            self._inventories.evaluating = self._deltas.evaluating = not self._model.training
            self._deltas.before_update(index, self.step_number + 1, arguments, named)

    def _after_update(self, index: int, *_: object) -> None:
        if not torch.compiler.is_compiling() and not self._forked:
            self._deltas.after_update(index)

    def _look_for_unseen(self) -> None:
        before = self._unseen.found
        try:
            self._unseen.look()
        except NotCapturable:
            pass  # the inventory will say it better
        except Exception as error:  # invariant: no failure of ours stops training
            self._saver.warn(type(error).__name__, repr(error))
        if self._unseen.found and not before:
            self._deltas.give_up(self._unseen.found)
        if self._unseen.found == FOREIGN != before:
            self._saver.tell_cannot_save(FOREIGN)
        before, self._lost = self._lost, self._not_given.lost()
        if self._lost and not before:
            self._deltas.give_up(self._lost)
            self._saver.tell_cannot_save(self._lost)

    def _load(self, offer: Offer) -> int:
        """Bring back what is offered; the bytes that a delta needs, 0 if nobody knows. Raises RestoreError or DifferentState."""
        writer = self._writer(offer)
        if writer == DCP:
            raise RestoreError(f"{offer.version} was saved by torch.distributed.checkpoint: load it with tiercheck.dcp")
        if self._other_mesh(offer, writer):
            self._load_resharded(offer, imported=writer == IMPORT)
            return 0
        slot, content = self._open(offer.path, offer.version if not offer.deltas else None, Kind.SNAPSHOT)
        if not self._shares.whole:
            self._refuse_unequal(slot.header.version, everyones(slot.header.metadata.get(REPLICAS, "")))
        load_all(self._model, self._optimizers, self._shares, slot, content["facts"], beside=self._beside)
        self._put_back_passing(slot, content["facts"])
        self._refuse_other_state(slot.header.version, slot.proof())
        facts, step = content["facts"], slot.header.version.step
        room = int(slot.header.metadata.get(DELTA_ROOM, "0"))
        replay = Replay(self._model, self._optimizers, self._shares) if offer.deltas else None
        for path in offer.deltas:
            last = path == offer.deltas[-1]
            slot, content = self._open(path, offer.version if last else None, Kind.DELTA)
            step += 1
            if slot.header.version.step != step:
                raise RestoreError(f"{path} holds {slot.header.version}, the chain needs step {step}")
            room = max(room, slot.header.size)
            facts = facts | content["facts"]
            assert replay is not None
            try:
                replay.apply(StoredDelta.read(slot), content["facts"])
            except Mismatch as mismatch:
                message = f"replaying step {step} did not give the state that it was taken from: {mismatch}"
                self._backend.mismatch(step, message)
                raise RestoreError(message) from mismatch
        put_back_modes(self._model, facts)
        for name, module in self._beside.items():
            put_back_modes(module, facts.get("beside_modes", {}).get(name, {}))
        self._partitions.loaded()
        user_state.put_back(self._state, content)
        return room

    def _writer(self, offer: Offer) -> str:
        """Who saved it (`contents.FORMAT`); empty: a Checkpointer. Raises RestoreError."""
        path = offer.path or (offer.borrow(0, ()) if offer.borrow is not None else "")
        try:
            return SlotReader.open(path).header.metadata.get(FORMAT, "") if path else ""
        except (OSError, NotASlot) as error:
            raise RestoreError(f"{offer.version} cannot be read from {path}: {error}") from error

    def _other_mesh(self, offer: Offer, writer: str) -> bool:
        """Whether another number of ranks saved it, or ranks with other shards than these, or none: the same answer on each of them."""
        if offer.borrow is None:
            return False
        if writer == IMPORT:
            return True
        slot = SlotReader.open(offer.path) if offer.path else None
        if slot is not None and saved_whole(slot.header.metadata.get(REPLICAS, "")):
            self._shares.keep_whole(f"replicas differed when {slot.header.version} was saved")
        entries = self._shares.own(self._inventories.take())
        return anywhere(slot is None or not (fits(slot, entries) and self._kept_here(slot)))

    def _kept_here(self, slot: SlotReader) -> bool:
        """Whether the slot's optimizers kept state for the same parameters: under ZeRO each rank has its own."""
        try:
            saved = user_state.unpack(slot.user_blob())["facts"]["optimizers"]
        except (KeyError, NotCapturable):
            return True  # the load will say what is wrong with it
        if len(saved) != len(self._optimizers):
            return True
        for optimizer, each in zip(self._optimizers, saved, strict=True):
            here, there = [name for name, _ in named_parameters_of(optimizer, self._model)], list(each["states"])
            if more_groups(optimizer, each):
                there = there[: len(here)]
            if {*here} != {*there}:
                return False
        return True

    def _refuse_unequal(self, version: Version, written: Iterable[str]) -> None:
        """Raises RestoreError if what would be put together is of replicas that did not hold the same."""
        if unequal(written):
            message = f"replicas held different bits when {version} was saved, so that it cannot be put together"
            self._backend.mismatch(version.step, message, Kind.SNAPSHOT)
            raise RestoreError(message)

    def _refuse_other_state(self, version: Version, proof: Mapping[str, int]) -> None:
        """Raises RestoreError if the live state is not the one that the snapshot was taken of. No `proof`: an old one had none."""
        if not proof:
            return
        here = {entry.name: entry.tensor for entry in self._inventories.take().entries}
        proof = {name: checksum for name, checksum in proof.items() if name in here or not name.startswith(PASSING)}
        if name := first_difference(list(proof), list(proof.values()), here):
            message = f"after {version} was loaded, {name} is not what it was when it was saved"
            self._backend.mismatch(version.step, message, Kind.SNAPSHOT)
            raise RestoreError(message)

    def _put_back_passing(self, slot: SlotReader, facts: Mapping[str, Any]) -> None:
        passing = self._inventories.passing
        for name, value in slot.tensors().items():
            if name.startswith(PASSING):
                short = name.removeprefix(PASSING)
                if not passing.put_back(short, value):
                    passing.make(short, value)
        for name in facts.get("cleared", ()):
            passing.clear(name)

    def _load_resharded(self, offer: Offer, *, imported: bool) -> None:
        assert offer.borrow is not None
        if offer.deltas:
            raise RestoreError(f"{offer.version} was saved on another mesh, on which its deltas cannot be replayed")
        try:
            others = OtherRanks(offer.world_size, offer.borrow)
            self._shares.whole = ""
            self._refuse_unequal(
                others.beginnings[0].header.version,
                (slot.header.metadata.get(REPLICAS, "") for slot in others.beginnings),
            )
            here = Here(self._model, self._optimizers, self._shares, self.rank, self.world_size)
            content, proof = load_resharded(here, others, beside=self._beside)
            self._refuse_other_state(others.beginnings[0].header.version, proof)
        except (OSError, NotASlot, KeyError, TypeError, NotCapturable) as error:
            raise RestoreError(f"{offer.version} cannot be read: {error}") from error
        self._partitions.loaded()
        # Who imported weights had nothing of the script's own to give.
        state = {name: each for name, each in self._state.items() if not imported or name in content["state"]}
        user_state.put_back(state, content)

    def _open(self, path: str, version: Version | None, kind: Kind) -> tuple[SlotReader, dict[str, Any]]:
        """A slot and its user blob. Raises RestoreError if it is not what it should be."""
        try:
            slot = SlotReader.open(path)
            content = user_state.unpack(slot.user_blob())
        except (OSError, ValueError, KeyError, NotCapturable) as error:
            raise RestoreError(f"{version or kind.value} cannot be read from {path}: {error}") from error
        header = slot.header
        if (header.rank, header.kind) != (self.rank, kind) or (version is not None and header.version != version):
            raise RestoreError(f"{path} holds {header.version} of rank {header.rank}, a {header.kind.value}")
        return slot, content

    def _snapshot(self, loss: float | None, poisoned: bool) -> Snapshot | None:
        if poisoned:
            self._skip("NotFinite", f"the loss is {loss}")
            return None
        try:
            if self._unseen.found == FOREIGN:
                raise NotCapturable(FOREIGN)
            if self._lost:
                raise NotCapturable(self._lost)
            return self._capture()
        except NotCapturable as error:
            self._skip("NotCapturable", str(error))
            self._saver.tell_cannot_save(str(error))
            return None
        except Exception as error:  # invariant: no failure of ours stops training
            self._skip(type(error).__name__, repr(error))
            self._saver.tell_cannot_save(repr(error))
            return None

    def _capture(self) -> Snapshot:
        """List the state; copy at once what changes before the next update (buffers, the user blob)."""
        inventory = self._inventories.take()
        blob = user_state.Packed(self._state, inventory.facts, inventory.fixed)
        self._compare(inventory)
        if name := user_state.borrowed(self._state, [entry.tensor for entry in inventory.entries]):
            self._saver.warn(
                "Shared",
                f"state[{name!r}] holds tensors of the model or its optimizers: what comes back there will be copies of its own",
            )
        stored = self._shares.own(inventory)
        proof = Proof.take(self._sampler, inventory.entries, stored)
        entries = [self._at_once(entry) for entry in stored]
        device = accelerator_of(entry.tensor for entry in entries)
        ready = None if device is None else device.final()
        return Snapshot(step=self.step_number, entries=entries, blob=blob, proof=proof, device=device, ready=ready)

    def _compare(self, inventory: Inventory) -> None:
        """Warn of a model that a new start of the script would not have."""
        if inventory.alike is not None and inventory.alike is self._compared:
            return
        self._compared = inventory.alike
        if not self._began_with:
            return
        other = [name for name, *_ in self._began_with ^ _shapes(inventory.entries)]
        for index, (began, now) in enumerate(zip(self._began_training, _trained(inventory), strict=True)):
            if now[: len(began)] != began:  # those that were added come back by themselves
                other.append(f"what optimizer {index} trains")
        if other:
            self._saver.warn(
                "Changed",
                f"{min(other)} is not what it was when `restore` was called: this can only be restored by a script that "
                "has changed its model likewise before `restore`",
            )
        for name, parameter in self._model.named_parameters():
            if type(parameter) in PLAIN and any(isinstance(each, torch.Tensor) for each in vars(parameter).values()):
                self._saver.warn(
                    "Attribute", f"a tensor that is kept as an attribute of the parameter {name} is in no version"
                )

    def _at_once(self, entry: Entry) -> Entry:
        if entry.lazy and entry.name not in self._saver.mutating:
            return entry
        return entry._replace(tensor=entry.tensor.clone(), lazy=False)

    def _prepare(self, delta_room: DeltaRoom) -> None:
        """Find out the size of a slot before the first snapshot is due, and have slots made (`Saver.reserve`)."""
        try:
            inventory = self._inventories.take()
            blob_bytes = len(user_state.pack(self._state, inventory.facts))
            self._saver.layouts.plan(self._shares.own(inventory), blob_bytes, delta_room)
        except NotCapturable as error:
            self._saver.warn("NotCapturable", str(error))
            self._saver.tell_cannot_save(str(error))
        except Exception as error:  # invariant: no failure of ours stops training
            self._saver.warn(type(error).__name__, repr(error))

    def _skip(self, kind: str, message: str) -> None:
        self._saver.skip_snapshot(self.step_number, kind, message)
        self._saver.tell_skipped(self.step_number)

    def _number(self, loss: Any) -> float | None:
        try:
            return None if loss is None else float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        except Exception as error:  # invariant: no failure of ours stops training
            self._saver.warn("Loss", f"the loss given to step is no number, and not looked at: {error!r}"[:300])
            return None

    def _report(self, loss: float | None) -> None:
        now = time.monotonic()
        if self._last_step_at is not None:
            seconds = now - self._last_step_at
            self._step_seconds = seconds if self._step_seconds is None else 0.9 * self._step_seconds + 0.1 * seconds
        self._last_step_at = now
        finite = loss if loss is not None and math.isfinite(loss) else None
        self._backend.progress(self.step_number, finite, self._step_seconds, self._saver.sanity.in_a_row)


def _trained(inventory: Inventory) -> list[list[str]]:
    """Of each optimizer its class, and the names of its parameters."""
    return [[saved["class"], *saved["states"]] for saved in inventory.facts["optimizers"]]


def _shapes(entries: Iterable[Entry]) -> set[tuple[str, torch.Size, torch.dtype]]:
    """What must be the same where the model is restored."""
    return {
        (entry.name, entry.tensor.shape, entry.tensor.dtype) for entry in entries if entry.name.startswith("model/")
    }
