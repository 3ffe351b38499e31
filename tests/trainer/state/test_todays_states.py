"""States of today's recipes come back exactly: quantised, in lists, master copies, thawed.

A run that is left after six steps and resumed by a new life of its script must make the same losses as one
that was not.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.trainer.deltas.replaying import master_weights
from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.checkpointer import find
from tiercheck.trainer.restore import resharding
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.tensors.leaves import NotCapturable

Script = Callable[[int], "Run"]


class Run:
    """What a script makes at its start, and how it makes a step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        before: Callable[[int], None] = lambda _: None,
    ):
        self.model, self.optimizers, self.before = model, list(optimizers), before

    def step(self, number: int) -> float:
        self.before(number)
        torch.manual_seed(1000 + number)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.model(torch.randn(4, 16)).float().square().mean()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


def lives(script: Script, folder: Path, *ends: int) -> list[float]:
    """Losses of the last life. Each trains from what is found until its end, with other initial weights than
    the one before."""
    losses: list[float] = []
    for seed, end in enumerate(ends):
        run = script(seed)
        with Checkpointer(run.model, run.optimizers, folder=folder, every=3) as checkpointer:
            first = checkpointer.restore()
            assert first == (ends[seed - 1] if seed else 0)
            losses = []
            for number in range(first, end):
                losses.append(run.step(number))
                checkpointer.step()
            assert checkpointer.wait(30)
            assert checkpointer.skipped == 0
    return losses


def assert_comes_back(script: Script, folder: Path) -> None:
    whole = lives(script, folder / "whole", 12)
    assert lives(script, folder / "cut", 6, 9, 12) == whole[9:]


def resumed_elsewhere(script: Script, folder: Path, end: int) -> list[float]:
    """Losses of a new life that reads the version as ranks of another mesh do: by its parts."""
    run, found = script(77), find(folder)
    assert found.offer is not None
    found = dataclasses.replace(found, offer=dataclasses.replace(found.offer, path=""))
    with Checkpointer(run.model, run.optimizers, found=found, every=100) as checkpointer:
        return [run.step(number) for number in range(checkpointer.restore(), end)]


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


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
    def script(seed: int) -> Run:
        model = layers(seed)
        return Run(model, [kind(model.parameters())])

    assert_comes_back(script, tmp_path)


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
        model = layers(0)
        torch.nn.init.constant_(model[0].weight, 0.123)  # type: ignore[index]
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
                state["graph"] = Run

    model = layers(0)
    run = Run(model, [Odd(model.parameters())])
    with Checkpointer(model, run.optimizers, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        run.step(0)
        checkpointer.step()
        assert checkpointer.wait(30)
        assert checkpointer.captured == 0
    assert "optimizer0/0.weight/graph" in caplog.text


def with_masters(seed: int) -> Run:
    """Mixed precision by hand: the optimizer has parameters that no module has."""
    torch.manual_seed(seed)
    model, optimizer, update = master_weights(16)
    run = Run(model, [optimizer])

    def step(number: int) -> float:
        torch.manual_seed(1000 + number)
        return float(update().detach())

    run.step = step  # type: ignore[method-assign]
    return run


def with_frozen(seed: int) -> Run:
    model = layers(seed)

    def freeze(number: int) -> None:
        if number == 4:
            model[0].requires_grad_(False)

    return Run(model, [torch.optim.SGD(model.parameters(), lr=1e-2)], freeze)


def with_thawed(seed: int) -> Run:
    model = layers(seed)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-2)

    def thaw(number: int) -> None:
        if number == 4:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    return Run(model, [optimizer], thaw)


@pytest.mark.parametrize("script", [with_masters, with_frozen, with_thawed])
def test_what_only_an_optimizer_has_and_what_was_frozen_or_thawed_on_the_way_comes_back(
    tmp_path: Path, script: Script
) -> None:
    assert_comes_back(script, tmp_path)


@pytest.mark.parametrize("script", [with_masters, with_frozen, with_thawed])
def test_it_comes_back_on_other_ranks_too(tmp_path: Path, script: Script) -> None:
    whole = lives(script, tmp_path / "whole", 12)
    lives(script, tmp_path / "cut", 6)
    assert resumed_elsewhere(script, tmp_path / "cut", 12) == whole[6:]


def beside_the_model(seed: int) -> Run:
    """As `with_masters`, but a module holds the memory of what the optimizer has."""
    run = with_masters(seed)
    for number, master in enumerate(run.optimizers[0].param_groups[0]["params"]):
        run.model.register_buffer(f"master{number}", master.detach())
    return run


@pytest.mark.parametrize("resumed", [lives, resumed_elsewhere], ids=lambda how: how.__name__)
def test_optimizer_whose_own_parameters_no_version_holds_is_refused(
    tmp_path: Path, resumed: Callable[..., list[float]]
) -> None:
    lives(beside_the_model, tmp_path, 6)

    def script(seed: int) -> Run:
        run = beside_the_model(seed)
        for number, master in enumerate(run.optimizers[0].param_groups[0]["params"]):
            run.model.register_buffer(f"master{number}", master.detach().clone())
        return run

    with pytest.raises((DifferentState, RestoreError), match="only in the optimizer"):
        resumed(script, tmp_path, 6)


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
    def script(seed: int) -> Run:
        model = layers(seed)
        return Run(model, [kind(model.parameters())])

    lives(script, tmp_path, 6)
    with pytest.raises(DifferentState, match="several tensors"):
        resumed_elsewhere(script, tmp_path, 12)


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
    def script(values: Tensor) -> Run:
        model = layers(0)
        model.register_buffer("scales", values.view(dtype))
        return Run(model, [torch.optim.SGD(model.parameters(), lr=1e-2)])

    try:
        torch.zeros(64, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        pytest.skip("this torch cannot copy such a tensor itself")
    wanted = torch.arange(64, dtype=torch.uint8) % (2 if dtype is torch.bool else 64)
    run = script(wanted.clone())
    with Checkpointer(run.model, run.optimizers, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        run.step(0)
        checkpointer.step()
        assert checkpointer.wait(30)
        assert checkpointer.captured == 1
    again = script(torch.zeros(64, dtype=torch.uint8))
    with Checkpointer(again.model, again.optimizers, folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 1
    assert torch.equal(again.model.scales.view(torch.uint8), wanted)  # type: ignore[operator, arg-type]


def test_class_of_a_wrapper_that_the_script_has_not_imported_is_never_imported_by_us() -> None:
    from tiercheck.trainer.state import kept

    described = {
        "device": "cpu", "class": "antigravity:Fly", "context": [], "shape": [1], "stride": [1], "parts": {},
    }  # fmt: skip
    with pytest.raises(NotCapturable, match="import antigravity"):
        kept.put_together(described, "optimizer0/w/x", lambda *_: torch.empty(1))
