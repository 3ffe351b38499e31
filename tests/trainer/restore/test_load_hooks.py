"""Promise: what a load does to modules and optimizers is done after a restore too."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import (
    EQUAL,
    Script,
    loop,
    mean_square,
    outcome,
    saved,
    started,
    survives_from_a_snapshot,
)
from tests.trainer.small_runs import same_bits
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.restore.load import has_load_hooks
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

WIDTH = 12


class Derives(nn.Module):
    """Keeps a table, which nothing stores, of a buffer that each start of the script draws anew."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.loads = 0
        self.refresh()

    def refresh(self) -> None:
        assert isinstance(self.scale, Tensor)
        self.table = self.scale.exp()
        self.loads += 1

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.layer(x) * self.table
        return done


class ByPostHook(Derives):
    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())


class ByMethod(Derives):
    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.refresh()


class ByPreHook(Derives):
    """Reads what is about to be loaded, after it has overwritten what it had."""

    def __init__(self) -> None:
        super().__init__()
        self._register_load_state_dict_pre_hook(self.before)

    def before(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        assert isinstance(self.scale, Tensor)
        self.scale.zero_()
        self.table = state[f"{prefix}scale"].exp()


class ByWholeLoad(Derives):
    def load_state_dict(self, state_dict: Any, *rest: Any) -> Any:  # type: ignore[override]
        found = super().load_state_dict(state_dict, *rest)
        self.refresh()
        return found


class ByExtraState(Derives):
    def get_extra_state(self) -> Any:
        return {"made": 1}

    def set_extra_state(self, state: Any) -> None:
        self.refresh()

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class UnderOtherNames(Derives):
    """Shows its buffer by a name of an older release."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self.rename)
        self._register_load_state_dict_pre_hook(self.rename_back)

    @staticmethod
    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        state[f"{prefix}gain"] = state.pop(f"{prefix}scale")

    def rename_back(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        state[f"{prefix}scale"] = state.pop(f"{prefix}gain")
        self.table = state[f"{prefix}scale"].exp()


class WritesItsState(Derives):
    """Counts from nought after each load, which an undisturbed run does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_load_state_dict_post_hook(self.reset)

    @staticmethod
    def reset(module: nn.Module, _: Any) -> None:
        module.seen.zero_()  # type: ignore[operator,union-attr]
        module.layer.weight.data.mul_(0.5)  # type: ignore[union-attr,operator]
        module.refresh()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        done: Tensor = super().forward(x) * self.seen.sqrt()
        return done


KINDS = [ByPostHook, ByMethod, ByPreHook, ByWholeLoad, ByExtraState, UnderOtherNames, WritesItsState]


def script(
    kind: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module] = lambda each: each
) -> Script:
    model = wrap(kind())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return loop(model, optimizer, loss_of=mean_square(4, WIDTH))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "wrap",
    [lambda each: each, nn.Sequential, lambda each: torch.compile(each, backend="eager")],
    ids=["itself", "inside another", "compiled"],
)
def test_what_a_module_derives_when_it_is_loaded_is_there_after_a_restore(
    kind: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    if kind is ByWholeLoad and wrap is nn.Sequential:
        pytest.skip("torch does not call it either")
    survives_from_a_snapshot(lambda: script(kind, wrap), tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_module_derives_is_there_after_deltas_were_replayed(
    kind: Callable[[], nn.Module], delta_sidecar: ScriptedSidecar
) -> None:
    assert outcome(delta_sidecar, lambda: script(kind)) == EQUAL


def test_hooks_of_a_module_run_once_for_each_restore_and_find_their_tensors_where_they_were(
    tmp_path: Path,
) -> None:
    saved(lambda: script(ByPostHook), 2, folder=tmp_path, every=1)
    again, checkpointer = started(lambda: script(ByPostHook), seed=1, folder=tmp_path)
    places = {name: value.data_ptr() for name, value in again.model.state_dict().items()}
    with checkpointer:
        assert checkpointer.restore() == 2
    assert again.model.loads == 2  # with that of the constructor
    assert {name: value.data_ptr() for name, value in again.model.state_dict().items()} == places


def test_hook_that_raises_is_told_in_a_sentence(tmp_path: Path) -> None:
    saved(lambda: script(ByPostHook), 2, folder=tmp_path, every=1)
    again, checkpointer = started(lambda: script(ByPostHook), folder=tmp_path)

    def fail(*_: Any) -> None:
        raise LookupError("no table for it")

    again.model.register_load_state_dict_post_hook(fail)
    with checkpointer, pytest.raises(RestoreError, match="LookupError: no table for it"):
        checkpointer.restore()


class Refreshes(AdamW):
    """Derives from its state what nothing stores, as optimizers do that keep projections."""

    largest: Any = None

    def refresh(self, *_: Any) -> None:
        self.largest = self, max(float(each["exp_avg_sq"].max()) for each in self.state.values())


class AtLoad(Refreshes):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.refresh()


class AtSetState(Refreshes):
    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self.refresh()


class AtHook(Refreshes):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.register_load_state_dict_post_hook(self.refresh)


@pytest.mark.parametrize("kind", [AtLoad, AtSetState, AtHook], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_an_optimizer_derives_when_it_is_loaded_is_there_after_a_restore(
    kind: type[Refreshes], dtype: torch.dtype, tmp_path: Path
) -> None:
    def build() -> Script:
        found = script(lambda: nn.Linear(WIDTH, WIDTH))
        optimizer = kind(found.model.parameters(), lr=1e-2)
        found.model.to(dtype)

        def update() -> Tensor:
            for parameter in found.model.parameters():
                parameter.grad = torch.randn(parameter.shape, dtype=dtype)
                state = optimizer.state.get(parameter, {})
                state.update({key: value.to(dtype) for key, value in state.items() if value.dim()})
            optimizer.step()
            for state in optimizer.state.values():
                # Finer than the parameter, as of master copies: torch's own load would cast it.
                state.update({key: value.float() / 3 for key, value in state.items() if value.dim()})
            return torch.zeros(())

        return Script(found.model, [optimizer], update)

    whole = saved(build, 2, folder=tmp_path, every=1)
    again, checkpointer = started(build, seed=1, folder=tmp_path)
    with checkpointer:
        assert checkpointer.restore() == 2
    same_bits(again.tensors(), whole.tensors())
    (optimizer,) = again.optimizers
    assert isinstance(optimizer, Refreshes)
    assert optimizer.largest is not None


def classes_with_load_hooks() -> Iterator[type[nn.Module]]:
    """Of all that torch has, and torchmetrics without what it loads from elsewhere."""
    seen = set()
    for root in (
        "torch.nn", "torch.ao.nn", "torch.ao.quantization", "torch.ao.pruning", "torchmetrics.aggregation",
        "torchmetrics.classification", "torchmetrics.regression", "torchmetrics.wrappers",
    ):  # fmt: skip
        try:
            package = importlib.import_module(root)
        except ImportError:
            continue
        paths = getattr(package, "__path__", ())
        names = [each.name for each in pkgutil.walk_packages(paths, f"{root}.", onerror=lambda _: None)]
        for name in [root, *(each for each in names if "test" not in each)]:
            try:
                module = importlib.import_module(name)
            except Exception:  # what it needs is not installed
                continue
            for kind in vars(module).values():
                if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind not in seen:
                    seen.add(kind)
                    yield kind


def made(kind: type[nn.Module]) -> nn.Module | None:
    """One of them; None if nobody can guess what it is made of, or torch's own load does without."""
    for arguments in ((), (4,), (4, 4), (4, 4, 1), (2, 4), (nn.Linear(4, 4),)):
        try:
            found = kind(*arguments)
            return found if any(map(has_load_hooks, found.modules())) else None
        except Exception:
            continue
    return None


def test_every_class_with_load_hooks_comes_back(tmp_path: Path) -> None:
    tried, wrong = [], {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in classes_with_load_hooks():
            first, second = made(kind), made(kind)
            if first is None or second is None:
                continue
            try:
                second.load_state_dict(first.state_dict())
                keys = {*first.state_dict()}
            except Exception:
                continue  # torch cannot do it itself
            tried.append(kind.__name__)
            folder = tmp_path / str(len(tried))
            try:
                for model in (first, second):
                    whole = nn.ModuleDict({"each": model, "layer": nn.Linear(2, 2)})
                    optimizer = SGD(whole["layer"].parameters(), lr=0.1)
                    script_of = Script(whole, [optimizer], lambda: torch.zeros(()))
                    _, checkpointer = started(lambda script_of=script_of: script_of, folder=folder, every=1)
                    with checkpointer:
                        if not checkpointer.restore():
                            optimizer.step()
                            checkpointer.step()
                            checkpointer.wait()
                tensors = [
                    {key: value for key, value in each.state_dict().items() if isinstance(value, Tensor)}
                    for each in (first, second)
                ]
                assert {*second.state_dict()} == keys
                same_bits(*tensors)
            except NotCapturable:
                pass  # told
            except Exception as error:
                wrong[kind.__name__] = repr(error)
    assert wrong == {}
    assert len(tried) > 30
