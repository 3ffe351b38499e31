"""Compares where data loaders are after a restore with where they were, and repeats what was drawn.

A DataLoader draws a seed, and mostly the order of its epoch, when an iteration begins. A script that is
resumed in the middle of an epoch begins an iteration where an undisturbed run has begun none. So it begins
from the generators' states at which the interrupted one had begun, and leaves the generators as restored. So
does a batch that the script skips, for which a dataset without workers may draw.
"""

from __future__ import annotations

import functools
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state.readable import UNCHANGEABLE
from tiercheck.trainer.state.user_state import generator_state, random_state, set_random_state

T = TypeVar("T")

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
    data: tuple[str, int, int]
    """The dataset's class and length, and the size of batches, by which the loader is known again."""
    order: int | None
    """The fingerprint of the plain values that its samplers and its dataset had; None: not known."""
    length: int
    """The number of batches of the epoch; _ENDLESS: not known."""
    before: int = 0
    """The number of batches of this epoch that an earlier process was given and this iteration leaves out."""
    seen: int = 0
    """The number of batches at the end of the newest step."""
    began: Mapping[str, Any] = field(default_factory=dict)
    """The states of the generators when it began, or when the one began that it goes on with."""
    is_later: bool = False
    """True for another epoch of workers that persist, which draws no seed for them."""

    @property
    def given(self) -> int:
        """Returns the number of batches so far; 0 if the iteration is gone, or has not begun."""
        return getattr(self.iterator(), "_num_yielded", 0)

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
        self._newest: dict[tuple[str, int, int], _Iteration] = {}
        self._ends: dict[tuple[str, int, int], int] = {}
        """The number of batches after which each loader's last iteration was left, by its dataset."""
        self._expected: list[Mapping[str, Any]] = []
        """The facts of those of the restored step, until the next one has ended."""
        self._begun: list[tuple[_Iteration, Mapping[str, Any]]] = []
        """The iterations that have begun instead of these, with the facts of each."""
        self._restored: Mapping[str, Any] = {}
        """The states of the generators that were restored; empty: none, or a step has ended since."""
        self._empty: tuple[_Iteration, Tensor] | None = None
        """The iteration that has begun at an epoch's end, and the generator's state after that."""
        self.begins_epoch = False
        """True if the first step after a restore is the first of an epoch, and so draws more than others."""
        _watchers().add(self)

    def facts(self) -> list[dict[str, Any]]:
        """Returns the positions at the end of the newest step."""
        return [self._facts_of(each) for each in self._advanced]

    def _facts_of(self, each: _Iteration) -> dict[str, Any]:
        length = self._ends.get(each.data, each.length)  # some scripts leave an iteration after some batches
        return {
            "data": [*each.data],
            "order": each.order,
            "given": each.before + each.seen,
            "length": length,
            "persists": getattr(each.iterator(), "_persistent_workers", False),
            "began": each.began,
            "is_later": each.is_later,
            "own": _own_states(each.loader()),
        }

    def loaded(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Expects the loaders of a version to go on. Call it when the generators are restored."""
        self._expected, self._begun, self._restored = list(facts), [], random_state()
        for each in self._iterations:
            self._find_expected(each)

    def end_step(self, is_saved: Callable[[object], bool]) -> str:
        """Notes positions. Returns a message if a loader has not gone on where it was; empty: none.

        `is_saved`: returns whether the script's `state` has an object, and so may have its position."""
        self._iterations = [each for each in self._iterations if each.iterator() is not None]
        self._advanced = [each for each in self._iterations if each.given != each.seen]
        for each in self._advanced:
            each.before, each.seen = 0 if each.given < each.seen else each.before, each.given
        begun, self._begun, self._expected, self._empty = self._begun, [], [], None
        self._restored, self.begins_epoch = {}, False
        return next(filter(None, [self._check(*each, is_saved) for each in begun]), "")

    def _check(self, now: _Iteration, then: Mapping[str, Any], is_saved: Callable[[object], bool]) -> str:
        loader = now.loader()
        if not 0 < now.given <= then["given"] < then["length"]:
            now.before = 0  # the script skips what was given, or an epoch begins
            if then["is_later"] or (then["persists"] and then["given"] == then["length"]):
                return (
                    f"the workers of the DataLoader over {now.data[0]} persist, and have begun with new "
                    "generators: if the dataset draws random numbers in them, its samples are others"
                )
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

    def begins(self, iterator: Any, loader: Any) -> _Iteration:
        """Handles the begin of an iteration, before it draws."""
        known = _data(loader), _order(loader), _batches(loader)  # a sampler may change as it begins
        now = _Iteration(weakref.ref(iterator), weakref.ref(loader), *known)
        if self._empty is not None and self._empty[0].loader() is loader:
            # A sampler restored at its epoch's end gave no batch: an undisturbed run has drawn one seed.
            (first, drawn), self._empty = self._empty, None
            if not first.given and torch.equal(drawn, torch.get_rng_state()):
                torch.set_rng_state(self._restored["torch"])
        now.began = _generator_states(loader)
        then = self._find_expected(now)
        if then is None:
            return now
        if getattr(loader, "next_iter_state", None):  # a StatefulDataLoader has its position, and its seeds
            self._begun.pop()
            now.began, now.before = then["began"], 0
        elif _is_midway(then):
            now.began, now.is_later = then["began"], then["is_later"]
            _set_generators(loader, now.began)
        elif then["given"] == then["length"] and _has_generators_of(loader, then):
            _set_to_end_of_epoch(loader, then)
        return now

    def begun(self, loader: Any, now: _Iteration, drawn: Mapping[str, Any]) -> None:
        """Handles it afterwards. `drawn`: the states of the generators before it."""
        self._iterations.append(now)
        last, self._newest[now.data] = self._newest.get(now.data), now
        if last is not None and (given := last.before + max(last.seen, last.given)):
            self._ends[now.data] = given if given < last.length else now.length
        then = next((then for each, then in self._begun if each is now), None)
        if then is None:
            return
        iterator = now.iterator()
        is_restored = torch.equal(drawn["torch"], self._restored["torch"])
        self.begins_epoch |= is_restored and then["given"] >= then["length"]
        is_same = now.order is not None and now.order == then["order"]
        if _is_midway(then):
            _draw_first_index_from(iterator, now.began if now.is_later else random_state())
            set_random_state(drawn)
            if is_same:
                _keep_generators(
                    iterator, then["given"], functools.partial(self._end_skipping, drawn["torch"])
                )
        elif then["persists"]:  # only the first epoch of such workers draws a seed
            set_random_state(drawn)
        elif loader.generator is None and is_restored:
            # Where a stream ends is not known: it goes on if it does not begin as it once began.
            if then["length"] == _ENDLESS and then["order"] is not None and not is_same:
                set_random_state(drawn)
            else:
                self._empty = now, torch.get_rng_state()

    def _end_skipping(self, drawn: Tensor) -> None:
        """Sets the generators as restored before the first new batch, if the script drew nothing.

        It may have set a seed for the epoch before, or have evaluated. What it draws for the step is kept.
        `drawn`: torch's state when the skipping began."""
        if self._restored and torch.equal(drawn, torch.get_rng_state()):
            set_random_state(self._restored)

    def later_epoch(self, iterator: Any, loader: Any) -> None:
        """Handles another epoch of workers that persist, before it draws."""
        for each in self._iterations:
            if each.iterator() is iterator:
                each.began, each.is_later, each.before = _generator_states(loader), True, 0

    def _find_expected(self, now: _Iteration) -> Mapping[str, Any] | None:
        """Returns the facts of the iteration that this one has begun instead of; None: there are none."""
        then = next((each for each in self._expected if now.is_of(each) and not now.given), None)
        if then is not None:
            self._expected.remove(then)
            self._begun.append((now, then))
            now.before = then["given"] if _is_midway(then) and then["length"] == now.length else 0
        return then


def _is_midway(then: Mapping[str, Any]) -> bool:
    """Returns whether an iteration with these facts was known to have more batches to give."""
    return bool(0 < then["given"] < then["length"] != _ENDLESS)


@functools.cache
def _watchers() -> weakref.WeakSet[LoaderPositions]:
    """Returns all LoaderPositions of the process, which from then on are called as iterations begin."""
    watchers: weakref.WeakSet[LoaderPositions] = weakref.WeakSet()
    begin, begin_again = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset

    @functools.wraps(begin)
    def begin_watched(iterator: Any, loader: Any) -> None:
        drawn = _never_raise(random_state) if watchers else None
        watching = [] if drawn is None else [*watchers]
        begins = [(each, _never_raise(each.begins, iterator, loader)) for each in watching]
        begin(iterator, loader)
        for each, now in begins:
            if now is not None:
                _never_raise(each.begun, loader, now, drawn)

    @functools.wraps(begin_again)
    def begin_again_watched(iterator: Any, loader: Any, first_iter: bool = False) -> None:
        for each in () if first_iter else [*watchers]:
            _never_raise(each.later_epoch, iterator, loader)
        begin_again(iterator, loader, first_iter)

    _BaseDataLoaderIter.__init__ = begin_watched  # type: ignore[method-assign, assignment]
    _BaseDataLoaderIter._reset = begin_again_watched  # type: ignore[method-assign, assignment]
    return watchers


def _never_raise(work: Callable[..., T], *arguments: Any) -> T | None:
    try:
        return work(*arguments)
    except Exception as error:  # invariant: no error of TierCheck stops training
        log.warning("Data: a resume in the middle of an epoch may draw other numbers: %r", error)
        return None


def _keep_generators(iterator: Any, batches: int, end: Callable[[], None]) -> None:
    """Puts the generators back after each of the first batches, which a script skips: an undisturbed run has
    drawn for them before. Calls `end` before the one that follows."""
    this, fetch = weakref.ref(iterator), type(iterator)._next_data

    def fetch_without_draws() -> Any:
        iterator: Any = this()
        if iterator._num_yielded >= batches:
            vars(iterator).pop("_next_data", None)
            _never_raise(end)
            return fetch(iterator)
        drawn = _never_raise(random_state)
        try:
            return fetch(iterator)
        finally:
            _never_raise(set_random_state, drawn)

    iterator._next_data = fetch_without_draws


def _draw_first_index_from(iterator: Any, states: Mapping[str, Any]) -> None:
    """Makes the sampler draw its order from generators with these states, and leaves them as they are."""
    sampler = _BegunSampler(iterator._index_sampler, states)
    iterator._sampler_iter = sampler.first_of(iterator._sampler_iter)
    iterator._index_sampler = sampler  # workers begin it once more


@dataclass
class _BegunSampler:
    """A sampler that draws from generators with other states until it has given its first index."""

    sampler: Any
    states: Mapping[str, Any] | None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        with self._drawing():
            indices = iter(self.sampler)
        return self.first_of(indices)

    def first_of(self, indices: Iterator[Any]) -> Iterator[Any]:
        with self._drawing():
            first = list(islice(indices, 1))
        self.states = None
        yield from chain(first, indices)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        if self.states is None:
            yield
            return
        drawn = _never_raise(random_state)
        _never_raise(set_random_state, _of_host(self.states))
        try:
            yield
        finally:
            self.states = _never_raise(random_state)
            _never_raise(set_random_state, drawn)


def _set_to_end_of_epoch(loader: Any, then: Mapping[str, Any]) -> None:
    """Sets a loader's own generator as an undisturbed run has it when the next epoch begins.

    RandomSampler draws from it once more at an epoch's end, after the version was saved."""
    if type(loader.batch_sampler) is not BatchSampler or type(loader.sampler) is not RandomSampler:
        return
    drawn = random_state()
    _set_generators(loader, then["began"])
    if loader.generator is not None and not then["is_later"]:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # the seed of its workers
    for _ in loader.sampler:
        pass
    set_random_state(drawn)


def _generator_states(loader: Any) -> dict[str, Any]:
    """Returns the states of all generators from which a loader may draw when an iteration begins."""
    return {**_of_host(random_state()), "own": _own_states(loader)}


def _own_states(loader: Any) -> list[Tensor]:
    return [each.get_state() for each in _generators(loader)] if loader is not None else []


def _has_generators_of(loader: Any, then: Mapping[str, Any]) -> bool:
    """Returns whether a loader's own generators were restored, or forgotten, and not seeded for an epoch."""
    for now, begun, saved in zip(_own_states(loader), then["began"]["own"], then["own"], strict=False):
        seeds = {torch.Generator().set_state(each).initial_seed() for each in (now, begun)}
        if not torch.equal(now, saved) and (len(seeds) > 1 or torch.equal(now, begun)):
            return False
    return True


def _set_generators(loader: Any, states: Mapping[str, Any]) -> None:
    set_random_state(_of_host(states))
    for generator, state in zip(_generators(loader), states["own"], strict=False):
        generator.set_state(state)


def _of_host(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: states[name] for name in ("torch", "python", "numpy") if name in states}


def _generators(loader: Any) -> list[torch.Generator]:
    """Returns the generators of a loader's own and of its samplers."""
    own = [getattr(each, "generator", None) for each in (loader, *_samplers(loader))]
    return list({id(each): each for each in own if isinstance(each, torch.Generator)}.values())


def _samplers(loader: Any) -> list[Any]:
    """Returns what decides the order of a loader's batches."""
    return [loader.batch_sampler, getattr(loader.batch_sampler, "sampler", loader.sampler)]


def _data(loader: Any) -> tuple[str, int, int]:
    size = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
    return type(loader.dataset).__name__, _length(loader.dataset), size if isinstance(size, int) else 0


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
