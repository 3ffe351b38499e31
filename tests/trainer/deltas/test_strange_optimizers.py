"""Promise: unknown optimizers, or some around others, come back, and are not disturbed nor believed.

A call from an odd place is none that hurts.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.optim import SGD, Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar, until
from tests.trainer.deltas.replaying import (
    EQUAL,
    TOLD,
    Script,
    adam,
    loop,
    net,
    outcome,
    simple,
    started,
    survives_from_a_snapshot,
    train,
    trained,
)
from tests.trainer.deltas.test_idioms import IDIOMS, Bound, Multiplies, Slow
from tiercheck import Checkpointer, ResumableSampler
from tiercheck.protocol.version import Kind
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


class Falling:
    """A rate that falls with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1e-2 / self.calls


class Asks(SGD):
    """Something that remembers, for its rate."""

    def __init__(self, parameters: Iterable[Tensor], rate: Callable[[], float]) -> None:
        super().__init__(parameters, lr=1e-2)
        self.rate = rate

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = self.rate()
        super().step()


def closed_over() -> Callable[[], float]:
    falling = Falling()

    def rate() -> float:
        return falling()

    return rate


@pytest.mark.parametrize(
    "build",
    [
        simple(Bound),
        simple(lambda p: Slow(p, lazy=True)),
        simple(lambda p: Asks(p, Falling())),
        simple(lambda p: Asks(p, closed_over())),
    ],
    ids=["bound method", "list that the first step makes", "object that is called", "function with a memory"],
)
def test_probe_changes_nothing_that_a_strangers_class_keeps(
    delta_sidecar: ScriptedSidecar, build: Callable[[], Script]
) -> None:
    torch.manual_seed(0)
    alone = build()
    expected = [float(alone.update().detach()).hex() for _ in range(6)]
    script, checkpointer = started(build)
    with checkpointer:
        checkpointer.restore()
        assert train(script, checkpointer, 6) == expected


@pytest.mark.parametrize(
    "name",
    [
        "slow weights in a list",
        "slow weights made at the first step",
        "generator of the optimizer's own",
        "mask of model and optimizer",
        "buffer made in forward",
        "compiled step",
        "decay by data",
    ],
)
def test_idiom_comes_back_equal_from_a_snapshot(tmp_path: Path, name: str) -> None:
    build, _ = IDIOMS[name]
    survives_from_a_snapshot(build, tmp_path)


@pytest.mark.parametrize(
    "inside",
    [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode],
    ids=["autocast", "inference mode"],
)
def test_restore_gives_the_same_bits_wherever_it_is_called(
    delta_sidecar: ScriptedSidecar, inside: Callable[[], AbstractContextManager[None]]
) -> None:
    build = simple(Multiplies)
    whole, checkpointer = trained(build, 7, every=4)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
        assert sorted(delta_sidecar.completed(Kind.DELTA)) == [5, 6, 7]
        delta_sidecar.offer(4, 7)
        expected = train(whole, checkpointer, 3)
    again, checkpointer = started(build, seed=77, every=4)
    with checkpointer:
        with inside():
            assert checkpointer.restore() == 7
        assert train(again, checkpointer, 3) == expected


def test_default_device_of_the_script_is_no_business_of_ours(tmp_path: Path) -> None:
    """What is made on the device of its choice, here one without memory, has no place in a file."""
    try:
        torch.set_default_device("meta")
        with torch.device("cpu"):
            script, checkpointer = started(simple(adam), folder=tmp_path, every=2)
        with checkpointer:
            checkpointer.restore()
            for _ in range(3):
                with torch.device("cpu"):
                    script.update()
                checkpointer.step()
            with torch.device("cpu"):
                expected = float(script.update().detach())
        with torch.device("cpu"):
            again, checkpointer = started(simple(adam), seed=77, folder=tmp_path, every=9)
        with checkpointer:
            assert checkpointer.restore() == 2
            with torch.device("cpu"):
                again.update()
                assert float(again.update().detach()) == expected
        assert sorted(index for batch in ResumableSampler(6, 2, seed=1) for index in batch) == [*range(6)]
        assert list(ResumableSampler(4, 2, seed=1, shuffle=False)) == [[0, 1], [2, 3]]
    finally:
        torch.set_default_device(None)


def test_steps_that_end_in_inference_mode_are_saved(tmp_path: Path) -> None:
    script, checkpointer = started(simple(adam), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        for _ in range(3):
            script.update()
            with torch.inference_mode():
                checkpointer.step()
        assert checkpointer.wait(DEADLINE)
        assert checkpointer.captured == 3


def test_forked_process_never_waits_for_copies_that_nobody_makes_there(
    delta_sidecar: ScriptedSidecar,
) -> None:
    """It forks while a snapshot waits for its slot, and goes on as a script does."""
    forked = threading.Event()

    delta_sidecar.grants_no_slot_before(forked)
    script, checkpointer = started(simple(adam), every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 1)
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            script.optimizers[0].zero_grad()
            script.optimizers[
                0
            ].step()  # without gradients: the threads of a matrix product are not here either
            checkpointer.step()
            refused = False
            try:
                checkpointer.restore()
            except NotCapturable:
                refused = True
            os.write(writes, b"yes" if refused and not checkpointer.wait() else b"no")
            os._exit(0)
        os.close(writes)
        ended: list[int] = []

        def gone() -> bool:
            ended.append(os.waitpid(pid, os.WNOHANG)[0])
            return ended[-1] == pid

        try:
            until(gone, "the forked process ends")
        except AssertionError:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise
        finally:
            forked.set()
        with open(reads, "rb") as said:
            assert said.read() == b"yes"


class Around(torch.optim.Optimizer):
    """Shows the state of the one inside as its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([parameter for group in inner.param_groups for parameter in group["params"]], {})
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_optimizer_whose_state_another_shows_is_no_stranger(tmp_path: Path) -> None:
    script, checkpointer = started(simple(lambda p: Around(adam(p))), folder=tmp_path, every=1)
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
        assert checkpointer.captured == 2


def test_optimizer_that_the_scripts_state_leads_to_is_no_stranger(tmp_path: Path) -> None:
    """Its own object saves it."""

    class Engine:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def state_dict(self) -> Any:
            return self.optimizer.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.optimizer.load_state_dict(state)

    model = net()
    mine, others = adam(model[0].parameters()), adam(model[3].parameters())
    update = loop(model, mine, others).update
    script, checkpointer = started(
        lambda: Script(model, [mine], update, {"engine": Engine(others)}), folder=tmp_path, every=1
    )
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 2, wait=True)
        assert checkpointer.captured == 2


WIDTH = 8


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def script(wrap: Callable[[Optimizer], Any]) -> Script:
    """Its loss shows how often the averager was called, and what it counted."""
    model = nn.Linear(WIDTH, WIDTH)
    inner = SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = wrap(inner)

    def update() -> Tensor:
        inner.zero_grad()
        loss: Tensor = model(torch.randn(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        counted = optimizer.averager.step if hasattr(optimizer, "averager") else optimizer.steps
        return loss + counted

    return Script(model, [optimizer], update)


class Passing(Optimizer):
    """Of somebody's own; it counts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.steps = optimizer, optimizer.param_groups, 0

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        return self.optimizer.step(closure)


class Elsewhere(Passing):
    """Keeps in an object what its state_dict does not show."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.history = _History()


class _History:
    last = 0


class OfItsOwn(Passing):
    state: Any = None

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.state = defaultdict(dict)


class Alone(Optimizer):
    def __init__(self, parameters: Any) -> None:
        self.param_groups, self.state = [{"params": list(parameters)}], defaultdict(dict)


def averaged(inner: Optimizer) -> Any:
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=3, warmup_steps=2))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [averaged, Passing], ids=["torch's own", "somebody's own"])
def test_wrapper_comes_back_with_what_it_counts(wrap: Callable[[Optimizer], Any], tmp_path: Path) -> None:
    survives_from_a_snapshot(lambda: script(wrap), tmp_path / "checkpoints")


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [averaged, Passing], ids=["torch's own", "somebody's own"])
def test_wrapper_comes_back_from_deltas_or_is_told(
    wrap: Callable[[Optimizer], Any], delta_sidecar: ScriptedSidecar
) -> None:
    assert outcome(delta_sidecar, lambda: script(wrap)) in (EQUAL, TOLD)


def test_what_a_wrapper_does_not_show_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, checkpointer = started(lambda: script(Elsewhere), folder=tmp_path)
    checkpointer.close()
    assert "Elsewhere.history (_History) is in no version" in caplog.text
    assert "state={'history'" in caplog.text


def test_wrapper_with_a_state_of_its_own_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(NotCapturable, match=r"OfItsOwn does not call.* \[optimizer.optimizer\]"):
        started(lambda: script(OfItsOwn), folder=tmp_path)


def test_optimizer_whose_updates_cannot_be_seen_is_refused_with_what_to_call(tmp_path: Path) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(NotCapturable, match=r"Alone does not call Optimizer.__init__"):
        Checkpointer(model, Alone(model.parameters()), folder=tmp_path)


class Raises(nn.Linear):
    def get_extra_state(self) -> Any:
        raise LookupError("no state")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda model: (model, {"a": SGD(model.parameters())}, None), "str is no torch.optim.Optimizer"),
        (
            lambda model: (model, SimpleNamespace(optimizer=SGD(model.parameters())), None),
            "such as a count of steps, belongs into `state`",
        ),
        (lambda model: (model.state_dict(), SGD(model.parameters()), None), "not OrderedDict"),
        (lambda model: (model, SGD(model.parameters()), [{"a": 1}]), "and list"),
        (lambda model: (Raises(2, 2), SGD(model.parameters()), None), "LookupError: no state"),
    ],
    ids=["optimizers by name", "wrapper", "no module", "state without names", "state_dict that raises"],
)
def test_what_a_checkpointer_cannot_take_is_told_in_a_sentence(
    given: Callable[[nn.Module], Any], message: str, tmp_path: Path
) -> None:
    model, optimizer, state = given(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=message):
        Checkpointer(model, optimizer, state=state, folder=tmp_path)


def test_function_in_a_group_is_told_before_training_with_what_to_keep_there(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD([{"params": list(model.parameters()), "rate": lambda step: 1.0}])
    checkpointer = Checkpointer(model, optimizer, folder=tmp_path)
    with (
        checkpointer,
        pytest.raises(NotCapturable, match=r"groups/rate: .* could not be read back: keep its name"),
    ):
        checkpointer.restore()


def test_weight_that_was_tied_on_the_way_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def begin() -> tuple[nn.Sequential, Checkpointer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, Checkpointer(model, SGD(model.parameters()), folder=tmp_path, every=1)

    model, checkpointer = begin()
    with checkpointer:
        checkpointer.restore()
        model[1].weight = model[0].weight
        checkpointer.step()
    _, checkpointer = begin()
    with (
        checkpointer,
        pytest.raises(ValueError, match=r"the script must remove it .* or tie it"),
    ):
        checkpointer.restore()
