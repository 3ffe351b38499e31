"""Caches a rank's inventory between snapshots, and checks that it still holds.

Only plain models and optimizers are cached, and those that FSDP2 shards: they have no hooks or methods that
decide what the state_dict is, and store only plain tensors or shards of such. Everything else is listed anew
each time. The cache keeps no tensor alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.state.aliasing import refuse_copies
from tiercheck.trainer.state.capture import BESIDE, Inventory, take_inventory
from tiercheck.trainer.state.optimizer_state import attributes_of, odd_attributes
from tiercheck.trainer.state.plain_attributes import PlainAttributes, owners_in
from tiercheck.trainer.tensors.buffers import NonPersistentBuffers
from tiercheck.trainer.tensors.tensor_parts import PLAIN, Entry, exact_memory, parameters_of, read_each
from tiercheck.trainer.tensors.tensor_parts import shard_or_self as _shard

_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters")
_hooks, _pre_hooks = attrgetter("_state_dict_hooks"), attrgetter("_state_dict_pre_hooks")
FSDP2 = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_left_out = attrgetter("_non_persistent_buffers_set")
_children, _parameters, _buffers = attrgetter("_modules"), attrgetter("_parameters"), attrgetter("_buffers")
_look, _where = attrgetter("device", "dtype", "shape"), attrgetter("device", "shape")
_trained, _spec, _local = attrgetter("requires_grad"), attrgetter("_spec"), attrgetter("_local_tensor")
_training = attrgetter("training")
_EMPTY: dict[str, Any] = {}
ATTRIBUTES = "attributes of modules"
"""The key of `Inventories.attributes` in the facts of snapshots and deltas."""


class _NotRemembered(Exception):
    """The inventory must be listed anew."""


class Inventories:
    """Takes inventories of one model and its optimizers, in the training thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        beside: Mapping[str, nn.Module] | None = None,
        settings: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`beside`: other modules with tensors to store. `settings`: returns additional facts."""
        self._settings = settings
        self._model = model
        self._beside = beside or {}
        modules = {"": model, **{f"{BESIDE}{name}/": each for name, each in self._beside.items()}}
        self.passing = NonPersistentBuffers(modules)
        """The buffers that are not persistent. A restore calls their `begin`."""
        self.attributes = PlainAttributes(model, lambda: owners_in(modules))
        self.evaluating = False
        """True if the model evaluated as a whole when the last update was made."""
        self._optimizers = self.outer = optimizers
        """`outer`: see `take_inventory`."""
        self.first: set[str] | None = None
        """The names of all entries when the script began, so that versions can name buffers added later."""
        self._modules: list[nn.Module] = []
        self._marks: list[Any] | None = None
        self._names: list[str] = []
        self._lazy: list[bool] = []
        self._finite: list[bool] = []
        """One value for each entry, as in the two lists before."""
        self._places: list[int] = []
        """The index of each entry in the list of all tensors."""
        self._facts: dict[str, Any] = {}
        self._alike: object | None = None
        self._checked_addresses: list[Any] = []
        """The addresses of all tensors when `refuse_copies` last found no copy; empty: none."""

    def take(self) -> Inventory:
        """Takes the inventory as `take_inventory` does. Raises NotCapturable."""
        passing = self.passing.written()
        if self._marks is not None:
            try:
                marks, tensors = self._read(passing)
            except (_NotRemembered, RuntimeError):  # the latter: a tensor has no memory to look at
                marks, tensors = [], []
            if marks == self._marks:
                return self._again(tensors)
        passing = self.passing.looked_for()
        cleared = self.passing.cleared()
        inventory = take_inventory(
            self._model,
            self._optimizers,
            self._beside,
            passing,
            cleared=cleared,
            evaluating=self.evaluating,
            outer=self.outer,
        )
        if self.first is not None:
            held = {entry.name for entry in inventory.entries if not entry.lazy}
            inventory.facts["grown"] = sorted(held - self.first)
        looks = self._addresses(inventory)
        if not looks or looks != self._checked_addresses:
            refuse_copies(self._model, self._beside, inventory.entries)
            self._checked_addresses = looks
        self._remember(inventory, passing)
        return inventory

    def facts_of(self, inventory: Inventory) -> dict[str, Any]:
        """Returns all facts that a snapshot of these tensors stores."""
        if inventory.alike is None:
            self.attributes.list_places()  # a module may have been replaced
        return {**inventory.facts, **self.facts_of_step()}

    def facts_of_step(self) -> dict[str, Any]:
        """Returns the facts that may change at each step, which deltas store too."""
        return {**self._settings(), ATTRIBUTES: self.attributes.state_dict()}

    def _addresses(self, inventory: Inventory) -> list[Any]:
        """Returns the addresses of all tensors that modules hold or show; empty if not quickly known."""
        modules = [*self._all_modules()]
        owners = [*map(_parameters, modules), *map(_buffers, modules)]
        held = [_shard(tensor) for tensor in _all(dict.values, owners) if tensor is not None]
        shown = [entry.tensor for entry in inventory.entries]
        if {*map(type, held)} - PLAIN:
            return []
        try:
            return [list(map(_trained, held)), *map(Tensor.data_ptr, held), *map(Tensor.data_ptr, shown)]
        except RuntimeError:  # one of them has no memory
            return []

    def _all_modules(self) -> Iterable[nn.Module]:
        return chain.from_iterable(module.modules() for module in (self._model, *self._beside.values()))

    def _again(self, tensors: list[Tensor]) -> Inventory:
        origins = [tensors[place] for place in self._places]
        shards = map(Tensor.detach, map(_shard, origins))
        entries = tuple(map(Entry, self._names, shards, self._lazy, self._finite, origins))
        optimizers = [
            {
                **known,
                "groups": [
                    {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
                ],
                "attributes": attributes_of(optimizer),
            }
            for known, optimizer in zip(self._facts["optimizers"], self._optimizers, strict=True)
        ]
        fixed = tuple(known["states"] for known in optimizers)  # these describe only how to rebuild tensors
        return Inventory(entries, {**self._facts, "optimizers": optimizers}, fixed, self._alike)

    def _remember(self, inventory: Inventory, passing: Sequence[tuple[str, Tensor]]) -> None:
        self._marks, self._modules = None, [*self._all_modules()]
        try:
            marks, tensors = self._read(passing)
            places = {
                exact_memory(_shard(tensor)): place for place, tensor in reversed(list(enumerate(tensors)))
            }
            if len(places) != len({*map(id, tensors)}):
                return  # something shares memory, or has none: only a new list shows what is stored of it
            self._places = [places[exact_memory(entry.tensor)] for entry in inventory.entries]
        except (_NotRemembered, KeyError, RuntimeError):
            return
        self._names = [entry.name for entry in inventory.entries]
        self._lazy = [entry.lazy for entry in inventory.entries]
        self._finite = [entry.must_be_finite for entry in inventory.entries]
        facts = [{**known, "groups": [], "attributes": {}} for known in inventory.facts["optimizers"]]
        self._facts = {**inventory.facts, "optimizers": facts}
        self._marks, self._alike = marks, object()

    def _read(self, passing: Sequence[tuple[str, Tensor]]) -> tuple[list[Any], list[Tensor]]:
        """Returns what names and places depend on, and all tensors in order. Raises _NotRemembered."""
        modules = self._modules
        if any(map(_hooks, modules)):
            raise _NotRemembered
        for module in modules:
            for hook in _pre_hooks(module).values():
                if getattr(hook, "__module__", "") != FSDP2:
                    raise _NotRemembered
                hook(module, "", False)  # makes the parameters the shards again, not what was gathered
        classes = list(map(type, modules))
        for kind in {*classes}:
            if any(getattr(kind, method) is not getattr(nn.Module, method) for method in _METHODS):
                raise _NotRemembered
        if any("state_dict" in own or "_save_to_state_dict" in own for own in map(vars, modules)):
            raise _NotRemembered
        children, parameters, buffers = (list(map(of, modules)) for of in (_children, _parameters, _buffers))
        held = [*_all(dict.values, parameters), *_all(dict.values, buffers)]
        found: list[Tensor] = [tensor for tensor in held if tensor is not None]
        marks: list[Any] = [
            classes,
            list(map(frozenset, map(_left_out, modules))),
            *([*_all(dict.keys, owners)] for owners in (children, parameters, buffers)),
            *([*map(len, owners)] for owners in (children, parameters, buffers)),
            list(map(id, _all(dict.values, children))),
            list(map(id, held)),
            list(map(Tensor.data_ptr, map(_shard, found))),
            read_each(_look, found),
            list(map(Tensor.stride, map(_shard, found))),
            read_each(_trained, found),
            [self.evaluating, *map(_training, modules)],
            [name for name, _ in passing],
            self.passing.cleared(),
        ]
        tensors = list(found)
        for optimizer in self._optimizers:
            trained = parameters_of(optimizer)
            states = list(map(optimizer.state.get, trained, repeat(_EMPTY)))
            if {*map(type, states)} - {dict} or not all(
                issubclass(kind, Tensor) for kind in {*map(type, optimizer.state)}
            ):
                raise _NotRemembered
            kept = list(_all(dict.values, states))
            if not all(isinstance(value, Tensor) for value in kept) or len({*map(id, kept)}) < len(kept):
                raise _NotRemembered
            marks += [list(map(id, trained)), list(map(len, states)), list(_all(dict.keys, states))]
            marks.append(read_each(_trained, trained))
            marks.append([len(group["params"]) for group in optimizer.param_groups])
            marks += [read_each(_where, kept), list(map(Tensor.stride, map(_shard, kept)))]
            if odd_attributes(optimizer):  # any of them may hold a tensor by now
                raise _NotRemembered
            tensors += kept
        sharded = [tensor for tensor in tensors if type(tensor) not in PLAIN]
        if any(kind.__name__ != "DTensor" for kind in {*map(type, sharded)}):
            raise _NotRemembered
        if {*map(type, map(_local, sharded))} - PLAIN:
            raise _NotRemembered
        # Mesh, placements and shape; not by DTensor's properties, which are Python.
        marks.append(list(map(_spec, sharded)))
        return marks, tensors


def _all(view: Callable[[dict[str, Any]], Iterable[Any]], owners: Iterable[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(view, owners))
