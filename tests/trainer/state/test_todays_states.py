"""States of today's recipes come back exactly: quantised, in lists, master copies, thawed.

A run that is left after six steps and resumed by a new life of its script must make the same losses as one
that was not.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.trainer.deltas.replaying import (
    WIDTH,
    Build,
    Script,
    adam,
    loop,
    master_weights,
    momentum,
    net,
    simple,
    started,
    train,
    trained,
)
from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.checkpointer import find
from tiercheck.trainer.restore import resharding
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.state import optimizer_state
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


def lives(build: Build, folder: Path, *ends: int) -> list[str]:
    """Losses of the last life. Each trains from what is found until its end, with other initial weights than
    the one before."""
    first, losses = 0, list[str]()
    for seed, end in enumerate(ends):
        script, checkpointer = started(build, seed, folder=folder, every=3)
        with checkpointer:
            assert checkpointer.restore() == first
            losses = train(script, checkpointer, end - first)
            assert checkpointer.wait(30)
            assert checkpointer.skipped == 0
        first = end
    return losses


def assert_comes_back(build: Build, folder: Path) -> None:
    whole = lives(build, folder / "whole", 12)
    assert lives(build, folder / "cut", 6, 9, 12) == whole[9:]


def resumed_elsewhere(build: Build, folder: Path, end: int) -> list[str]:
    """Losses of a new life that reads the version as ranks of another mesh do: by its parts."""
    found = find(folder)
    assert found.offer is not None
    found = dataclasses.replace(found, offer=dataclasses.replace(found.offer, path=""))
    script, checkpointer = started(build, 77, found=found, every=100)
    with checkpointer:
        return train(script, checkpointer, end - checkpointer.restore())


class Halved(Tensor):
    """A wrapper as quantising libraries have them: what it stands for is computed from other tensors."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, power: int) -> Halved:
        made: Halved = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: Tensor, scale: Tensor, power: int) -> None:
        self.codes, self.scale, self.power = codes, scale, power

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.power]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: list[Any], *_: object) -> Halved:
        return cls(inner["codes"], inner["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Halved(args[0].codes, args[0].scale, args[0].power)
        raise NotImplementedError(function)

    def value(self) -> Tensor:
        return self.codes.float() * self.scale * 2.0**self.power

    def set(self, value: Tensor) -> None:
        self.scale.copy_(value.abs().max() / 127 / 2.0**self.power)
        self.codes.copy_((value / self.scale / 2.0**self.power).round())


class Own(Optimizer):
    """Goes where `direction` says, which keeps something."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * self.direction(parameter.grad, self.state[parameter]))

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Quantised(Own):
    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["average"] = Halved(torch.zeros(gradient.shape, dtype=torch.int8), torch.ones(()), 1)
        average: Halved = state["average"]
        average.set(average.value().lerp_(gradient, 0.1))
        return average.value()


class Listed(Own):
    """Keeps lists and dicts of tensors, as SOAP and Shampoo do."""

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["sums"] = [torch.zeros_like(gradient), (torch.zeros_like(gradient), 3)]
            state["by"] = {"size": torch.zeros(()), "names": ["a"]}
        first, (second, _) = state["sums"]
        first.lerp_(gradient, 0.1)
        second.add_(gradient.square())
        state["by"]["size"] += 1
        direction: Tensor = first / (second.sqrt() + state["by"]["size"])
        return direction


class Norm(enum.Enum):
    """How a step is scaled."""

    LARGEST = "largest"


class Moments(NamedTuple):
    first: Tensor
    norm: Norm


@dataclasses.dataclass
class Window:
    size: int
    last: Any


class Projector:
    """Has plain attributes alone, as GaLore's has."""

    def __init__(self) -> None:
        self.basis: Any = None
        self.updates = 0

    def project(self, gradient: Tensor) -> Tensor:
        self.basis = gradient.sign() if self.basis is None else self.basis
        self.updates += 1
        projected: Tensor = gradient * self.basis / self.updates
        return projected


class Mixed(Own):
    """Keeps what is neither tensors nor lists of them: its own objects, and dicts under its parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self.param_groups[0]["norm"] = Norm.LARGEST
        self.projector = Projector()
        self.counts: dict[Any, int] = {}
        self.slow: dict[int, Any] = collections.defaultdict(dict)

    def direction(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        parameter = next(each for each in self.state if self.state[each] is state)
        if not state:
            state["queue"] = collections.deque(maxlen=2)
            state["moments"] = Moments(torch.zeros_like(gradient), Norm.LARGEST)
            state["window"] = Window(1, {(1, 2): torch.zeros_like(gradient)})
            state["own"] = Projector()
        state["queue"].append(gradient.clone())
        state["moments"].first.lerp_(gradient, 0.1)
        state["window"].size += 1
        state["window"].last[1, 2].add_(gradient)
        self.counts[parameter] = self.counts.get(parameter, 0) + 1
        slow = self.slow[id(parameter)].setdefault("average", torch.zeros_like(gradient))
        slow.lerp_(gradient, 0.01)
        norm: Norm = self.param_groups[0]["norm"]
        assert norm is Norm.LARGEST
        assert state["queue"].maxlen == 2
        direction: Tensor = sum(state["queue"], state["moments"].first + slow) / self.counts[parameter]
        last: Tensor = state["window"].last[1, 2] / state["window"].size
        return direction + last + state["own"].project(gradient) + self.projector.project(gradient).sum()


@pytest.mark.parametrize("kind", [Quantised, Listed, Mixed])
def test_what_an_optimizer_keeps_comes_back_whatever_it_is_made_of(
    tmp_path: Path, kind: Callable[[Iterable[Tensor]], Optimizer]
) -> None:
    assert_comes_back(simple(kind), tmp_path)


def test_messages_name_parameters_and_print_no_tensor(tmp_path: Path) -> None:
    """GaLore's layer-wise optimizer keeps others under parameters."""

    class Layerwise(Own):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(listed := list(parameters))
            self.inner = {each: torch.optim.SGD([each]) for each in listed}

    class OddKeys(Own):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(listed := list(parameters))
            self.state[listed[0]] = {torch.full((3,), 0.123): object()}

    class OddValues(Own):
        def __init__(self, parameters: Iterable[Tensor]) -> None:
            super().__init__(listed := list(parameters))
            self.state[listed[0]] = {"by": {(1, listed[0]): torch.full((3,), 0.123), "hook": print}}

    words = {
        Layerwise: r"inner\['0\.weight'\].*as \[\*optimizer\.inner\.values\(\)\]",
        OddKeys: r"optimizer0/0\.weight/<Tensor of shape \(3,\)>",
        OddValues: r"optimizer0/0\.weight/by",
    }
    for kind, expected in words.items():
        model = net()
        torch.nn.init.constant_(model[0].weight, 0.123)  # type: ignore[arg-type]
        with pytest.raises(NotCapturable, match=expected) as refused:
            Checkpointer(model, kind(model.parameters()), folder=tmp_path)
        assert "0.123" not in str(refused.value)
        assert "\n" not in str(refused.value)


def test_object_that_could_not_be_read_back_is_told_with_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(Listed):
        def step(self, closure: Any = None) -> None:
            super().step()
            for state in self.state.values():
                state["graph"] = Script

    _, checkpointer = trained(simple(Odd), 1, folder=tmp_path, every=1)
    with checkpointer:
        assert checkpointer.wait(30)
        assert checkpointer.captured == 0
    assert "optimizer0/0.weight/graph" in caplog.text


def seeded(model: nn.Module, optimizer: Optimizer, change: Callable[[int], object] = id) -> Script:
    """Its batches are those of the step, whatever a rank of another mesh would draw."""

    def before(step: int) -> None:
        torch.manual_seed(1000 + step)
        change(step)

    return loop(model, optimizer, before=before)


def with_masters() -> Script:
    """Mixed precision by hand: the optimizer has parameters that no module has."""
    model, optimizer, update = master_weights(16)
    count = {"step": 0}

    def step() -> Tensor:
        count["step"] += 1
        torch.manual_seed(1000 + count["step"])
        return update()

    return Script(model, [optimizer], step, {"count": count})


def with_frozen() -> Script:
    model = net()
    change = lambda step: step == 5 and model[0].requires_grad_(False)  # noqa: E731
    return seeded(model, momentum(model.parameters()), change)


def with_thawed() -> Script:
    model = net()
    model[0].requires_grad_(False)
    optimizer = adam(model.parameters())

    def thaw(step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    return seeded(model, optimizer, thaw)


def beside_the_model() -> Script:
    """As `with_masters`, but a module holds the memory of what the optimizer has."""
    script = with_masters()
    for number, master in enumerate(script.optimizers[0].param_groups[0]["params"]):
        script.model.register_buffer(f"master{number}", master.detach())
    return script


@pytest.mark.parametrize("build", [with_masters, with_frozen, with_thawed])
def test_what_only_an_optimizer_has_and_what_was_frozen_or_thawed_on_the_way_comes_back(
    tmp_path: Path, build: Build
) -> None:
    assert_comes_back(build, tmp_path)


def frozen_and_evaluating(*, at_the_start: bool) -> Script:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if at_the_start:
        model[:3].requires_grad_(False).eval()

    def change(step: int) -> None:
        if step == 5:
            model[:3].requires_grad_(False).eval()

    return seeded(model, momentum(model.parameters()), change)


def test_modes_that_a_restore_changes_are_one_line_each_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives(lambda: frozen_and_evaluating(at_the_start=False), tmp_path, 6, 7)
    told = [each.getMessage() for each in caplog.records if "as when saved" in each.getMessage()]
    assert told == [
        "6 parameters (0.weight, 0.bias, 1.weight, ...): frozen, as when saved; to change that, call "
        "`requires_grad_` after `restore`",
        "3 modules (0, 1, 2): evaluating, as when saved; to change that, call `train` after `restore`",
    ]
    caplog.clear()
    _, checkpointer = started(lambda: frozen_and_evaluating(at_the_start=True), folder=tmp_path)
    with checkpointer:
        assert checkpointer.restore() == 6
    assert "as when saved" not in caplog.text


@pytest.mark.parametrize("build", [with_masters, with_frozen, with_thawed])
def test_it_comes_back_on_other_ranks_too(tmp_path: Path, build: Build) -> None:
    whole = lives(build, tmp_path / "whole", 12)
    lives(build, tmp_path / "cut", 6)
    assert resumed_elsewhere(build, tmp_path / "cut", 12) == whole[6:]


@pytest.mark.parametrize("resumed", [lives, resumed_elsewhere], ids=lambda how: how.__name__)
def test_optimizer_whose_own_parameters_no_version_holds_is_refused(
    tmp_path: Path, resumed: Callable[..., list[str]]
) -> None:
    lives(beside_the_model, tmp_path, 6)

    def build() -> Script:
        script = beside_the_model()
        for number, master in enumerate(script.optimizers[0].param_groups[0]["params"]):
            script.model.register_buffer(f"master{number}", master.detach().clone())
        return script

    with pytest.raises((DifferentState, RestoreError), match="only in the optimizer"):
        resumed(build, tmp_path, 6)


def test_own_parameters_are_refused_where_their_numbers_mean_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage of a pipeline counts its own."""
    lives(with_masters, tmp_path, 6)
    monkeypatch.setattr(resharding, "names_of", lambda model: 0)
    with pytest.raises(DifferentState, match="of its own"):
        resumed_elsewhere(with_masters, tmp_path, 12)


@pytest.mark.parametrize("kind", [Quantised, Listed])
def test_what_is_made_of_several_tensors_is_refused_on_other_ranks(
    tmp_path: Path, kind: Callable[[Iterable[Tensor]], Optimizer]
) -> None:
    lives(simple(kind), tmp_path, 6)
    with pytest.raises(DifferentState, match="several tensors"):
        resumed_elsewhere(simple(kind), tmp_path, 12)


@pytest.mark.parametrize(
    "dtype",
    [
        found
        for name in (
            "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
            "float4_e2m1fn_x2",
            "complex32", "complex64", "complex128", "uint16", "uint64", "bool",
        )
        if (found := getattr(torch, name, None)) is not None
    ],
    ids=str,
)  # fmt: skip
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    def build(values: Tensor) -> Script:
        model = net()
        model.register_buffer("scales", values.view(dtype))
        return loop(model, momentum(model.parameters()))

    try:
        torch.zeros(64, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        pytest.skip("this torch cannot copy such a tensor itself")
    wanted = torch.arange(64, dtype=torch.uint8) % (2 if dtype is torch.bool else 64)
    _, checkpointer = trained(lambda: build(wanted.clone()), 1, folder=tmp_path, every=1)
    with checkpointer:
        assert checkpointer.wait(30)
        assert checkpointer.captured == 1
    again, checkpointer = started(lambda: build(torch.zeros(64, dtype=torch.uint8)), folder=tmp_path)
    with checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(again.model.scales.view(torch.uint8), wanted)  # type: ignore[operator, arg-type]


def test_class_of_a_wrapper_that_the_script_has_not_imported_is_never_imported_by_us() -> None:
    described = {
        "device": "cpu", "class": "antigravity:Fly", "context": [], "shape": [1], "stride": [1], "parts": {},
    }  # fmt: skip
    with pytest.raises(NotCapturable, match="import antigravity"):
        optimizer_state.put_together(described, "optimizer0/w/x", lambda *_: torch.empty(1))
