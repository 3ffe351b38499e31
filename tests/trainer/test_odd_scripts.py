"""Scripts with their state in odd places resume too.

It changes its kind, or is not where a state_dict looks.

Each is left and resumed twice: from a snapshot and the deltas after it, and from a snapshot alone. Equal,
refused or told, as in `test_idioms`; never silently different, never the script's end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    EQUAL,
    REFUSED,
    TOLD,
    WIDTH,
    Script,
    adam,
    loop,
    outcome,
    simple,
    started,
    survives_from_a_snapshot,
    train,
)
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


class Net(nn.Module):
    """Its input may be changed on the way in by what a subclass keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)
        )

    def keeps(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.body(self.keeps(x))
        return done


# Values that are no plain ones.


def numpys_rate(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A schedule as an array, as in many scripts."""
    optimizer.param_groups[0]["lr"] = numpy.linspace(1e-2, 1e-3, 20)[step]


def best_so_far(value: Callable[[], Any]) -> Callable[[], Script]:
    def build() -> Script:
        model, best = Net(), dict[str, Any]()
        return loop(model, adam(model.parameters()), after=lambda _: best.update(loss=value()), best=best)

    return build


def pythons_generator() -> Script:
    model, own = Net(), random.Random(torch.initial_seed())
    optimizer = adam(model.parameters())

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] = own.random() / 100

    return loop(model, optimizer, after=after, own=own)


def handed_over(what: Callable[[], Any]) -> Callable[[], Script]:
    def build() -> Script:
        model = Net()
        return loop(model, adam(model.parameters()), odd=what())

    return build


class Counts(Net):
    """Adds a number of numpy's to its state_dict."""

    passes: Any = 0

    def get_extra_state(self) -> Any:
        return self.passes

    def set_extra_state(self, state: Any) -> None:
        self.passes = state

    def keeps(self, x: Tensor) -> Tensor:
        self.passes = numpy.int64(self.passes + 1)
        return x * (1 + float(self.passes) / 10)


# What no tensor tells.


def frozen(model: Any, optimizer: Optimizer, step: int) -> None:
    if step == 6:
        model.body[0].requires_grad_(False)


def thawed() -> Script:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model.body[0].requires_grad_(False)

    def after(step: int) -> None:
        if step == 6:
            model.body[0].requires_grad_(True)

    return loop(model, optimizer, after=after)


def statistics_frozen(at: int) -> Callable[[Any, Optimizer, int], None]:
    def after(model: Any, optimizer: Optimizer, step: int) -> None:
        if step == at:
            model.body[1].eval()

    return after


def gradients_in_memory_set_aside() -> Script:
    """One parameter, whose gradient lies where those of the model do."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    flat = nn.Parameter(torch.cat([each.detach().view(-1) for each in model.parameters()]))
    flat.grad = torch.zeros_like(flat)
    for each, part, gradient in _parts(model, flat.data, flat.grad):
        each.data, each.grad = part, gradient
    optimizer = SGD([flat], lr=1e-2, momentum=0.9)

    def update() -> Tensor:
        assert flat.grad is not None
        flat.grad.zero_()
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Script(model, [optimizer], update)


def _parts(model: nn.Module, *flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
    at = 0
    for each in model.parameters():
        values, gradient = (whole[at : at + each.numel()].view(each.shape) for whole in flat)
        yield each, values, gradient
        at += each.numel()


def part_of_a_parameter_in_the_model() -> Script:
    """The model has the beginning of what is trained; the rest has nobody but the optimizer."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    flat = nn.Parameter(torch.randn(WIDTH * (WIDTH + 1)) / 5)
    model.weight.data = flat.data[: WIDTH * WIDTH].view(WIDTH, WIDTH)

    def of_all(_: object) -> Tensor:
        weight, bias = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH), flat[WIDTH * WIDTH :]
        return (torch.randn(4, WIDTH) @ weight + bias).square().mean()

    return loop(model, AdamW([flat], lr=1e-2), loss_of=of_all)


# Buffers.


class Passing(Net):
    """A buffer that its state_dict leaves out, and training depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def keeps(self, x: Tensor) -> Tensor:
        self.mean += x.detach().mean(0)
        return x + self.mean


class Replaced(Passing):
    def keeps(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        return x + self.mean


class Expanded(Net):
    """One number that looks like many."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.rand(1).expand(WIDTH))

    def keeps(self, x: Tensor) -> Tensor:
        return x + self.shift  # type: ignore[operator]


class Unready(Net):
    """A tensor without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("later", torch.empty(3, device="meta"))


class Queue(Net):
    """Large, and written behind torch's counters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(40_000))

    def keeps(self, x: Tensor) -> Tensor:
        self.seen.data.add_(float(x.mean()))
        return x + self.seen[-1]


class Strided(Net):
    """Parameters with gaps between their elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2] / 5)

    def keeps(self, x: Tensor) -> Tensor:
        return x @ self.mix


class Conjugated(nn.Module):
    """A parameter whose bytes are not what it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64).conj())

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.mix).abs()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyLinear(WIDTH))


# Optimizers that keep things their own way.


class Own(Optimizer):
    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__([each for each in parameters if each.requires_grad], {"lr": 1e-2})
        self.begin()

    def begin(self) -> None:
        return

    @property
    def trained(self) -> list[Tensor]:
        found: list[Tensor] = self.param_groups[0]["params"]
        return found

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.trained:
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=self.rate(parameter))

    def rate(self, parameter: Tensor) -> float:
        raise NotImplementedError


class CountsForAll(Own):
    """Under a key that is no parameter, made at the first step, as MADGRAD does."""

    def rate(self, parameter: Tensor) -> float:
        if "k" not in self.state:
            self.state["k"] = torch.zeros(1)  # type: ignore[index, assignment]
        self.state["k"] += 1 / len(self.trained)  # type: ignore[index, operator]
        return 1e-2 / (1 + float(self.state["k"]))  # type: ignore[index, arg-type]


class CountsFromTheStart(Own):
    """In a dict under a text, made at once."""

    def begin(self) -> None:
        self.state["all"].update(steps=0, sums=torch.zeros(3))  # type: ignore[index]

    def rate(self, parameter: Tensor) -> float:
        kept = self.state["all"]  # type: ignore[index]
        kept["steps"] += 1
        kept["sums"] += 1
        return 1e-2 / (kept["steps"] + float(kept["sums"].sum()))


class OneCountForEach(Own):
    """The same tensor, kept of every parameter."""

    def rate(self, parameter: Tensor) -> float:
        if not self.state[parameter]:
            count = self.state[self.trained[0]].get("count", torch.zeros(()))
            self.state[parameter]["count"] = count
        if parameter is self.trained[0]:
            self.state[parameter]["count"] += 1
        return 1e-2 / float(self.state[parameter]["count"])


class KeepsTheParameter(Own):
    """Its state leads to the parameter's own memory."""

    def rate(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        if not state:
            state.update(now=parameter.data, old=parameter.detach().clone())
        speed = float((state["now"] - state["old"]).norm())
        state["old"].copy_(state["now"])
        return 1e-2 / (1 + speed)


def counts_begin_anew(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 6:
        for state in optimizer.state.values():
            state["steps"] = 0


class PlainCounts(Own):
    def rate(self, parameter: Tensor) -> float:
        steps = self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        return 1e-2 / float(steps)


def lists_written_in_place() -> Script:
    model = Net()
    optimizer = AdamW([{"params": list(model.parameters()), "betas": [0.9, 0.99]}], lr=1e-2)

    def after(step: int) -> None:
        optimizer.param_groups[0]["betas"][0] *= 0.99

    return loop(model, optimizer, after=after)


odd = partial(simple, model=Net)
SCRIPTS: dict[str, tuple[Callable[[], Script], set[str]]] = {
    "rate of numpy's": (odd(after=numpys_rate), {EQUAL}),
    "number of numpy's": (best_so_far(lambda: numpy.float32(0.1)), {EQUAL}),
    "array of numpy's": (best_so_far(lambda: [numpy.arange(6).reshape(2, 3), numpy.array([])]), {EQUAL}),
    "path that comes later": (best_so_far(lambda: PurePath("best.pt")), {EQUAL}),
    "numbers of numpy's as keys": (best_so_far(lambda: {numpy.int64(1): 2}), {EQUAL}),
    "object that comes later": (best_so_far(object), {TOLD}),
    "generator of Python's": (pythons_generator, {EQUAL}),
    "list handed over": (handed_over(list), {REFUSED}),
    "tensor handed over": (handed_over(lambda: torch.zeros(2)), {REFUSED}),
    "iterator handed over": (handed_over(lambda: iter([])), {REFUSED}),
    "number of numpy's as extra state": (simple(model=Counts), {EQUAL}),
    "frozen on the way": (odd(after=frozen), {EQUAL}),
    "thawed on the way, known to the optimizer": (thawed, {EQUAL}),
    "statistics frozen before the snapshot": (odd(after=statistics_frozen(2)), {EQUAL}),
    "statistics frozen after the snapshot": (odd(after=statistics_frozen(6)), {EQUAL}),
    "gradients in memory set aside": (gradients_in_memory_set_aside, {EQUAL}),
    "a part of a parameter in the model": (part_of_a_parameter_in_the_model, {EQUAL}),
    "buffer that is not persistent": (simple(model=Passing), {EQUAL}),
    "buffer that is not persistent, replaced": (simple(model=Replaced), {EQUAL}),
    "expanded buffer": (simple(model=Expanded), {EQUAL}),
    "buffer without memory": (simple(model=Unready), {REFUSED}),
    "large buffer written by data": (simple(model=Queue), {EQUAL}),
    "parameter with gaps": (simple(model=Strided), {EQUAL}),
    "conjugated parameter": (simple(lambda p: SGD(p, lr=1e-3), model=Conjugated), {EQUAL}),
    "lazy layers": (simple(lambda p: SGD(p, lr=1e-2), model=lazy), {REFUSED}),
    "count under a text": (odd(CountsForAll), {EQUAL, TOLD}),
    "count under a text, from the start": (odd(CountsFromTheStart), {EQUAL, TOLD}),
    "one count for each parameter": (odd(OneCountForEach), {EQUAL, TOLD}),
    "state that is the parameter": (odd(KeepsTheParameter), {EQUAL, TOLD}),
    "plain counts set back": (odd(PlainCounts, counts_begin_anew), {EQUAL}),
    "lists written in place": (lists_written_in_place, {EQUAL}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_comes_back_equal_from_deltas_or_is_refused_or_told(
    delta_sidecar: ScriptedSidecar, name: str
) -> None:
    build, allowed = SCRIPTS[name]
    assert outcome(delta_sidecar, build) in allowed


@pytest.mark.parametrize("name", [name for name, (_, allowed) in SCRIPTS.items() if EQUAL in allowed])
def test_script_comes_back_equal_from_a_snapshot(tmp_path: Path, name: str) -> None:
    build, _ = SCRIPTS[name]
    survives_from_a_snapshot(build, tmp_path)


def test_state_dict_that_shows_a_part_of_a_parameter_is_refused(tmp_path: Path) -> None:
    def build() -> Script:
        model = Net()

        def half(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
            state["body.0.weight"] = state["body.0.weight"][: WIDTH // 2]

        model._register_state_dict_hook(half)
        return loop(model, adam(model.parameters()))

    with pytest.raises(NotCapturable, match=r"body\.0\.weight"):
        started(build, folder=tmp_path)


def test_what_the_model_has_no_place_for_is_never_left_out(tmp_path: Path) -> None:
    """A folder has the slots of all ranks, so that a state which does not fit is looked for on another mesh
    too."""

    def build(extra: bool) -> Script:
        model = Net()
        if extra:
            model.register_buffer("extra", torch.ones(3))
        return loop(model, adam(model.parameters()))

    script, checkpointer = started(lambda: build(True), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 1, wait=True)
    _, checkpointer = started(lambda: build(False), folder=tmp_path)
    with checkpointer, pytest.raises((DifferentState), match="model/extra is only in the checkpoint"):
        checkpointer.restore()


def test_lazy_layers_may_get_their_shape_before_the_restore(tmp_path: Path) -> None:
    build = simple(lambda p: SGD(p, lr=1e-2), model=lazy)
    script, checkpointer = started(build, folder=tmp_path, every=1)
    with checkpointer:
        script.model(torch.randn(4, WIDTH))
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
        assert checkpointer.captured == 2


def test_memory_for_copies_of_gradients_is_given_back_once_they_are_fresh(
    delta_sidecar: ScriptedSidecar,
) -> None:
    """At first nobody knows whether a gradient's memory is used again."""
    script, checkpointer = started(odd(), every=4)
    checkpointer.restore()
    train(script, checkpointer, 8)
    held = sum(tensor.nbytes for tensor in checkpointer._deltas._recorder._staging.values())
    checkpointer.close()
    assert checkpointer.deltas
    assert held == 0


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (torch.tensor(0.5, requires_grad=True), {0.5}),
        (torch.tensor([[0.5]]), {0.5}),
        (numpy.float32(0.5), {0.5}),
        (numpy.array(0.5), {0.5}),
        (torch.ones(3), {None}),
        ("0.5 or so", {None}),
    ],
    ids=["tensor", "matrix", "number of numpy's", "array of numpy's", "several", "text"],
)
def test_loss_may_be_whatever_the_script_has(
    delta_sidecar: ScriptedSidecar, loss: Any, told: set[float | None]
) -> None:
    """It is for people to look at: nothing about it ends a training."""
    script, checkpointer = started(odd(), every=4)
    with checkpointer:
        checkpointer.restore()
        for _ in range(4):
            script.update()
            checkpointer.step(loss)
        assert checkpointer.wait(DEADLINE)
        assert checkpointer.captured == 1
    assert {request.loss for request in delta_sidecar.asked("progress") if request.step} == told
