"""Compares where data loaders are after a restore with where they were, and draws no seed twice.

A DataLoader draws a seed from torch's generator when an iteration begins. A script that is resumed in the
middle of an epoch begins an iteration where an undisturbed run has begun none.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from tiercheck.trainer.state.readable import UNCHANGEABLE
from tiercheck.trainer.state.user_state import generator_state

LOADERS = "data loaders"
"""The key of `LoaderPositions.facts` in the facts of snapshots and deltas."""
_ENDLESS = sys.maxsize
_DEEP, _MEMBERS = 4, 64
"""The depth, and the number of members, up to which values are read that decide an order."""


@dataclass(eq=False)
class _Iteration:
    """An iteration over a loader of this process."""

    iterator: weakref.ref[Any]
    loader: weakref.ref[Any]
    data: tuple[str, int]
    """The class and the length of the dataset, by which the loader is known again."""
    order: int | None
    """The fingerprint of the plain values that its samplers and its dataset had; None: not known."""
    length: int
    """The number of batches of the epoch; _ENDLESS: not known."""
    before: int = 0
    """The number of batches of this epoch that an earlier process was given and this iteration leaves out."""
    seen: int = 0
    """The number of batches at the end of the newest step."""
    steps: int = 0
    """The number of steps in which it gave batches."""

    @property
    def given(self) -> int:
        """Returns the number of batches so far; 0 if the iteration is gone."""
        iterator = self.iterator()
        return 0 if iterator is None else iterator._num_yielded

    def is_of(self, then: Mapping[str, Any]) -> bool:
        """Returns whether the iteration with these facts was of the same data, or this is of their rest."""
        is_rest = self.length == then["length"] - then["given"]
        return self.data == (*then["data"],) or (is_rest and self.data[0] == then["data"][0])


class LoaderPositions:
    """Tracks the DataLoaders that give batches in the steps of one Checkpointer."""

    def __init__(self) -> None:
        self._iterations: list[_Iteration] = []
        self._advanced: list[_Iteration] = []
        """The iterations that gave batches in the newest step."""
        self._newest: dict[tuple[str, int], _Iteration] = {}
        self._ends: dict[tuple[str, int], int] = {}
        """The number of batches after which each loader's last iteration was left, by its dataset."""
        self._expected: list[Mapping[str, Any]] = []
        """The facts of those of the restored step, until the next one has ended."""
        self._begun: list[tuple[_Iteration, Mapping[str, Any]]] = []
        """The iterations that have begun instead of these, with the facts of each."""
        self._restored = torch.empty(0)
        """The state of torch's generator that was restored; empty: none, or a step has ended since."""
        self._empty: tuple[_Iteration, Tensor] | None = None
        """The iteration that has begun at an epoch's end, and the generator's state after that."""
        _watchers().add(self)

    def facts(self) -> list[dict[str, Any]]:
        """Returns the positions at the end of the newest step."""
        return [self._facts_of(each) for each in self._advanced]

    def _facts_of(self, each: _Iteration) -> dict[str, Any]:
        given, lasts = each.before + each.seen, getattr(each.iterator(), "_persistent_workers", False)
        # Some scripts begin an iteration in each step, or leave it after some batches.
        length = self._ends.get(each.data, each.length if each.steps > 1 or each.before else 0)
        return {
            "data": [*each.data],
            "order": each.order,
            "given": given,
            "length": length,
            "goes_on": given < length != _ENDLESS or lasts,  # without another seed
        }

    def loaded(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Expects the loaders of a version to go on. Call it when the generators are restored."""
        self._expected, self._begun, self._restored = list(facts), [], torch.get_rng_state()
        for each in self._iterations:
            self._find_expected(each)

    def end_step(self, is_saved: Callable[[object], bool]) -> str:
        """Notes positions. Returns a message if a loader has not gone on where it was; empty: none.

        `is_saved`: returns whether the script's `state` has an object, and so may have its position."""
        self._iterations = [each for each in self._iterations if each.iterator() is not None]
        self._advanced = [each for each in self._iterations if each.given != each.seen]
        for each in self._advanced:
            each.before, each.seen = 0 if each.given < each.seen else each.before, each.given
            each.steps += 1
        begun, self._begun, self._expected, self._empty = self._begun, [], [], None
        self._restored = torch.empty(0)
        return next(filter(None, [self._check(*each, is_saved) for each in begun]), "")

    def _check(self, now: _Iteration, then: Mapping[str, Any], is_saved: Callable[[object], bool]) -> str:
        loader = now.loader()
        if not 0 < now.given <= then["given"] < then["length"]:
            now.before = 0  # the script skips what was given, or an epoch begins
        elif (
            loader is not None
            and (now.data, now.order) == ((*then["data"],), then["order"] or 0)
            and not any(map(is_saved, (loader, *_samplers(loader), loader.dataset)))
        ):
            now.before = 0
            unless = " unless that was all" * (then["length"] == _ENDLESS)
            return (
                f"the DataLoader over {now.data[0]} had given {then['given']} batches of its epoch when "
                f"the version was saved, and begins anew: these come again{unless}. Give `state` its "
                "position: use a ResumableSampler, or torchdata's StatefulDataLoader"
            )
        elif now.length == _ENDLESS:
            now.before, now.order, now.length = then["given"], then["order"], then["length"]
        return ""

    def begins(self, loader: Any) -> None:
        """Handles the begin of an iteration, before it draws a seed."""
        if self._empty is None or self._empty[0].data != _data(loader):
            return
        # A sampler that was restored at its epoch's end gave no batch: an undisturbed run has drawn one seed.
        (first, drawn), self._empty = self._empty, None
        if not first.given and torch.equal(drawn, torch.get_rng_state()):
            torch.set_rng_state(self._restored)

    def begun(self, loader: Any, now: _Iteration, drawn: Tensor) -> None:
        """Handles it afterwards. `drawn`: the state of torch's generator before it."""
        self._iterations.append(now)
        last, self._newest[now.data] = self._newest.get(now.data), now
        if last is not None and (given := last.before + max(last.seen, last.given)):
            self._ends[now.data] = given if given < last.length else now.length
        if (then := self._find_expected(now)) is None:
            return
        # An order that is drawn from this generator anew is none that goes on.
        is_fixed = getattr(_samplers(loader)[1], "generator", loader) is not None
        if loader.generator is None and is_fixed and torch.equal(drawn, self._restored):
            # Where a stream ends is not known: it goes on if it does not begin as it once began.
            is_elsewhere = then["length"] == _ENDLESS and then["order"] not in (None, now.order)
            if then["goes_on"] or is_elsewhere:
                torch.set_rng_state(drawn)
            else:
                self._empty = now, torch.get_rng_state()

    def _find_expected(self, now: _Iteration) -> Mapping[str, Any] | None:
        """Returns the facts of the iteration that this one has begun instead of; None: there are none."""
        then = next((each for each in self._expected if now.is_of(each) and not now.given), None)
        if then is not None:
            self._expected.remove(then)
            self._begun.append((now, then))
            is_whole = then["given"] < then["length"] == now.length != _ENDLESS
            now.before = then["given"] if is_whole else 0
        return then


@functools.cache
def _watchers() -> weakref.WeakSet[LoaderPositions]:
    """Returns all LoaderPositions of the process, which from then on are called as iterations begin."""
    watchers: weakref.WeakSet[LoaderPositions] = weakref.WeakSet()
    begin = _BaseDataLoaderIter.__init__

    @functools.wraps(begin)
    def begin_watched(iterator: Any, loader: Any) -> None:
        watching = [*watchers]
        for each in watching:
            each.begins(loader)
        drawn = torch.get_rng_state()
        known = _data(loader), _order(loader), _batches(loader)  # a sampler may change as it begins
        begin(iterator, loader)
        for each in watching:
            each.begun(loader, _Iteration(weakref.ref(iterator), weakref.ref(loader), *known), drawn)

    _BaseDataLoaderIter.__init__ = begin_watched  # type: ignore[method-assign, assignment]
    return watchers


def _samplers(loader: Any) -> list[Any]:
    """Returns what decides the order of a loader's batches."""
    return [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)]


def _data(loader: Any) -> tuple[str, int]:
    return type(loader.dataset).__name__, _length(loader.dataset)


def _batches(loader: Any) -> int:
    # That of a stream may be a guess, which torch would then warn of.
    return _length(loader) if loader._dataset_kind == _DatasetKind.Map else _ENDLESS


def _length(value: Any) -> int:
    try:
        return len(value)
    except Exception:  # a sampler without a length mostly goes on and on
        return _ENDLESS


def _order(loader: Any) -> int | None:
    try:
        read = [_read(each, _DEEP) for each in _samplers(loader)]
        kept = vars(loader.dataset).items()
        if loader._dataset_kind == _DatasetKind.Map:
            kept = [(name, each) for name, each in kept if type(each) in UNCHANGEABLE]
        own = [(name, _read(each, _DEEP)) for name, each in kept if "epoch" not in name]
    except Exception:  # one of them may hold a position that cannot be read
        return None
    return zlib.crc32(repr([read, own]).encode()) or 1


def _read(value: Any, deep: int) -> Any:
    """Returns the plain values in an object, except the number of an epoch. Raises TypeError for no data."""
    kind = type(value)
    if kind in UNCHANGEABLE:
        return value
    if isinstance(value, (list, tuple, dict, set)) and deep:
        members = value.items() if isinstance(value, dict) else value
        return len(value), [_read(each, deep - 1) for each in members] if len(value) <= _MEMBERS else ()
    if isinstance(value, Dataset) or hasattr(value, "shape") or callable(value):
        return kind.__name__
    if generator_state(value) is not None:
        return kind.__name__
    own = vars(value)
    return kind.__name__, [(name, _read(own[name], deep - 1)) for name in own if "epoch" not in name and deep]
