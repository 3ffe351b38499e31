"""Promise: values of the standard library, numpy, data classes and torchmetrics come back the same.

What they are read from never runs code of anybody.

A module that shows nothing is told.
"""

from __future__ import annotations

import datetime
import enum
import fractions
import importlib
import itertools
import random
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import Script, survives, survives_from_a_snapshot
from tiercheck import Checkpointer
from tiercheck.dcp import Storage
from tiercheck.trainer.state.readable import MARK
from tiercheck.trainer.state.user_state import Packed, unpack
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


class Phase(enum.Enum):
    WARM_UP = "warm up"
    DECAY = 2


class Parts(enum.IntFlag):
    HEAD = 1
    BODY = 2


class Best(NamedTuple):
    step: int
    of: Any


@dataclass
class Place:
    epoch: int
    phase: Any = None


@dataclass(frozen=True, slots=True)
class Fixed:
    rate: float
    phase: Phase


PLUS_ONE = datetime.timezone(datetime.timedelta(hours=1), "plus one")
VALUES: dict[str, Any] = {
    "enum": [Phase.WARM_UP, Parts.HEAD | Parts.BODY, Parts(0)],
    "deque": [deque([1, 2], maxlen=3), deque()],
    "named tuple": Best(3, [Phase.DECAY]),
    "dataclass": [Place(1, {"a": Place(2, Phase.DECAY)}), Fixed(0.5, Phase.DECAY)],
    "time": [
        datetime.date(2026, 1, 2),
        datetime.datetime(2026, 1, 2, 3, 4, 5, 6, PLUS_ONE, fold=1),
        datetime.time(1, 2, 3),
        datetime.timedelta(1, 2, 3),
    ],
    "path": [Path("/a/b"), PurePosixPath("c")],
    "set": [frozenset({1, Phase.DECAY}), {1, "a", Phase.DECAY}],
    "range and slice": [range(1, 9, 2), slice(None, 3), ...],
    "dict": [
        defaultdict(list, {"a": [1]}),
        Counter("aab"),
        OrderedDict({Phase.DECAY: 1}),
        {(1, Phase.DECAY): 2, numpy.int64(3): 4},
    ],
    "namespace": SimpleNamespace(a=1, b=[Phase.DECAY]),
    "number": [fractions.Fraction(1, 3), bytearray(b"ab"), 1j, torch.float16, torch.Size([1])],
    "numpy": [numpy.float32(0.1), numpy.datetime64("2026-01-02"), numpy.dtype("f2"), numpy.bool_(True)],
}
ARRAYS = [
    numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    numpy.random.default_rng(0).random((3, 1)),
    numpy.array(["a", "bc"]),
    numpy.zeros((0, 2)),
]


def _round(value: Any, *, at_once: bool = False) -> Any:
    odd = {"odd": torch.ones(4)[::2]} if at_once else {}
    packed = Packed({"data": {"value": value, **odd}}, {})
    return unpack(packed.written())["state"]["data"]["value"]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", VALUES)
def test_value_comes_back_as_it_was(name: str, at_once: bool) -> None:
    value, found = VALUES[name], _round(VALUES[name], at_once=at_once)
    assert found == value
    assert repr(found) == repr(value) or name == "set"


def test_arrays_come_back_in_their_order_in_memory() -> None:
    for found, array in zip(_round(ARRAYS), ARRAYS, strict=True):
        numpy.testing.assert_array_equal(found, array)
        assert (found.dtype, found.flags.fnc, found.flags.writeable) == (array.dtype, array.flags.fnc, True)


def test_array_takes_a_few_times_its_size_to_come_back() -> None:
    """A replay buffer may have most of the memory that there is."""
    array = numpy.arange(1_000_000)
    blob = Packed({"state": {"array": array}}, {}).written()
    tracemalloc.start()
    try:
        came_back = unpack(blob)["state"]["state"]["array"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert numpy.array_equal(came_back, array)
    assert peak < 4 * array.nbytes


def test_what_is_shared_or_contains_itself_is_so_again() -> None:
    shared, place = deque([1], maxlen=2), Place(1)
    place.phase = [place, shared]
    found = _round([shared, place])
    assert found[1].phase[0] is found[1]
    assert found[1].phase[1] is found[0]


def test_copy_is_that_of_the_step() -> None:
    place, last = Place(1), deque([1])
    packed = Packed({"data": {"place": place, "last": last}}, {})
    place.epoch = 2
    last.append(3)
    assert unpack(packed.written())["state"]["data"] == {"place": Place(1), "last": deque([1])}


class Handled:
    def __del__(self) -> None: ...


@dataclass
class Reduced:
    size: int

    def __reduce__(self) -> Any:
        return Reduced, (1,)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Reduced(1), "Reduced has code of its own.*: keep its values"),
        (make_dataclass("Inside", ["a"])(1), "has no class Inside"),
        (defaultdict(lambda: 1), "default_factory"),
        (Handled(), r"Handled could not be read back: keep its values there, or give `state` an object with"),
        (
            {"draws": random.Random(1)},
            "/draws.*Random could not be read back: give it to `state` itself, under",
        ),
        ({"draws": torch.Generator()}, "/draws.*Generator could not be read back: give it to `state` itself"),
        (
            {"draws": numpy.random.default_rng()},
            "/draws.*Generator could not be read back: give it to `state`",
        ),
        ([numpy.random.PCG64()], "PCG64 could not be read back: give it to `state` itself, under a name"),
        ([nn.Linear(1, 1)], "Linear could not be read back: give it to `state` itself, under a name"),
        ((each for each in "ab"), "generator could not be read back: keep its position there, and begin it"),
        ([itertools.cycle("ab")], "cycle could not be read back: keep its position there, and begin it anew"),
        ([str.upper], "method_descriptor could not be read back: keep its name there"),
        ({nn.Parameter(torch.full((500,), 0.123)): 1}, r"<Parameter of shape \(500,\)> is a key"),
        ({Phase.DECAY, torch.full((3,), 0.123)}, r"<Tensor of shape \(3,\)> is a key"),
        ({Phase.DECAY: 1, torch.full((3,), 0.123): 2}, r"<Tensor of shape \(3,\)> is a key"),
    ],
    ids=[
        "own reduce",
        "local class",
        "factory",
        "destructor",
        "random.Random",
        "torch.Generator",
        "numpy's generator",
        "numpy's bits",
        "module",
        "Python's generator",
        "iterator",
        "function",
        "parameter as a key",
        "set of tensors",
        "tensor as a key",
    ],
)
def test_what_would_not_come_back_is_refused_with_its_place_and_without_its_content(
    value: Any, words: str
) -> None:
    with pytest.raises(NotCapturable, match=rf"state\['data'\]/value.*{words}") as refused:
        _round(value)
    assert "0.123" not in str(refused.value)


def _forged(record: dict[str, Any]) -> Any:
    return unpack(Packed({"data": {"value": {"it": record}}}, {}).written())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({MARK: "object", "class": f"{__name__}:Gone", "fields": []}, f"Gone.*import {__name__} before"),
        ({MARK: "object", "class": "antigravity:Any", "fields": []}, "import antigravity before"),
        ({MARK: "object", "class": f"{__name__}:Handled", "fields": []}, "no dataclass"),
        ({MARK: "object", "class": "torch.nn:Linear", "fields": []}, "no dataclass"),
        (
            {MARK: "object", "class": f"{__name__}:Place", "fields": ["epoch"]},
            "fields epoch in the checkpoint",
        ),
        ({MARK: "enum", "class": f"{__name__}:Phase", "member": "GONE"}, "no member GONE"),
        ({MARK: "enum", "class": "subprocess:Popen", "member": "true"}, "no Enum"),
        ({MARK: "namedtuple", "class": "os:PathLike", "fields": []}, "no named tuple"),
        ({MARK: "os.system", "of": ["true"]}, "os.system"),
    ],
)
def test_forged_or_outdated_record_is_refused_and_imports_nothing(record: dict[str, Any], words: str) -> None:
    with pytest.raises(NotCapturable, match=words):
        _forged(record)
    assert "antigravity" not in sys.modules


def test_dcp_storage_takes_the_same_values(tmp_path: Path) -> None:
    with Storage(tmp_path) as storage:
        assert storage.save(
            {"weight": torch.ones(2), "values": Place(1, VALUES), "arrays": Place(2, ARRAYS)}, 1
        )
    state: dict[str, Any] = {"weight": torch.zeros(2), "values": None, "arrays": None}
    with Storage(tmp_path) as storage:
        assert storage.load(state) == 1
    assert state["values"] == Place(1, VALUES)
    for found, array in zip(state["arrays"].phase, ARRAYS, strict=True):
        numpy.testing.assert_array_equal(found, array)


def test_what_dcp_storage_cannot_take_is_named_in_plain_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Storage(tmp_path) as storage:
        assert not storage.save({"weight": torch.ones(2), "logger": Handled()}, 1)
    assert f"logger: a {__name__}.Handled could not be read back" in caplog.text
    assert "weights_only" not in caplog.text
    assert "\x1b" not in caplog.text


def test_checkpointer_restores_such_values_in_its_state(tmp_path: Path) -> None:
    def start(data: dict[str, Any]) -> Checkpointer:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        return Checkpointer(model, optimizer, state={"data": data}, folder=tmp_path, every=1)

    with start({"values": VALUES}) as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        assert checkpointer.wait(30)
        assert checkpointer.skipped == 0
    found: dict[str, Any] = {}
    with start(found) as checkpointer:
        assert checkpointer.restore() == 1
    assert found == {"values": VALUES}


def test_what_changes_after_the_step_is_not_in_the_blob() -> None:
    position: dict[str, Any] = {"shard": 3, "seen": [1, 2], "mean": torch.ones(4), "nested": {"at": (1, [5])}}
    facts = {"groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.999)}]}
    drawn = torch.get_rng_state()
    packed = Packed({"data": position}, facts)
    position["shard"] = 4
    position["seen"].append(3)
    position["mean"].zero_()
    position["nested"]["at"][1].append(6)
    facts["groups"][0]["lr"].fill_(7.0)  # type: ignore[attr-defined]
    torch.rand(1)
    content = unpack(packed.written())
    assert content["state"]["data"]["shard"] == 3
    assert content["state"]["data"]["seen"] == [1, 2]
    assert content["state"]["data"]["mean"].tolist() == [1.0] * 4
    assert content["state"]["data"]["nested"] == {"at": (1, [5])}
    assert content["facts"]["groups"][0]["lr"].item() == 0.5
    assert torch.equal(content["random"]["torch"], drawn)


def test_what_only_its_own_code_can_copy_is_written_at_once() -> None:
    milestones = Counter({30: 1})
    packed = Packed({"scheduler": {"milestones": milestones}}, {})
    milestones[60] = 1
    assert unpack(packed.written())["state"]["scheduler"]["milestones"] == Counter({30: 1})


def test_what_is_shared_stays_shared() -> None:
    whole = torch.arange(6.0)
    listed = [1]
    content = unpack(Packed({"data": {"a": whole, "b": whole[2:], "c": listed, "d": listed}}, {}).written())
    data = content["state"]["data"]
    assert data["a"].untyped_storage().data_ptr() == data["b"].untyped_storage().data_ptr()
    assert data["c"] is data["d"]


def test_what_cannot_be_written_is_refused_in_the_step_itself() -> None:
    with pytest.raises(NotCapturable):
        Packed({"data": {"hook": lambda: None}}, {})


def with_mean(model: nn.Module, metric: Any, state: dict[str, Any]) -> Script:
    """The rate follows the metric."""
    layer: nn.Linear = model[0]  # type: ignore[index,assignment]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)

    def update() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        metric.update(loss.detach())
        found = metric.compute()
        means = [each.mean() for each in (found.values() if isinstance(found, dict) else [found])]
        optimizer.param_groups[0]["lr"] = 1e-2 * sum(map(float, means))
        return loss

    return Script(model, [optimizer], update, state)


def metric_of(name: str, *arguments: Any) -> Any:
    # The package takes seconds to import, which each process that only collects the tests would wait for.
    return getattr(importlib.import_module("torchmetrics"), name)(*arguments)


def given(make: Callable[[], Any]) -> Callable[[], Script]:
    def build() -> Script:
        metric = make()
        return with_mean(nn.Sequential(nn.Linear(8, 8)), metric, {"metric": metric})

    return build


def inside(persistent: bool) -> Callable[[], Script]:
    def build() -> Script:
        metric = metric_of("MeanMetric")
        metric.persistent(persistent)
        return with_mean(nn.Sequential(nn.Linear(8, 8), metric), metric, {})

    return build


BUILDS: dict[str, Callable[[], Script]] = {
    "mean": given(lambda: metric_of("MeanMetric")),
    "smallest and largest": given(lambda: metric_of("MinMaxMetric", metric_of("MeanMetric"))),
    "all values": given(lambda: metric_of("CatMetric")),
    "collection": given(
        lambda: metric_of("MetricCollection", [metric_of("MeanMetric"), metric_of("MaxMetric")])
    ),
    "running": given(lambda: metric_of("RunningMean", 3)),
    "in the model": inside(False),
    "in the model, persistent": inside(True),
}


@pytest.mark.parametrize("name", BUILDS)
def test_metric_comes_back_from_a_snapshot(tmp_path: Path, name: str) -> None:
    survives_from_a_snapshot(BUILDS[name], tmp_path)


@pytest.mark.parametrize("name", BUILDS)
def test_metric_comes_back_from_deltas(delta_sidecar: ScriptedSidecar, name: str) -> None:
    survives(delta_sidecar, BUILDS[name])


def test_module_that_shows_nothing_is_told_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(
        model, optimizer, state={"shown": nn.Linear(1, 1), "hidden": nn.ReLU()}, folder=tmp_path
    ):
        assert "state['hidden'] is a module whose state_dict is empty" in caplog.text
        assert "shown" not in caplog.text
