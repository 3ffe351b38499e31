"""What a script keeps in generators, lists and buffers comes back, or its log says what does not.

Each script is left and resumed twice: from a snapshot and the deltas after it, and from a snapshot alone.
"""

from __future__ import annotations

import enum
import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    BASE,
    EQUAL,
    STEP,
    WIDTH,
    Script,
    adam,
    loop,
    outcome,
    started,
    survives_from_a_snapshot,
    train,
)
from tiercheck import Checkpointer, NotCapturable, RestoreError
from tiercheck.protocol.version import Kind
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.state.user_state import generator_state, set_generator


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def drawing(numbers: Any, draw: Callable[[Any], Any]) -> Callable[[], Script]:
    """The rate of each step is drawn from a generator of numpy's."""

    def build() -> Script:
        model, own = net(), numbers(torch.initial_seed() % 1000)
        optimizer = adam(model.parameters())

        def after(step: int) -> None:
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + abs(float(draw(own))))

        return loop(model, optimizer, after=after, own=own)

    return build


def experts_zeroed_in_place() -> Script:
    """An expert that a step does not use is moved all the same, by its momentum and a gradient of zeros."""
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    optimizer, count = AdamW(model.parameters(), lr=1e-2), {"step": 0}

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        count["step"] += 1
        used = count["step"] % 2 if count["step"] < 4 else 2 if count["step"] < 8 else 1
        loss: Tensor = (model[used](torch.randn(4, WIDTH)) + model[0].bias).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Script(model, [optimizer], update, {"count": count})


def count_on_the_optimizer() -> Script:
    model = net()
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    optimizer.updates = 0

    def after(step: int) -> None:
        optimizer.updates += 1
        optimizer.param_groups[0]["lr"] = 1e-2 / optimizer.updates

    return loop(model, optimizer, after=after)


def code_frozen_on_the_way(at: int) -> Callable[[], Script]:
    """Of no module, only of the optimizer."""

    def build() -> Script:
        model, code = net(), torch.randn(WIDTH, requires_grad=True)

        def after(step: int) -> None:
            code.requires_grad_(step < at)

        def loss_of(model: Any) -> Tensor:
            return (model(torch.randn(4, WIDTH)) * code).square().mean()  # type: ignore[no-any-return]

        return loop(model, AdamW([*model.parameters(), code], lr=1e-2), after=after, loss_of=loss_of)

    return build


class Memory(nn.Module):
    """Keeps the last output with its first two dimensions exchanged: sums over it depend on its order."""

    mem: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(33, 33)
        self.register_buffer("mem", torch.zeros(7, 5, 33))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x) + self.mem.transpose(0, 1) * 0.1)
        loss = out.square().mean() + self.mem.exp().sum() * 1e-3
        self.mem = out.detach().transpose(0, 1)
        return loss


def transposed_buffer() -> Script:
    model = Memory()
    return loop(model, adam(model.parameters()), loss_of=lambda model: model(torch.randn(5, 7, 33)))


def sum_over_the_state() -> Script:
    """Layers get their first gradients from the last one on, which is the order of the optimizer's state."""
    model = nn.ModuleList(nn.Linear(33, 33) for _ in range(4))
    optimizer, used = AdamW(model.parameters(), lr=1e-2), [3]

    def before(step: int) -> None:
        used[0] = (4 - step) % 4

    def loss_of(model: Any) -> Tensor:
        norms = (state["exp_avg"].norm() for state in optimizer.state.values())
        last_bits = sum(norms, torch.zeros(())) * 2**22 % 1
        return model[used[0]](torch.randn(4, 33)).square().mean() + last_bits  # type: ignore[no-any-return]

    return loop(model, optimizer, before=before, loss_of=loss_of)


def states_looked_up() -> Script:
    """A look at the state of a parameter that has none leaves an empty one there, in the order of looks."""
    model = net()
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def before(step: int) -> None:
        for parameter in reversed(optimizer.param_groups[0]["params"]):
            optimizer.state[parameter].get("exp_avg")

    return loop(model, optimizer, before=before)


class FirstBatch(nn.Module):
    """Takes its shift from the first batch, as ActNorm does, counts, draws, and remembers a little."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.initialized = False
        self.last: list[float] = []
        self.sums: dict[str, float] = {}
        self.own = numpy.random.default_rng(torch.initial_seed())

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
            self.initialized, self.batches = True, 0
        self.batches += 1
        self.last = [*self.last[-3:], float(self.own.random())]
        self.sums["all"] = self.sums.get("all", 0.0) + self.last[0]
        return (x + self.shift) * (1 + self.batches / 10 + self.sums["all"])


def numbers_of_modules() -> Script:
    """A flag, a counter, and the rate of a dropout that is annealed."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), FirstBatch(), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    dropout: Any = model[2]

    def after(step: int) -> None:
        dropout.p *= 0.9

    return loop(model, adam(model.parameters()), after=after)


class Phase(enum.Enum):
    WARM_UP = 1.0
    LATER = 2.0


@dataclass
class Settings:
    temperature: float = 1.0


class KeepsMuch(nn.Module):
    """Keeps values in what a script of numpy and the standard library would use, and in its settings."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.counts, self.scale = numpy.zeros(4), numpy.float64(1.0)
        self.window: deque[float] = deque(maxlen=3)
        self.seen, self.nested = Counter[int](), {"rates": [0.5, 0.5]}
        self.phase, self.settings = Phase.WARM_UP, Settings()
        self._private = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.counts[int(self.counts.sum()) % 4] += 1
        self.scale *= 0.95
        self.window.append(float(self.counts[0]))
        self.seen[len(self.window)] += 1
        self.nested["rates"][0] *= 0.9
        self.settings.temperature *= 0.9
        self._private *= 0.9
        if self.seen[3] > 1:
            self.phase = Phase.LATER
        kept = [self.counts[0], self.scale, sum(self.window), self.seen[3], self.nested["rates"][0]]
        kept += [self._private]
        done: Tensor = self.layer(x) * float(sum(kept)) * self.phase.value * self.settings.temperature
        return done


def values_in_many_forms() -> Script:
    model = nn.Sequential(KeepsMuch(), nn.Linear(WIDTH, WIDTH))
    return loop(model, adam(model.parameters()))


class Cached(nn.Module):
    """Makes positions for an input's length once, as rotary embeddings do, and notes the length beside."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.positions = 0, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.length:
            self.length, self.positions = len(x), torch.arange(len(x)) + 1.0
        return x * self.positions[: len(x), None]


class CachedByLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._lengths: list[int] = []
        self._kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self._lengths:
            self._lengths.append(len(x))
            self._kept[len(x)] = torch.arange(len(x)) + 1.0
        return x * self._kept[len(x)][:, None]


class MadeAtFirst(nn.Module):
    """Makes an object at its first input, and notes that it did."""

    def __init__(self) -> None:
        super().__init__()
        self._is_made, self._table = False, None

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_made:
            self._is_made, self._table = True, KeepsMuch  # type: ignore[assignment]
        return x * len(self._table.__name__)  # type: ignore[attr-defined]


def with_a_cache(make: Callable[[], nn.Module]) -> Callable[[], Script]:
    def build() -> Script:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH))
        return loop(model, adam(model.parameters()))

    return build


def values_in_a_group() -> Script:
    """The script keeps the list and the array that it gave, and changes them in place."""
    model, betas, decay = net(), [0.9, 0.99], numpy.array(0.1)
    optimizer = AdamW([{"params": list(model.parameters()), "betas": betas, "own": decay}], lr=1e-2)

    def after(step: int) -> None:
        betas[0] *= 0.97
        decay[...] *= 0.9
        optimizer.param_groups[0]["lr"] = 1e-2 * float(decay)

    return loop(model, optimizer, after=after)


def key_of_a_group_deleted(at: int) -> Callable[[], Script]:
    """The script does not look at the number of the step, but whether the key is there."""

    def build() -> Script:
        model = net()
        optimizer = AdamW([{"params": list(model.parameters()), "warm": 1e-3}], lr=1e-2)
        group = optimizer.param_groups[0]

        def before(step: int) -> None:
            group["lr"] = group["warm"] if "warm" in group else 1e-2 / step

        def after(step: int) -> None:
            if step == at:
                del group["warm"]

        return loop(model, optimizer, before=before, after=after)

    return build


def parameters_from_a_set() -> Script:
    """In another order in each process."""
    model = net()
    listed = list(model.parameters())
    random.shuffle(listed)
    return loop(model, AdamW(listed, lr=1e-2))


class Evaluated(nn.Module):
    """Its buffers are made and written in inference mode, as where only evaluations use them."""

    mean: Tensor
    last: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.inference_mode():
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("last", torch.zeros(0))
            self.register_buffer("passing", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.mean += x.mean(0)
            self.passing += x.mean(0)
            self.last = x.mean(1)
        done: Tensor = self.layer(x) * float(self.mean.sum() + self.passing.sum() + self.last.sum())
        return done


def buffers_of_evaluations() -> Script:
    model = Evaluated()
    return loop(model, adam(model.parameters()))


def module_replaced() -> Script:
    """By one of the same class, whose rate is then annealed."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))

    def before(step: int) -> None:
        if step == 2:
            model[1] = nn.Dropout(0.4)
        dropout: Any = model[1]
        dropout.p *= 0.9

    return loop(model, adam(model.parameters()), before=before)


EQUAL_ONES: dict[str, Callable[[], Script]] = {
    "odd number of normal numbers": drawing(numpy.random.RandomState, lambda own: own.randn(3)[0]),
    "generators spawned": drawing(numpy.random.default_rng, lambda own: own.spawn(1)[0].random()),
    "gradients zeroed in place": experts_zeroed_in_place,
    "count on an optimizer of torch's": count_on_the_optimizer,
    "parameter of the optimizer's, frozen before the snapshot": code_frozen_on_the_way(3),
    "parameter of the optimizer's, frozen after the snapshot": code_frozen_on_the_way(6),
    "buffer with its dimensions exchanged": transposed_buffer,
    "order of the optimizer's state": sum_over_the_state,
    "empty states of an optimizer": states_looked_up,
    "values of a group changed in place": values_in_a_group,
    "key of a group deleted before the first snapshot": key_of_a_group_deleted(2),
    "key of a group deleted after a snapshot": key_of_a_group_deleted(7),
    "parameters from a set": parameters_from_a_set,
    "numbers of modules": numbers_of_modules,
    "values of modules in many forms": values_in_many_forms,
    "module replaced": module_replaced,
    "buffers of evaluations": buffers_of_evaluations,
    "cache and its length": with_a_cache(Cached),
    "cache and its keys": with_a_cache(CachedByLength),
    "object and whether it is made": with_a_cache(MadeAtFirst),
}


@pytest.mark.parametrize("name", EQUAL_ONES)
def test_script_comes_back_equal_from_deltas(delta_sidecar: ScriptedSidecar, name: str) -> None:
    assert outcome(delta_sidecar, EQUAL_ONES[name]) == EQUAL


@pytest.mark.parametrize("name", EQUAL_ONES)
def test_script_comes_back_equal_from_a_snapshot(tmp_path: Path, name: str) -> None:
    survives_from_a_snapshot(EQUAL_ONES[name], tmp_path)


def test_values_that_stay_for_what_is_beside_them_are_in_the_log_with_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    survives_from_a_snapshot(with_a_cache(Cached), tmp_path)
    assert "in no version: set these values after `restore`, or register that as a buffer" in caplog.text


def test_generator_goes_back_to_what_it_had_spawned() -> None:
    """In a process that stays, and with a seed of the operating system's."""
    numbers = numpy.random.default_rng()
    numbers.spawn(2)
    drawn = generator_state(numbers)
    expected = [each.random() for each in numbers.spawn(2)]
    for again in (numbers, numpy.random.default_rng()):
        set_generator(again, drawn)
        assert [each.random() for each in again.spawn(2)] == expected


@pytest.fixture(params=[numpy.random.PCG64, numpy.random.Philox, numpy.random.SFC64])
def other_global_generator(request: pytest.FixtureRequest) -> Iterator[None]:
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(request.param(1))
    yield
    numpy.random.set_bit_generator(before)


def test_another_generator_behind_numpys_functions_comes_back(
    tmp_path: Path, other_global_generator: None
) -> None:
    def build() -> Script:
        model = net()
        optimizer = adam(model.parameters())

        def after(step: int) -> None:
            optimizer.param_groups[0]["lr"] = 1e-2 * float(numpy.random.rand())

        return loop(model, optimizer, after=after)

    whole, checkpointer = started(build, folder=tmp_path, every=5)
    with checkpointer:
        checkpointer.restore()
        losses = train(whole, checkpointer, 9, wait=True)
    again, checkpointer = started(build, seed=77, folder=tmp_path, every=100)
    with checkpointer:
        assert checkpointer.restore() == 5
        assert train(again, checkpointer, 4) == losses[5:]


# What cannot come back is in the log while the training is healthy.


def set_that_is_popped() -> Script:
    model = net()
    left = {random.randrange(10**9) for _ in range(300)}
    optimizer = adam(model.parameters())

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + left.pop() % 7)

    return loop(model, optimizer, after=after, left={"left": left})


class KeepsAnOutput(nn.Module):
    """In a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.before = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + self.before)
        self.before = out.detach().mean(0)
        return out


class Recurrent(nn.Module):
    """Carries its state from batch to batch, in an attribute that is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.carried: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        out, carried = self.cell(x[:, None], self.carried)
        self.carried = (carried[0].detach(), carried[1].detach())
        done: Tensor = out
        return done


class Keeps(nn.Module):
    """Something that is neither a buffer nor stored, and that each output changes."""

    def __init__(self, held: Any, keep: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.held, self._keep = held, keep

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.held = self._keep(self.held, out.detach().mean(0))
        return out


def keeping(held: Callable[[], Any], keep: Callable[[Any, Tensor], Any]) -> Callable[[], Script]:
    return changed_midway(lambda: Keeps(held(), keep), lambda _: None)


class TwoBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("a", torch.zeros(WIDTH))
        self.register_buffer("b", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.b + self.a  # type: ignore[operator]


def changed_midway(model: Callable[[], nn.Module], change: Callable[[Any], object]) -> Callable[[], Script]:
    def build() -> Script:
        made = model()
        optimizer = SGD(made.parameters(), lr=1e-2, momentum=0.9)
        step = itertools.count(1)

        def before(_: int) -> None:
            if next(step) == 3:
                change(made)

        return loop(
            made, optimizer, before=before, loss_of=lambda m: m(torch.randn(4, WIDTH)).square().mean()
        )

    return build


def share_buffers(model: Any) -> None:
    model.b = model.a


class CastsLater(TwoBuffers):
    """Its buffer takes the type of what is computed, from the sixth step on: after the snapshot."""

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b + 1
        if float(self.b[0]) == 7:
            self.a = self.a.double()
        out: Tensor = super().forward(x)
        return out


def test_buffer_whose_dtype_changes_after_the_snapshot_is_not_cast_back_silently(
    delta_sidecar: ScriptedSidecar,
) -> None:
    """Its deltas do not fit the model of a new process: that is found, and an earlier version is used."""
    build = changed_midway(CastsLater, lambda _: None)
    whole, checkpointer = started(build, every=BASE)
    checkpointer.restore()
    train(whole, checkpointer, STEP)
    assert checkpointer.wait(DEADLINE)
    checkpointer.close()
    delta_sidecar.offer(BASE, STEP)
    _, checkpointer = started(build, seed=77, every=BASE)
    with checkpointer, pytest.raises(RestoreError):
        checkpointer.restore()
    assert delta_sidecar.asked("mismatch", Kind.DELTA)


def other_dtype(model: Any) -> None:
    model.a = model.a.double()


def other_activation(model: Any) -> None:
    model[1] = nn.GELU()


def other_order(model: Any) -> None:
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t()


TOLD_ONES = {
    "set that is popped": (set_that_is_popped, "Order: a set in `state`"),
    "buffers that become one": (changed_midway(TwoBuffers, share_buffers), "Changed: model/b"),
    "buffer of another dtype": (changed_midway(TwoBuffers, other_dtype), "Changed: model/a"),
    "tensor that is no buffer": (
        changed_midway(KeepsAnOutput, lambda _: None),
        "Attribute: the tensor before is a plain attribute",
    ),
    "state carried from batch to batch": (
        changed_midway(Recurrent, lambda _: None),
        "Attribute: the tensor carried is a plain attribute",
    ),
    "list that has become long": (
        keeping(lambda: [0.0] * 254, lambda held, _: [*held, 0.0]),
        "Attribute: the list held is a plain attribute of a module, changes, and is in no version: keep it",
    ),
    "large array": (
        keeping(lambda: numpy.zeros(999), lambda held, _: held + 1),
        "Attribute: the ndarray held is a plain attribute",
    ),
    "tensors in a dict": (
        keeping(lambda: {"mean": torch.zeros(WIDTH)}, lambda held, out: {"mean": held["mean"] + out}),
        "Attribute: the tensor held is a plain attribute",
    ),
    "tensors in a deque": (
        keeping(lambda: deque(maxlen=2), lambda held, out: deque([*held, out], maxlen=2)),
        "Attribute: the tensor held is a plain attribute",
    ),
    "module of another class": (changed_midway(net, other_activation), "Changed: model/1 "),
    "parameter in another order": (changed_midway(net, other_order), "Changed: model/0.weight"),
}


@pytest.mark.parametrize("name", TOLD_ONES)
def test_what_will_not_come_back_is_in_the_log_before_the_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    build, message = TOLD_ONES[name]
    script, checkpointer = started(build, folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 6, wait=True)
    if "Order" in message:  # what the order becomes is known once it is read
        _, checkpointer = started(build, seed=77, folder=tmp_path)
        with checkpointer:
            checkpointer.restore()
    assert message in caplog.text


def test_numbers_of_modules_are_in_every_version_after_a_process_went_back(tmp_path: Path) -> None:
    """Its model has trained when it begins again; a new process begins with what the script makes."""
    script, checkpointer = started(numbers_of_modules, folder=tmp_path, every=3)
    checkpointer.restore()
    train(script, checkpointer, 3, wait=True)
    checkpointer.close()
    again = Checkpointer(script.model, script.optimizers, state=script.state, folder=tmp_path, every=3)
    with again:
        assert again.restore() == 3
        losses = train(script, again, 3, wait=True)
    fresh, checkpointer = started(numbers_of_modules, seed=77, folder=tmp_path, every=3)
    with checkpointer:
        assert checkpointer.restore() == 6
        mine, theirs = (vars(each.model[1]) for each in (script, fresh))  # type: ignore[index]
        assert {key: theirs[key] for key in ("initialized", "batches")} == {"initialized": True, "batches": 6}
        assert mine["batches"] == 6
    assert len(losses) == 3


def test_optimizer_that_trains_less_than_here_is_refused_by_name(tmp_path: Path) -> None:
    def build(first: int) -> Callable[[], Script]:
        def of() -> Script:
            model = net()
            return loop(model, SGD(list(model.parameters())[first:], lr=1e-2, momentum=0.9))

        return of

    script, checkpointer = started(build(2), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
    _, checkpointer = started(build(0), folder=tmp_path)
    with checkpointer, pytest.raises(DifferentState, match=r"\(0\.bias, 0\.weight\)"):
        checkpointer.restore()


@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1, WIDTH))]
)
def test_torchscript_is_refused_with_what_to_give_instead(tmp_path: Path, compiled: Any) -> None:
    inner = net()
    model = compiled(inner)
    optimizer = adam(model.parameters())
    with pytest.raises(NotCapturable, match=r"torch\.jit\.script"):
        started(lambda: loop(model, optimizer), folder=tmp_path)
    script, checkpointer = started(lambda: loop(inner, optimizer), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
        assert checkpointer.wait(DEADLINE)
        assert checkpointer.captured == 2


def test_training_without_restore_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script, checkpointer = started(lambda: loop(model := net(), adam(model.parameters())), folder=tmp_path)
    with checkpointer:
        train(script, checkpointer, 2)
    assert caplog.text.count("Restore: restore() was not called") == 1


class Attributes(dict[str, Any]):
    """A dict with attributes, as many scripts have it."""

    __getattr__ = dict.__getitem__


def test_dict_with_attributes_is_saved_as_a_dict(tmp_path: Path) -> None:
    def build() -> Script:
        model, own = net(), Attributes(count=0)

        def after(step: int) -> None:
            own["count"] += 1

        return loop(model, adam(model.parameters()), after=after, own=own)

    _, again = survives_from_a_snapshot(build, tmp_path)
    assert again.state["own"].count == 9


class RaisesKeyErrors:
    """As dicts with attributes do that are written in three lines."""

    def __init__(self) -> None:
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeyError(name)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class RaisesAtAll:
    """Has no dict, and raises for its name."""

    __slots__ = ("held",)

    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Wrapping(nn.Module):
    """Has a method that a decorator gave the documentation of a builtin function."""

    @functools.wraps(abs)
    def size(self) -> int:
        return 1


def test_objects_of_modules_whose_missing_attributes_raise_end_nothing(tmp_path: Path) -> None:
    model = net()
    model.odd, model.steps = RaisesAtAll(), 0  # type: ignore[assignment]
    model.append(Wrapping())  # type: ignore[operator]
    model[-1].forward = nn.Identity().forward  # type: ignore[index]
    optimizer = adam(model.parameters())
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        model.steps = 3  # type: ignore[assignment]
        train(loop(model, optimizer), checkpointer, 1, wait=True)
        assert checkpointer.captured == 1


def test_object_whose_missing_attributes_raise_other_errors_is_saved(tmp_path: Path) -> None:
    def build() -> Script:
        model, own = net(), RaisesKeyErrors()

        def after(step: int) -> None:
            own.count += 1

        return loop(model, adam(model.parameters()), after=after, own=own)

    _, again = survives_from_a_snapshot(build, tmp_path)
    assert again.state["own"].count == 9


def test_parameter_that_is_written_after_the_restore_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that resets a layer when training begins, say, does so at each start."""
    for reset in (False, True):
        script, checkpointer = started(
            lambda: loop(model := net(), adam(model.parameters())), folder=tmp_path, every=1
        )
        with checkpointer:
            checkpointer.restore()
            assert "Overwritten" not in caplog.text
            if reset:
                torch.nn.init.zeros_(script.model[2].weight)  # type: ignore[index, arg-type]
            train(script, checkpointer, 2, wait=True)
    assert "Overwritten: 2.weight was written after `restore`" in caplog.text


@pytest.mark.parametrize("reset", [False, True])
def test_parameter_that_is_written_before_each_update_is_in_the_log_only_if_its_start_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reset: bool
) -> None:
    """As SAM climbs before each update, and a momentum encoder follows in each forward pass."""

    def build() -> Script:
        model = net()

        @torch.no_grad()
        def climb(step: int) -> None:
            for parameter in model.parameters():
                parameter.mul_(1.01)

        return loop(model, adam(model.parameters()), between=climb)

    for again in (False, True):
        script, checkpointer = started(build, folder=tmp_path, every=1)
        with checkpointer:
            checkpointer.restore()
            if reset and again:
                torch.nn.init.zeros_(script.model[2].weight)  # type: ignore[index, arg-type]
            train(script, checkpointer, 3, wait=True)
    assert ("Overwritten: 2.weight was written after `restore`" in caplog.text) == reset
    assert caplog.text.count("Overwritten") == reset


def test_weight_that_is_computed_of_a_parameter_is_no_tensor_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Script:
        model = net()
        torch.nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)  # type: ignore[no-untyped-call]
        return loop(model, adam(model.parameters()))

    script, checkpointer = started(build, folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 3, wait=True)
    assert "Attribute" not in caplog.text


@pytest.mark.parametrize("wrap", ["Fabric", "Trainer"])
def test_wrapper_of_lightnings_is_taken_off_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrap: str
) -> None:
    pytest.importorskip("lightning")
    from lightning.fabric.strategies import SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricOptimizer
    from lightning.pytorch.core.optimizer import LightningOptimizer

    model = net()
    inner = adam(model.parameters())
    strategy = SingleDeviceStrategy("cpu")
    outer: Any = _FabricOptimizer(inner, strategy) if "Fabric" in wrap else LightningOptimizer(inner)
    checkpointer = Checkpointer(model, outer, folder=tmp_path)
    checkpointer.close()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def scheduled(given: bool) -> Callable[[], Script]:
    """Its rate falls after the steps that a restore repeats, which are therefore equal."""

    def build() -> Script:
        model = net()
        optimizer = adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        script = loop(model, optimizer, after=lambda _: scheduler.step())
        script.state.update({"scheduler": scheduler} if given else {})
        return script

    return build


@pytest.mark.parametrize("given", [True, False])
def test_scheduler_that_is_not_in_state_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool
) -> None:
    script, checkpointer = started(scheduled(given), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
    assert caplog.text.count("Schedule: a scheduler sets the learning rate of AdamW") == (not given)


def scaled(given: bool, *, is_enabled: bool, fused: bool) -> Callable[[], Script]:
    def build() -> Script:
        model = net()
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_enabled)

        def update() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            return loss

        return Script(model, [optimizer], update, {"scaler": scaler} if given else {})

    return build


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("given", "is_enabled"), [(True, True), (False, True), (False, False)])
def test_gradient_scaler_that_is_not_in_state_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: bool, is_enabled: bool, fused: bool
) -> None:
    script, checkpointer = started(
        scaled(given, is_enabled=is_enabled, fused=fused), folder=tmp_path, every=1
    )
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
    assert caplog.text.count("Scaler: a GradScaler scales the gradients of AdamW") == (
        is_enabled and not given
    )


def test_data_of_a_module_that_stay_as_they_are_are_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = {"shape": (2, 3), "nested": {"a": [1, 2]}, "table": numpy.ones(3), "nan": [[float("nan")]]}
    script, checkpointer = started(keeping(lambda: held, lambda held, _: held), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 3, wait=True)
    assert "Attribute" not in caplog.text


class Balanced(nn.Module):
    """Keeps parts of the loss, as a mixture of experts does, beside a number that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.aux: Tensor | None = None
        self.parts: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layer(x) * self.calls
        self.aux, self.parts = out.mean(), [out.std(), out.max()]
        return out


def test_part_of_a_loss_that_a_module_keeps_is_not_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Script:
        def loss_of(model: Any) -> Tensor:
            loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
            return loss + model.aux + sum(model.parts)

        model = Balanced()
        return loop(model, adam(model.parameters()), loss_of=loss_of)

    survives_from_a_snapshot(build, tmp_path)
    assert "Attribute" not in caplog.text


def test_metric_in_the_model_is_saved_and_no_tensor_of_it_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def build() -> Script:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleDict({"mean": torchmetrics.MeanMetric()}))

        def loss_of(model: Any) -> Tensor:
            loss: Tensor = model[0](torch.randn(4, WIDTH)).square().mean()
            model[1]["mean"].update(loss.detach())
            return loss + model[1]["mean"].compute()

        return loop(model, adam(model.parameters()), loss_of=loss_of)

    survives_from_a_snapshot(build, tmp_path)
    assert "Attribute" not in caplog.text
