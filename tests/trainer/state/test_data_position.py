"""Promise: no sample comes twice and none is left out, over any kills and any numbers of ranks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from tiercheck import Checkpointer, ResumableSampler
from tiercheck.trainer.checkpointer import find
from tiercheck.trainer.state import loaders


def ranks_of(world_size: int, length: int, size: int, **options: object) -> list[ResumableSampler]:
    return [
        ResumableSampler(length, size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, int]]]:
    """(samples, global batch, lives): in each life a number of ranks, batches trained, and how many of them
    are lost by its end."""
    length = draw(st.integers(1, 60))
    size = draw(st.integers(1, length))
    runs = draw(
        st.lists(
            st.tuples(st.integers(1, size), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6
        )
    )
    return length, size, runs


@given(lives(), st.sampled_from(["drop", "carry"]), st.booleans(), st.integers(0, 3))
def test_over_any_kills_and_worlds_each_sample_of_an_epoch_comes_once(
    case: tuple[int, int, list[tuple[int, int, int]]], tail: str, shuffle: bool, seed: int
) -> None:
    length, size, runs = case
    options = {"seed": seed, "shuffle": shuffle, "tail": tail}
    kept = ranks_of(1, length, size, **options)[0].state_dict()
    trained: list[list[int]] = []
    for world_size, batches, lost in runs:
        samplers = ranks_of(world_size, length, size, **options)
        for sampler in samplers:
            sampler.load_state_dict(kept)
        before, states, fresh = len(trained), [kept], []
        while len(fresh) < batches:
            for parts in zip(*(sampler.follow(sampler) for sampler in samplers), strict=True):
                fresh.append([index for part in parts for index in part])
                states.append(samplers[0].state_dict())
                if len(fresh) == batches:
                    break
        survived = max(0, batches - lost)  # the rest was trained after the version that comes back
        kept, trained = states[survived], trained[:before] + fresh[:survived]
    flat = [index for batch in trained for index in batch]
    assert all(len(batch) == size for batch in trained)
    whole = length if tail == "carry" else length // size * size
    for begin in range(0, len(flat), whole):
        epoch = flat[begin : begin + whole]
        assert len({*epoch}) == len(epoch)
        if tail == "carry" and len(epoch) == whole:
            assert {*epoch} == {*range(length)}
    # and the same ones as if nothing had happened
    unbroken, alone = [], ranks_of(1, length, size, **options)[0]
    while len(unbroken) < len(trained):
        unbroken += list(alone.follow(alone))
    assert trained == unbroken[: len(trained)]


@given(st.integers(1, 60), st.data())
def test_another_batch_size_goes_on_from_the_same_sample(length: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, length), min_size=2, max_size=5))
    state, trained = ResumableSampler(length, sizes[0]).state_dict(), []
    for size in sizes:
        sampler = ResumableSampler(length, size)
        sampler.load_state_dict(state)
        first = sampler.epoch
        for batch in sampler.follow(sampler):
            trained += [(first, index) for index in batch]
            break
        state = sampler.state_dict()
    assert len({*trained}) == len(trained)


def test_every_epoch_has_an_order_of_its_own() -> None:
    sampler = ResumableSampler(100, 10)
    first, second = list(sampler.follow(sampler)), list(sampler.follow(sampler))
    assert sorted(chain.from_iterable(first)) == sorted(chain.from_iterable(second)) == list(range(100))
    assert first != second
    assert list(ResumableSampler(100, 10, seed=1)) != first


def test_length_is_that_of_the_epoch_wherever_the_loop_is() -> None:
    for tail, batches in (("drop", [3, 3]), ("carry", [4, 3, 3, 4])):
        sampler = ResumableSampler(10, 3, tail=tail)
        for expected in batches:
            assert [len(sampler) for _ in sampler.follow(sampler)] == [expected] * expected


@pytest.mark.parametrize("tail", ["drop", "carry"])
@pytest.mark.parametrize("leave_at_last", [False, True])
def test_what_a_script_does_at_an_epochs_end_is_done_once_wherever_it_is_resumed(
    tail: str, leave_at_last: bool
) -> None:
    def train(state: dict[str, Any], stop: int) -> dict[str, Any]:
        """Three epochs, each with a validation at its end; a version is kept at each step until `stop`."""
        order = ResumableSampler(10, 3, tail=tail)
        if state:
            order.load_state_dict(state["order"])
        done: list[Any] = list(state.get("done", []))
        while order.epoch < 3:
            for number, batch in enumerate(order.follow(order), 1):
                done.append(batch)
                state = {"order": order.state_dict(), "done": list(done)}
                if len(done) == stop:
                    return state
                if leave_at_last and number == len(order):
                    break
            done.append("validation")
        return {"done": done}

    whole = train({}, 0)["done"]
    assert whole.count("validation") == 3
    for stop, what in enumerate(whole, 1):
        if what != "validation":
            assert train(train({}, stop), 0)["done"] == whole


def test_a_position_in_another_order_is_refused() -> None:
    state = ResumableSampler(100, 10).state_dict()
    for other in (
        ResumableSampler(101, 10),
        ResumableSampler(100, 10, seed=1),
        ResumableSampler(100, 10, tail="carry"),
    ):
        with pytest.raises(ValueError, match="another order"):
            other.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_iteration_from_before_a_load_gives_no_batch_of_the_order_it_was_in(workers: int) -> None:
    """As of a loop whose process outlives another rank: it would be at other samples than the replacement."""
    order = ResumableSampler(24, 2, shuffle=False)
    batches = iter(DataLoader(range(24), batch_sampler=order, num_workers=workers))
    next(batches)
    order.load_state_dict(order.state_dict())
    with pytest.raises(RuntimeError, match="a position was put back since this iteration began"):
        next(batches)


def test_batches_that_leave_a_rank_without_a_sample_are_refused() -> None:
    with pytest.raises(ValueError, match="a sample for each of 4 ranks"):
        ResumableSampler(100, 3, rank=0, world_size=4)
    with pytest.raises(ValueError, match="no more than the 2 there are"):
        ResumableSampler(2, 3)


class Squares(Dataset[float]):
    """Its samples are drawn from, as augmentation does."""

    def __getitem__(self, index: int) -> float:
        return index + random.random() * 0.0

    def __len__(self) -> int:
        return 40


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_has_fetched_ahead_does_not_count_and_resuming_draws_nothing(workers: int) -> None:
    def train(sampler: ResumableSampler, batches: int) -> list[tuple[list[float], float]]:
        loader = DataLoader(Squares(), batch_sampler=sampler, num_workers=workers)
        seen: list[tuple[list[float], float]] = []
        while len(seen) < batches:
            for batch in sampler.follow(loader):
                seen.append((batch.tolist(), torch.rand(()).item()))
                if len(seen) == batches:
                    break
        return seen

    torch.manual_seed(0)
    whole = train(ResumableSampler(40, 4), 17)
    torch.manual_seed(0)
    first = ResumableSampler(40, 4)
    begun = train(first, 6)
    state, drawn = first.state_dict(), torch.get_rng_state()
    second = ResumableSampler(40, 4)
    second.load_state_dict(state)
    torch.set_rng_state(drawn)
    assert begun + train(second, 11) == whole


def train_on(
    batch: torch.Tensor, optimizer: torch.optim.Optimizer, checkpointer: Checkpointer
) -> tuple[list[float], float]:
    """Makes a step. Returns the batch, and a number that a script draws for it, as for dropout."""
    seen = batch.tolist(), torch.rand(()).item()
    optimizer.step()
    checkpointer.step()
    checkpointer.wait()
    return seen


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seen", [3, 5, 7])
def test_loader_with_its_own_position_draws_nothing_where_it_goes_on(
    tmp_path: Path, workers: int, seen: int
) -> None:
    """Neither in mid-epoch nor at its end: dropout and the next order would be others."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def train(steps: int) -> list[tuple[list[float], float]]:
        model = nn.Linear(1, 1)
        loader = stateful(Squares(), 8, shuffle=True, num_workers=workers)
        lines = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(model, optimizer, state={"data": loader}, folder=tmp_path, every=1) as checkpointer:
            done = checkpointer.restore()
            while done < steps:
                for batch in loader:
                    lines.append(train_on(batch, optimizer, checkpointer))
                    done += 1
                    if done == steps:
                        break
        return lines

    torch.manual_seed(0)
    whole = train(12)
    shutil.rmtree(tmp_path)
    torch.manual_seed(0)
    assert train(seen) + train(12) == whole


class Epochs(Sampler[int]):
    """A script's own sampler: it keeps the place, or skips what the script asks for."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 40:
            self.place += 1
            yield order[self.place - 1]
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def own_place(loader: Callable[..., Any], _: int) -> tuple[Any, dict[str, Any]]:
    sampler = Epochs()
    return loader(Squares(), 8, sampler=sampler), {"sampler": sampler}


def set_by_step(loader: Callable[..., Any], done: int) -> tuple[Any, dict[str, Any]]:
    sampler = Epochs()
    sampler.epoch, sampler.place = done // 5, done % 5 * 8
    return loader(Squares(), 8, sampler=sampler), {}


def what_is_left(loader: Callable[..., Any], done: int) -> tuple[Any, dict[str, Any]]:
    return loader(Subset(Squares(), range(done % 5 * 8, 40)), 8), {}


def skipped(loader: Callable[..., Any], done: int) -> tuple[Any, dict[str, Any]]:
    return loader(Squares(), 8), {"skip": {"batches": done % 5}}


def begun_anew(loader: Callable[..., Any], _: int) -> tuple[Any, dict[str, Any]]:
    return loader(Squares(), 8, shuffle=True), {}


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


def stream(loader: Callable[..., Any], _: int) -> tuple[Any, dict[str, Any]]:
    return loader(Stream(), 8), {}


class Numbers(Stream):
    """A stream without an end that keeps its own place."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def own_stream(loader: Callable[..., Any], _: int) -> tuple[Any, dict[str, Any]]:
    data = Numbers()
    return loader(data, 8), {"data": data}


class Rest(Stream):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, 40))


def rest_of_stream(loader: Callable[..., Any], done: int) -> tuple[Any, dict[str, Any]]:
    return loader(Rest(done % 5 * 8), 8), {}


BEGUN = [own_place, set_by_step, what_is_left, skipped, begun_anew]


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        *product(BEGUN, [(3,), (5,)]),
        *((stream, (seen,)) for seen in (3, 8, 10)),
        (own_stream, (3,)),
        (rest_of_stream, (3, 8, 10)),
    ],
)
def test_loader_of_torch_draws_no_seed_where_it_goes_on_and_is_told_where_it_does_not(
    make: Callable[..., Any], ends: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No step is trained again, which could show that dropout, or the next order, is another."""

    def train(steps: int) -> list[tuple[list[float], float]]:
        found = find(tmp_path)
        loader, state = make(DataLoader, found.step)
        skip = state.pop("skip", {"batches": 0})
        model, lines = nn.Linear(1, 1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(model, optimizer, state=state, found=found, every=1) as checkpointer:
            done = checkpointer.restore()
            while done < steps:
                for number, batch in enumerate(loader):
                    if number < skip["batches"]:
                        continue
                    lines.append(train_on(batch, optimizer, checkpointer))
                    done += 1
                    if done == steps:
                        return lines
                skip["batches"] = 0
                if make in (what_is_left, rest_of_stream):
                    loader = make(DataLoader, 0)[0]
        return lines

    def seed() -> None:
        torch.manual_seed(0)
        random.seed(0)

    seed()
    whole = train(12)
    shutil.rmtree(tmp_path)
    seed()
    is_lost = make in (begun_anew, stream) and ends[0] % 5 > 0
    assert (list(chain.from_iterable(map(train, (*ends, 12)))) == whole) is not is_lost
    assert len([line for line in caplog.messages if "and begins anew: these come again" in line]) == is_lost


def test_loader_that_each_step_begins_draws_a_seed_in_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int) -> list[tuple[list[float], float]]:
        loader, model, lines = DataLoader(Squares(), 8), nn.Linear(1, 1), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
            for _ in range(checkpointer.restore(), steps):
                batches = iter(loader)
                lines.append(train_on(next(batches), optimizer, checkpointer))
        return lines

    torch.manual_seed(0)
    whole = train(6)
    shutil.rmtree(tmp_path)
    torch.manual_seed(0)
    assert train(3) + train(6) == whole
    assert "begins anew" not in caplog.text


class Drawing(Dataset[torch.Tensor]):
    """Augments each sample with numbers of three generators."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) + random.random() + float(numpy.random.rand())


class Shuffled(Sampler[int]):
    def __init__(self, shuffle: Callable[[], list[int]]) -> None:
        self._shuffle = shuffle

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(self._shuffle())


def shuffled(generator: torch.Generator, **more: Any) -> Any:
    return DataLoader(Drawing(), 8, shuffle=True, **more)


def with_own_generator(generator: torch.Generator, **more: Any) -> Any:
    return DataLoader(Drawing(), 8, shuffle=True, generator=generator, **more)


def ordered_by_numpy(generator: torch.Generator, **more: Any) -> Any:
    return DataLoader(Drawing(), 8, sampler=Shuffled(lambda: numpy.random.permutation(40).tolist()), **more)


def ordered_by_python(generator: torch.Generator, **more: Any) -> Any:
    return DataLoader(Drawing(), 8, sampler=Shuffled(lambda: random.sample(range(40), 40)), **more)


def skip_and_train(
    folder: Path, make: Callable[..., Any], steps: int, epoch_seed: int = 0, **more: Any
) -> list[tuple[list[float], float]]:
    """Trains as most scripts do that go on in the middle of an epoch: they skip what was given."""
    generator = torch.Generator().manual_seed(5)
    loader, model, lines = make(generator, **more), nn.Linear(1, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, folder=folder, state={"g": generator}, every=1) as checkpointer:
        done = checkpointer.restore()
        while True:
            if epoch_seed:
                torch.manual_seed(epoch_seed + done // 5)
            skipped = done % 5
            for number, batch in enumerate(loader):
                if number < skipped:
                    continue
                lines.append(train_on(batch, optimizer, checkpointer))
                done += 1
                if done == steps:
                    return lines


@pytest.mark.parametrize("seen", [1, 3, 5, 7])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (shuffled, {}),
        (shuffled, {"epoch_seed": 7}),
        (shuffled, {"num_workers": 2}),
        (with_own_generator, {}),
        (ordered_by_numpy, {}),
        (ordered_by_python, {}),
    ],
)
def test_script_that_skips_what_was_given_gets_the_same_order_and_the_same_draws(
    make: Callable[..., Any],
    more: dict[str, Any],
    seen: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def seed() -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)

    seed()
    whole = skip_and_train(tmp_path, make, 12, **more)
    shutil.rmtree(tmp_path)
    seed()
    assert skip_and_train(tmp_path, make, seen, **more) + skip_and_train(tmp_path, make, 12, **more) == whole
    if not (
        seen == 5 and "epoch_seed" in more
    ):  # a seed before the epoch looks like numbers drawn after a restore
        assert not caplog.messages


def test_persistent_workers_of_a_later_epoch_are_named_as_their_generators_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    skip_and_train(tmp_path, shuffled, 7, **more)
    skip_and_train(tmp_path, shuffled, 9, **more)
    assert "persist, and have begun with new generators" in caplog.text


def test_error_in_our_own_work_stops_no_loader(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> dict[str, Any]:
        raise ValueError("no state can be read")

    skip_and_train(tmp_path, shuffled, 3)
    monkeypatch.setattr(loaders, "_generator_states", fail)
    assert len(skip_and_train(tmp_path, shuffled, 7)) == 4
    assert "may draw other numbers: ValueError('no state can be read')" in caplog.text
