"""Promise: training itself proves, at next to no cost, that updates can be made again bit for bit."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.optim import Optimizer

from tests.examples import examples
from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    Build,
    Script,
    by_closure,
    loop,
    mean_square,
    started,
    train,
    trained,
)
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.version import Kind
from tiercheck.trainer.deltas import clones, probe
from tiercheck.trainer.deltas.clones import ParameterPlace, ProbeCandidate, ProbePart, choose
from tiercheck.trainer.deltas.gradients import Recorder
from tiercheck.trainer.deltas.probe import Probe, ProbeRefused
from tiercheck.trainer.state.replayable import why_not_replayable, why_not_separable
from tiercheck.trainer.tensors.tensor_parts import have_same_bits

EVERY = 5
"""Updates between probes here."""
PROBED = [2, 3, 8, 13, 18]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "EVERY", EVERY)


def script(
    make: Callable[[Any], Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1), *, closure: bool = False
) -> Build:
    """Its gradients are views into one larger memory, one element behind its beginning, as in a bucket."""

    def build() -> Script:
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 3))

        def into_bucket(_: int) -> None:
            bucket = torch.empty(1 + sum(p.numel() for p in model.parameters()))
            at = 1
            for parameter in model.parameters():
                assert parameter.grad is not None
                view = bucket[at : at + parameter.numel()].view(parameter.shape)
                at += parameter.numel()
                parameter.grad = view.copy_(parameter.grad)

        way: Any = by_closure if closure else loop
        made: Script = way(model, make(model.parameters()), between=into_bucket, loss_of=mean_square(5, 6))
        return made

    return build


def tamper(monkeypatch: pytest.MonkeyPatch, scale: Callable[[Tensor, Tensor], float]) -> None:
    """SGD's kernel sees each (parameter, gradient), and makes the gradient larger by what `scale` says."""
    module = importlib.import_module("torch.optim.sgd")
    kernel = module.sgd

    def tampered(params: list[Tensor], grads: list[Tensor], *rest: Any, **named: Any) -> None:
        kernel(params, [g * scale(p, g) for p, g in zip(params, grads, strict=True)], *rest, **named)

    monkeypatch.setattr(module, "sgd", tampered)


def by_address(parameter: Tensor, gradient: Tensor) -> float:
    """As a kernel that takes another way for memory that lies otherwise."""
    return 1.5 if gradient.data_ptr() % 64 else 1.0


class Calls:
    """Something that the optimizer's state does not hold."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, parameter: Tensor, gradient: Tensor) -> float:
        self.number += 1
        return 1 + 1 / self.number


@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("scale", [by_address, Calls()], ids=["by address", "by a count"])
def test_known_class_whose_updates_cannot_be_made_again_is_found_out_before_a_delta_is_taken(
    delta_sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    scale: Callable[..., float],
    closure: bool,
) -> None:
    tamper(monkeypatch, scale)
    _, checkpointer = trained(script(closure=closure), 6)
    checkpointer.close()
    (said,) = delta_sidecar.asked("no-deltas")
    assert "SGD" in said.message
    assert "other bits" in said.message
    assert said.step == 0, "there are none to be distrusted"
    assert delta_sidecar.completed(Kind.DELTA) == {}


def test_what_turns_bad_later_is_found_by_the_next_probe_and_protected_by_a_snapshot_at_once(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, checkpointer = trained(script(), 9)
    tamper(monkeypatch, by_address)
    train(running, checkpointer, 8)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [*range(5, 13)], "the probe of update 13 ends them"
    assert sorted(delta_sidecar.completed(Kind.SNAPSHOT)) == [4, 8, 12, 13]
    (said,) = delta_sidecar.asked("no-deltas")
    assert "SGD" in said.message
    assert "other bits" in said.message
    assert said.step == 5, "nobody knows since when"
    order = [request for request in delta_sidecar.requests if request.op in ("complete", "no-deltas")]
    assert max(map(order.index, delta_sidecar.asked("complete", Kind.DELTA))) < order.index(said)


def test_deltas_are_taken_at_once_while_a_known_class_is_probed(delta_sidecar: ScriptedSidecar) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, snapshot_every=1)
    _, checkpointer = trained(script(), 4)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [2, 3, 4]


class Stranger(torch.optim.SGD):
    """Does the same, for all anybody knows."""


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "stranger": lambda p: Stranger(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), fused=True),
    "adafactor": torch.optim.Adafactor,
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The updates that were made again."""
    found: list[int] = []
    after = Probe.after

    def spy(self: Probe, event: Any) -> None:
        had = self._clones is not None
        after(self, event)
        if had:
            found.append(self._updates)

    monkeypatch.setattr(Probe, "after", spy)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_probing_is_rare_and_leaves_every_bit_of_training_alone(
    delta_sidecar: ScriptedSidecar, looked: list[int], name: str
) -> None:
    """Of losses (and so of random numbers) and of state."""
    found = {}
    for mode in (DeltaMode.NONE, DeltaMode.AUTO):
        delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, delta=mode)
        running, checkpointer = started(script(OPTIMIZERS[name]))
        checkpointer.restore()
        losses = train(running, checkpointer, PROBED[-1] + 2)
        checkpointer.close()
        found[mode] = losses, {key: value.tolist() for key, value in running.tensors().items()}
        assert looked == ([] if mode is DeltaMode.NONE else PROBED)
    assert found[DeltaMode.NONE] == found[DeltaMode.AUTO]
    assert not delta_sidecar.asked("no-deltas")
    assert delta_sidecar.completed(Kind.DELTA)


def test_updates_with_a_closure_are_probed_too(delta_sidecar: ScriptedSidecar, looked: list[int]) -> None:
    _, checkpointer = trained(script(closure=True), 9)
    checkpointer.close()
    assert looked == [2, 3, 8]
    assert not delta_sidecar.asked("no-deltas")


def test_whom_the_user_vouches_for_is_not_probed(delta_sidecar: ScriptedSidecar, looked: list[int]) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, delta=DeltaMode.REPLAY)
    _, checkpointer = trained(script(), 4)
    checkpointer.close()
    assert looked == []


def probed(optimizer: Optimizer, probe_: Probe, recorder: Recorder) -> None:
    """One update, as `Deltas` has it looked at."""
    due = probe_.begins()
    recorder.before(0)
    event = recorder.open
    assert event is not None
    if due:
        probe_.before(event)
    optimizer.step()
    recorder.after(0)
    if due:
        probe_.after(event)
    recorder.take()


def test_large_parameter_is_looked_at_part_by_part_within_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 64 * 1024
    weight, bias = nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(7))
    optimizer = torch.optim.Adam([weight, bias], lr=0.1)
    module = importlib.import_module("torch.optim.adam")
    kernel = module.adam
    cloned: list[int] = []

    def last_element_of_the_real_one(
        params: list[Tensor], grads: list[Tensor], *rest: Any, **named: Any
    ) -> None:
        kernel(params, grads, *rest, **named)
        real = any(parameter is weight for parameter in params)
        if real:
            with torch.no_grad():
                weight[-1] += 1
        else:
            state = [named["exp_avgs"], named["exp_avg_sqs"]] if "exp_avgs" in named else rest[:2]
            cloned.append(sum(t.nbytes for each in (params, grads, *state) for t in each))

    monkeypatch.setattr(module, "adam", last_element_of_the_real_one)
    probe_, recorder = Probe(optimizer, room), Recorder([optimizer])

    def train_until_found() -> None:
        for _ in range(100):
            weight.grad, bias.grad = torch.randn(20_000), torch.randn(7)
            probed(optimizer, probe_, recorder)

    with pytest.raises(ProbeRefused, match="other bits"):
        train_until_found()
    assert len(cloned) >= 20_000 * 16 // room, "not before its turn came"
    assert max(cloned) <= room
    assert min(cloned[:-1]) > room // 2, "and each time a good part of it"


def test_parameter_inside_larger_memory_is_cloned_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore fills it where it is, so a kernel that looks at its address does the same again."""
    tamper(monkeypatch, lambda parameter, gradient: 1.5 if parameter.data_ptr() % 64 else 1.0)
    whole = torch.zeros(64)
    odd = nn.Parameter(whole[1:31].view(5, 6))
    optimizer = torch.optim.SGD([odd], lr=0.1)
    probe_, recorder = Probe(optimizer, 1 << 20), Recorder([optimizer])
    for _ in range(3):
        odd.grad = torch.randn(5, 6)
        probed(optimizer, probe_, recorder)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["SGD", *(["Muon"] if hasattr(torch.optim, "Muon") else [])])
def test_clones_of_shards_never_begin_a_collective(name: str, looked: list[int]) -> None:
    """Another rank may have given up, and would not come. Where elements are not alone, shards cannot be
    probed without one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)]))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    assert not why_not_replayable(optimizer), "a shard is no weight of a class of its own"
    probe_, recorder = Probe(optimizer, 1 << 20), Recorder([optimizer])
    for _ in range(3):
        parameter.grad = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)])
        probed(optimizer, probe_, recorder)
        if probe_._clones is not None:
            assert not any(hasattr(pair.clone, "placements") for pair in probe_._clones.pairs)
    assert looked == ([2, 3] if name == "SGD" else [])


def test_memory_that_a_probe_lacks_ends_nothing(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a known class nothing is known against it, and the next probe is not tried at every step."""
    tries = []

    def full(self: object, gradients: object) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("no memory for a copy")

    monkeypatch.setattr(clones.Cloner, "clone", full)
    _, checkpointer = trained(script(), 9)
    checkpointer.wait(DEADLINE)
    checkpointer.close()
    assert len(tries) == 2, "at updates 2 and 7"
    assert not delta_sidecar.asked("no-deltas")
    assert {5, 6, 7, 8, 9} <= set(delta_sidecar.completed(Kind.DELTA))


ROOM = 100_000


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[ProbeCandidate]:
    found = []
    for number in sorted(draw(st.sets(st.integers(0, 60), max_size=12))):
        elements = draw(st.integers(1, 60_000))
        size = elements * draw(st.sampled_from([4, 8, 16])) + draw(st.integers(0, 64))
        found.append(ProbeCandidate(number, size, elements if draw(st.booleans()) else 0))
    return found


def spent(part: ProbePart, candidates: list[ProbeCandidate]) -> float:
    (each,) = [each for each in candidates if each.number == part.number]
    return each.size if part.is_whole else each.size * (part.end - part.begin) / each.elements


@given(candidate_lists(), st.integers(1, 5), st.integers(0, 60), st.integers(0, 60_000))
def test_everything_has_its_turn_within_the_room(
    candidates: list[ProbeCandidate], most: int, number: int, element: int
) -> None:
    place = ParameterPlace(number, element)
    seen: dict[int, set[int]] = {each.number: set() for each in candidates}
    for _ in range(400):
        parts, place = choose(candidates, place, ROOM, most)
        assert len(parts) <= most
        assert sum(spent(part, candidates) for part in parts) <= ROOM
        assert len({part.number for part in parts}) == len(parts)
        for part in parts:
            seen[part.number].update(
                [0] if part.is_whole else range(part.begin // 1024, -(-part.end // 1024))
            )
    for each in candidates:
        wanted = range(1) if each.size <= ROOM else range(-(-each.elements // 1024))
        assert seen[each.number] == set(wanted)


def test_what_fits_is_never_cut_and_comes_next_time() -> None:
    candidates = [ProbeCandidate(0, 60, 60), ProbeCandidate(1, 60, 60)]
    parts, place = choose(candidates, ParameterPlace(), 100, 10)
    assert parts == [ProbePart(0)]
    assert choose(candidates, place, 100, 10) == ([ProbePart(1)], ParameterPlace(0))


def test_nothing_to_choose_from_is_no_trouble() -> None:
    assert choose([], ParameterPlace(3, 4), ROOM, 1) == ([], ParameterPlace())
    assert choose([ProbeCandidate(0, ROOM + 1)], ParameterPlace(3, 4), ROOM, 1) == ([], ParameterPlace())


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"maximize": True, "foreach": True},
    ],
    "Adam": [{}, {"weight_decay": 0.01, "amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}],
    "Adamax": [{}, {"weight_decay": 0.01}],
    "NAdam": [{}, {"weight_decay": 0.01, "decoupled_weight_decay": True}],
    "RAdam": [{}, {"weight_decay": 0.01}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True, "weight_decay": 0.01}],
    "Rprop": [{}],
    "Adagrad": [{}, {"lr_decay": 0.1, "weight_decay": 0.01}],
    "Adadelta": [{}, {"weight_decay": 0.01}],
    "ASGD": [{}, {"weight_decay": 0.01}],
}
CASES = [
    *itertools.product(OPTIONS, (torch.float32, torch.float64)),
    *itertools.product(("AdamW",), (torch.bfloat16, torch.float16)),
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5000), data=st.data())
@settings(max_examples=examples(6))
def test_parts_get_the_bits_of_the_whole(
    name: str, dtype: torch.dtype, seed: int, count: int, data: st.DataObject
) -> None:
    options = data.draw(st.sampled_from(OPTIONS[name]))
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return getattr(torch.optim, name)(parameters, lr=0.01, **options)

    torch.manual_seed(seed)
    begin = torch.randn(count).to(dtype)
    whole = nn.Parameter(begin.clone())
    parts = [nn.Parameter(begin[a:b].clone()) for a, b in itertools.pairwise(cuts)]
    together, apart = make([whole]), make(parts)
    assert not why_not_separable(together)
    for _ in range(3):
        whole.grad = torch.randn(count).to(dtype)
        for part, (a, b) in zip(parts, itertools.pairwise(cuts), strict=True):
            part.grad = whole.grad[a:b].clone()
        together.step()
        apart.step()
    assert have_same_bits(torch.cat([part.detach() for part in parts]), whole.detach())
    for key, value in together.state[whole].items():
        if isinstance(value, torch.Tensor):
            found = [apart.state[part][key] for part in parts]
            assert have_same_bits(torch.cat(found) if value.dim() else found[0], value), key


class Own(torch.optim.AdamW):
    """May do anything."""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), "fused"),
        (lambda p: torch.optim.SGD([q.bfloat16() for q in p], lr=0.1), "bfloat16"),
        (torch.optim.Adafactor, "not known"),
        (Own, "not known"),
        (torch.optim.LBFGS, "not known"),
    ],
)
def test_what_is_not_known_to_be_separable_is_refused(
    make: Callable[[list[torch.Tensor]], Optimizer], why: str
) -> None:
    assert why in why_not_separable(make([torch.randn(4, 4)]))
