"""Takes a snapshot in the training thread at the end of a step, or reports why there is none.

No failure here ends training: it is reported once per kind, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tiercheck.trainer.deltas.unseen import (
    FOREIGN,
    UnhookedUpdates,
    UnregisteredOptimizers,
    are_of_integration,
    reaches,
)
from tiercheck.trainer.proof.proof import StateProof
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.save.deltas import Deltas
from tiercheck.trainer.save.saver import Saver
from tiercheck.trainer.save.slot_context import DeltaRoom, UnknownRoom
from tiercheck.trainer.save.staging import Snapshot
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.capture import Inventory
from tiercheck.trainer.state.loaders import LOADERS
from tiercheck.trainer.tensors.accelerator import accelerator_of
from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import PLAIN, Entry, NotCapturable, shard_or_self, write_count
from tiercheck.trainer.training import TRAINING


class Capturing:
    """Takes snapshots of one Checkpointer's state, and refuses state that no version could hold."""

    def __init__(self, trained: TrainedState, saver: Saver, deltas: Deltas) -> None:
        self._trained, self._saver, self._deltas = trained, saver, deltas
        self._sampler = Sampler()
        self.unseen = UnhookedUpdates(trained.optimizers)
        self.not_given = UnregisteredOptimizers(
            trained.modules, trained.optimizers, trained.state.values(), saver.warn
        )
        self._lost = ""
        """The reason why no version holds all of the state, from `refused` or `UnregisteredOptimizers`."""
        self._began_with: dict[str, _Shape] = {}
        """The model's tensors when `restore` was called."""
        self._began_modules: dict[str, type] = {}
        """The classes of its modules at that time."""
        self._began_training: list[list[str]] = []
        """The class and the parameters of each optimizer at that time."""
        self._compared: object | None = None
        self.has_begun = self.has_loaded = False
        """True once `begin` was called; from the end of a load until what was written then is known."""
        self._counters: dict[str, int] = {}
        """Torch's counter of changes of each parameter when the load, or the first step, had ended."""
        self._written: dict[str, int] = {}
        """The parameters that were written between the load and the first update, and how often."""
        self.unsaved = ""
        """The message about what decides updates, and is in no version; empty: nothing was found."""
        self.refused = ""
        """The reason why this training is not saved; empty: it is."""
        self.training: Mapping[str, Any] = {}
        """`TrainingIdentity.facts` of this process, stored in each snapshot."""

    def begin(self) -> int | None:
        """Records the state's structure before a load; returns the NUMA node of its device, if any.

        Raises NotCapturable. Keeps no tensor, so that optimizer state does not exist twice during the load.
        """
        self.has_begun = True
        self._trained.inventories.attributes.begin()
        inventory = self._trained.inventories.take()
        self._began_with = _list_shapes(inventory.entries)
        self._began_modules = _list_classes(self._trained.model)
        self._began_training = _list_trained(inventory)
        # Reading a loader's position creates its workers, which fixes the order of samples.
        asked = {name: each for name, each in self._trained.state.items() if not user_state.is_iterated(each)}
        user_state.unpack(user_state.pack(asked, self._trained.inventories.facts_of(inventory)))
        device = accelerator_of(entry.tensor for entry in inventory.entries)
        return None if device is None else device.numa_node()

    def start(self, restored: int | None, room: int = 0, blob_bytes: int = 0) -> None:
        """Handles the start of training, without calls of the script's `state`.

        `restored`: the step of the version, if any; `room`: bytes of its longest delta; `blob_bytes`: those
        of its user blob; 0: not known."""
        deltas, beside = self._deltas, self._trained.beside
        if beside and deltas.active:
            deltas.give_up(
                f"the modules in state ({', '.join(sorted(beside))}) change outside of the optimizer"
            )
        deltas.started(restored, room)
        if restored is not None:
            # So that slots are prepared during the first steps. Reserving none would report to the job that
            # this rank takes no deltas.
            self.prepare(0 if not deltas.active else room or UnknownRoom.KNOWN_SOON, blob_bytes)

    def prepare(self, delta_room: DeltaRoom, blob_bytes: int = 0) -> None:
        """Computes the size of a slot before the first snapshot is due, and reserves slots (`Saver.reserve`).

        `blob_bytes`: bytes of the user blob; 0: not known."""
        try:
            inventories = self._trained.inventories
            inventory = inventories.take()
            if not blob_bytes:
                blob_bytes = len(user_state.pack(self._trained.state, inventories.facts_of(inventory)))
            self._saver.layouts.plan(self._trained.shares.own(inventory), blob_bytes, delta_room)
        except NotCapturable as error:
            self._saver.warn("NotCapturable", str(error))
            self._saver.report_cannot_save(str(error))
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._saver.warn(type(error).__name__, repr(error))

    def look_for_gaps(self) -> None:
        """Checks for changes of the state that no version records; stops deltas, or all saving, if any."""
        if self._written and not self._counters:
            self._counters = self._count_writes()
        self.unsaved = self.unsaved or self._trained.arithmetic.unsaved
        before = self.unseen.found
        try:
            state = [*self._trained.state.values()]
            if begun_anew := self._trained.loaders.end_step(lambda each: reaches(state, each)):
                self._saver.warn("Data", begun_anew)
            self.unseen.look()
        except NotCapturable:
            pass  # the inventory will report it with details
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._saver.warn(type(error).__name__, repr(error))
        if self.unseen.found and not before:
            self._deltas.give_up(self.unseen.found)
        if self.unseen.found == FOREIGN != before:
            self._saver.report_cannot_save(FOREIGN)
        before, self._lost = self._lost, self.refused or self.not_given.lost()
        if self._lost and not before:
            self._deltas.give_up(self._lost)
            self._saver.report_cannot_save(self._lost)

    def take(self, step: int, loss: float | None, poisoned: bool) -> Snapshot | None:
        """Returns the snapshot after `step`; None, counted as skipped, if it cannot be taken.

        `poisoned`: the loss is not finite."""
        if poisoned:
            self._skip(step, "NotFinite", f"the loss is {loss}")
            return None
        try:
            if self.unseen.found == FOREIGN:
                raise NotCapturable(FOREIGN)
            if self._lost:
                raise NotCapturable(self._lost)
            return self._capture(step)
        except NotCapturable as error:
            self._skip(step, "NotCapturable", str(error))
            self._saver.report_cannot_save(str(error))
            return None
        except Exception as error:  # invariant: no error of TierCheck stops training
            self._skip(step, type(error).__name__, repr(error))
            self._saver.report_cannot_save(repr(error))
            return None

    def _capture(self, step: int) -> Snapshot:
        """Lists the state, and copies at once what may change before the next update: buffers, user blob."""
        inventories, state = self._trained.inventories, self._trained.state
        inventory = inventories.take()
        facts = {**inventories.facts_of(inventory), TRAINING: self.training}
        blob = user_state.Packed(state, facts, (*inventory.fixed, self.training))
        self._compare(inventory)
        if found := inventories.attributes.changed_unsaved():
            remedy = "register it as a buffer" if found.startswith("tensor ") else "keep it in `state`"
            self._saver.warn(
                "Attribute",
                f"the {found} is a plain attribute of a module, changes, and is in no version: {remedy} if "
                "training depends on it",
            )
        for kind, message in self.not_given.forgotten:
            self._saver.warn(kind, message)
            self.unsaved = self.unsaved or message
        if name := user_state.find_aliased(state, [entry.tensor for entry in inventory.entries]):
            self._saver.warn(
                "Shared",
                f"state[{name!r}] holds tensors of the model or its optimizers: what comes back there "
                "will be copies of its own",
            )
        stored = self._trained.shares.own(inventory)
        proof = StateProof.take(self._sampler, inventory.entries, stored)
        entries = [self._at_once(entry) for entry in stored]
        device = accelerator_of(entry.tensor for entry in entries)
        ready = None if device is None else device.final()
        return Snapshot(step=step, entries=entries, blob=blob, proof=proof, device=device, ready=ready)

    def loaded(self, facts: Mapping[str, Any]) -> None:
        """Records that a load has ended. `facts`: the version's."""
        if not are_of_integration(self._trained.state.values()):
            self._trained.loaders.loaded(facts.get(LOADERS, ()))
        self.has_loaded, self._written, self._counters = True, {}, self._count_writes()

    def look_for_overwritten(self) -> None:
        """Warns if a parameter was written between the load and the first update after it.

        Some scripts write before each update (SAM, a momentum encoder), and do so before the second, too."""
        if not self._counters:  # another optimizer of the first step
            return
        counters, self._counters = self._counters, {}
        written = {
            name: now - counters[name]
            for name, now in self._count_writes().items()
            if now != counters.get(name, now)
        }
        if written and not self._written:
            self._written = written
            return
        self.has_loaded = False
        for name, times in self._written.items():
            if times != written.get(name, 0):
                self._saver.warn(
                    "Overwritten",
                    f"{name} was written after `restore` and before the first update: what the script does "
                    "at its start must come before `restore`, or is done again at each start",
                )
                return

    def _count_writes(self) -> dict[str, int]:
        """Returns torch's counter of changes of each parameter."""
        named = self._trained.model.named_parameters()
        return {name: write_count(shard_or_self(each)) for name, each in named}

    def _compare(self, inventory: Inventory) -> None:
        """Warns of changes of the model that a restarted script would not have."""
        if inventory.alike is not None and inventory.alike is self._compared:
            return
        self._compared = inventory.alike
        if not self._began_with:
            return
        now, began_with = _list_shapes(inventory.entries), self._began_with
        other = [name for name in began_with if now.get(name) != began_with[name]]
        # A restore brings buffers back that were added.
        other += (name for name, shape in now.items() if name not in began_with and len(shape) > 1)
        # One that is added has no tensor, or was named above.
        classes, began_modules = _list_classes(self._trained.model), self._began_modules
        other += (
            f"model/{name}" for name, kind in classes.items() if began_modules.get(name, kind) is not kind
        )
        for index, (began, trained) in enumerate(
            zip(self._began_training, _list_trained(inventory), strict=True)
        ):
            # A restore brings added ones back, and those that only changed places.
            numbered = any(name.startswith("#") for name in began)
            if trained[: len(began)] != began if numbered else not {*began} <= {*trained}:
                other.append(f"what optimizer {index} trains")
        if other:
            self._saver.warn(
                "Changed",
                f"{min(other)} is not what it was when `restore` was called: this can only be restored by a "
                "script that has changed its model likewise before `restore`",
            )
        for name, parameter in self._trained.model.named_parameters():
            if type(parameter) in PLAIN and any(
                isinstance(each, torch.Tensor) for each in vars(parameter).values()
            ):
                self._saver.warn(
                    "Attribute",
                    f"a tensor that is kept as an attribute of the parameter {name} is in no version",
                )

    def _at_once(self, entry: Entry) -> Entry:
        if entry.lazy and entry.name not in self._saver.mutating:
            return entry
        return entry._replace(tensor=entry.tensor.clone(), lazy=False)

    def _skip(self, step: int, kind: str, message: str) -> None:
        self._saver.skip_snapshot(step, kind, message)
        self._saver.report_skipped(step)


def _list_trained(inventory: Inventory) -> list[list[str]]:
    """Returns the class of each optimizer, and the names of its parameters."""
    return [[saved["class"], *saved["states"]] for saved in inventory.facts["optimizers"]]


def _list_classes(model: torch.nn.Module) -> dict[str, type]:
    """Returns the class of each module, by name."""
    return {name: type(module) for name, module in model.named_modules()}


_Shape = tuple[Any, ...]
"""The properties of a tensor that must be equal when the model is restored: of a buffer only the dtype.

Of a parameter also shape and order in memory, which decides the order of sums."""


def _list_shapes(entries: Iterable[Entry]) -> dict[str, _Shape]:
    """Returns the properties of the model's tensors, by their names in a slot."""
    return {
        name: (tensor.dtype, tensor.shape, _order(tensor)) if lazy else (tensor.dtype,)
        for name, tensor, lazy, *_ in entries
        if name.startswith("model/")
    }


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the strides that matter; empty if the tensor is not strided."""
    if tensor.layout is not torch.strided:
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
