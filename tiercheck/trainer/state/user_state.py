"""Packs and puts back the small rest of the state: random numbers, schedule, data position.

Without it, losses after a restart are not bitwise equal.

It is one blob of bytes, taken at once in `Checkpointer.step()`. It is written by `torch.save` and read with
`weights_only=True`, so a checkpoint can never run code.
"""

from __future__ import annotations

import io
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from operator import methodcaller
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from tiercheck.trainer.state.readable import check_readable, decoded, encoded, read_plain, write_plain
from tiercheck.trainer.tensors.tensor_parts import PLAIN, NotCapturable, memory

_SMALLEST = 64 * 1024


class Stateful(Protocol):
    """Anything with state of its own: a scheduler, a data loader, a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


State = Mapping[str, "Stateful | MutableMapping[str, Any] | torch.Generator | random.Random"]
"""The script's objects, by names of the user's choice. A numpy `Generator` is possible as well."""


class Packed:
    """The blob of the moment in which this is created: copied then, and written on first request.

    Writing takes far longer than copying, and training waits only for the copy, and not even for that if a
    tensor is on a device. What holds other things than plain values and tensors is written at once, because
    only its own code can copy it.
    """

    def __init__(self, state: State, facts: Mapping[str, Any], fixed: Sequence[Any] = ()) -> None:
        """Raises NotCapturable if torch.save cannot write `state`, or if it could not be read back.

        `fixed`: parts of `facts` that need no copy, because they never change.
        """
        self._written: bytes | None = None
        content = {"facts": dict(facts), "random": random_state(), "state": {}}
        for name, holder in state.items():
            content["state"][name] = _state_of(name, holder)
        try:
            # What `random_state` returned is referenced nowhere else.
            self._content: dict[str, Any] = encoded(
                {**content, "random": None}, {id(part): part for part in fixed}, _cloned
            )
            self._content["random"] = content["random"]
        except Exception:  # writing it at once raises whatever is wrong with it
            self._content = {}
            self._written = _write_readable(content)

    def written(self) -> bytes:
        """Returns the bytes. One thread at a time may call it; it waits for its own work on the device."""
        if self._written is None:
            buffer = io.BytesIO()
            torch.save(self._content, buffer)
            self._written = buffer.getvalue()
            self._content = {}
        return self._written


def pack(state: State, facts: Mapping[str, Any]) -> bytes:
    """Returns the blob of this moment. Raises NotCapturable as `Packed` does."""
    return Packed(state, facts).written()


class _NotPlain(Exception):
    """The value can be copied only by its own code."""


def _cloned(value: Any, known: dict[int, Any]) -> torch.Tensor:
    """Returns a clone that nothing done to the original can change. Raises _NotPlain.

    `known` has its memory by the negative address: what shares it must be written as the original would be.
    """
    if type(value) is not torch.Tensor or not _is_plain(value) or (memory := -value.data_ptr()) in known:
        raise _NotPlain
    copy = known[id(value)] = known[memory] = value.clone()
    return copy


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a clone is written as the original is. Shared memory is not: it is written once."""
    return (
        not tensor.is_meta
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_complex()
        and not tensor.is_neg()
        and not tensor.__dict__
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _write_readable(content: Mapping[str, Any]) -> bytes:
    """Writes `content`. Raises NotCapturable, too, for what could be written, but not read back."""
    for name, part in (*content["state"].items(), *content["facts"].items()):
        check_readable(part, f"state[{name!r}]" if name in content["state"] else name)
    return write_plain(dict(content), "the user state")


def unpack(blob: bytes, *, lenient: bool = False) -> dict[str, Any]:
    """Returns what `pack` was given.

    Raises NotCapturable if the blob holds more than tensors, plain values and records of classes that are
    here; `lenient`: leaves the other records as they are.
    """
    content: dict[str, Any] = read_plain(blob, "the user state", lenient=lenient)
    return content


def capacity_for(length: int, present: int = 0) -> int:
    """Returns the bytes to keep for a blob of `length`, with headroom so that the layout stays the same."""
    if length <= present:
        return present
    return max(_SMALLEST, 1 << (2 * length - 1).bit_length())


def put_back(state: State, content: Mapping[str, Any]) -> None:
    """Loads the users' objects and the random generators. Raises KeyError naming a part that is missing."""
    for name, holder in state.items():
        if name not in content["state"]:
            raise KeyError(f"the checkpoint has no state named {name!r}")
        if is_stateful(holder):
            holder.load_state_dict(content["state"][name])
            if hasattr(type(holder), "_get_iterator") and getattr(holder, "next_iter_state", None):
                _begin_without_draws(holder)
        elif isinstance(holder, MutableMapping):
            holder.clear()
            holder.update(content["state"][name])
        else:
            set_generator(holder, content["state"][name])
    if content["random"] is not None:
        set_random_state(content["random"])


def _begin_without_draws(loader: Any) -> None:
    """Makes a StatefulDataLoader draw no seeds where it goes on: it drew them when that epoch began."""

    def begin() -> Any:
        vars(loader).pop("_get_iterator", None)  # the next epoch draws its own
        drawn = torch.get_rng_state()
        try:
            return type(loader)._get_iterator(loader)
        finally:
            torch.set_rng_state(drawn)

    loader._get_iterator = begin


def is_stateful(holder: Any) -> TypeGuard[Stateful]:
    """Returns whether an object has the two methods."""
    try:
        return callable(holder.state_dict) and callable(holder.load_state_dict)
    except Exception:  # of its own __getattr__: dicts with attributes often raise KeyError
        return False


def is_iterated(holder: Any) -> bool:
    """Returns whether it is a loader, sampler or stream, as its `state_dict` may start the iteration."""
    return is_stateful(holder) and hasattr(type(holder), "__iter__") and not isinstance(holder, Mapping)


def _state_of(name: str, holder: Any) -> Any:
    if is_stateful(holder):
        try:
            return holder.state_dict()
        except Exception as error:  # of the script's own object
            raise NotCapturable(
                f"state[{name!r}] ({type(holder).__name__}) gives no state: {error!r}"
            ) from error
    if (drawn := generator_state(holder)) is not None:
        return drawn
    if not isinstance(holder, MutableMapping):  # it could be written, perhaps, but not put back
        raise NotCapturable(
            f"state[{name!r}] is a {type(holder).__name__}: give a dict, a generator, or an object with "
            "state_dict and load_state_dict"
        )
    return dict(holder)


def find_aliased(state: State, tensors: Sequence[torch.Tensor]) -> str:
    """Returns the name of the first dict that holds one of `tensors` itself, not a copy; empty: none."""
    found = {
        name: [*_tensors_in(dict(each))] for name, each in state.items() if isinstance(each, MutableMapping)
    }
    there = {memory(tensor) for tensor in tensors if tensor.numel()} if any(found.values()) else set()
    return next((name for name, each in found.items() if any(memory(tensor) in there for tensor in each)), "")


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if type(value) in PLAIN and value.layout is torch.strided and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif (
        isinstance(value, (list, tuple))
        and value
        and isinstance(value[0], (torch.Tensor, Mapping, list, tuple))
    ):
        for each in value:  # a list of numbers may have millions
            yield from _tensors_in(each)


def generator_state(holder: Any) -> Any:
    """Returns the position of a random generator as plain values and tensors; None: it is none."""
    if isinstance(holder, torch.Generator):
        return holder.get_state()
    if (bits := _bit_generator(holder)) is not None:
        # A RandomState keeps every second normal number beside its bit generator.
        whole = holder.get_state(legacy=False) if _is_legacy(holder) else bits.state
        return {"state": whole, "seeds": getattr(_seeds(bits), "state", None)}
    return holder.getstate() if isinstance(holder, random.Random) else None


def set_generator(holder: Any, drawn: Any) -> bool:
    """Restores what `generator_state` returned. Returns False if `holder` is no generator.

    Raises NotCapturable if this version of numpy cannot set what generators are spawned from."""
    if isinstance(holder, torch.Generator):
        holder.set_state(drawn)
    elif isinstance(holder, random.Random):
        version, words, gauss = drawn
        holder.setstate((version, tuple(words), gauss))
    elif (bits := _bit_generator(holder)) is not None:
        if (seeds := drawn["seeds"]) and getattr(_seeds(bits), "state", None) != seeds:
            _set_seeds(bits, seeds)
        if _is_legacy(holder):
            holder.set_state(drawn["state"])
        else:
            bits.state = drawn["state"]
    else:
        return False
    return True


def _bit_generator(holder: Any) -> Any:
    """Returns what a numpy `Generator` or `RandomState` draws from; None: it is neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(holder, numpy.random.Generator):
        return holder.bit_generator
    if isinstance(holder, numpy.random.RandomState):
        return holder._bit_generator
    return holder if isinstance(holder, numpy.random.BitGenerator) else None


def _is_legacy(holder: Any) -> bool:
    return isinstance(holder, sys.modules["numpy"].random.RandomState)


def _seeds(bits: Any) -> Any:
    """Returns the SeedSequence that spawned generators are seeded from; None: there is none."""
    return getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)  # the latter: numpy < 1.25


def _set_seeds(bits: Any, saved: Mapping[str, Any]) -> None:
    """Sets what generators are spawned from: as unpickling does, because no other way leads there."""
    try:
        bits.__setstate__((bits.state, sys.modules["numpy"].random.SeedSequence(**saved)))
    except (TypeError, ValueError) as error:  # numpy < 1.26
        raise NotCapturable(
            "a numpy generator has spawned others, which this version of numpy cannot put back: use numpy "
            "1.26 or newer"
        ) from error


def random_state() -> dict[str, Any]:
    """Returns the state of all generators that a training loop draws from by default."""
    version, words, gauss = random.getstate()
    # As tensors: torch.save calls into Python for every plain number, and this runs at every step. Not by
    # `torch.tensor`, which looks at each of the numbers.
    numbers = torch.frombuffer(array("q", words), dtype=torch.int64)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, numbers, gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
        # A rank may draw on other devices too; their states lie in host memory.
        if torch.cuda.device_count() > 1:
            state["cuda_all"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        drawn = numpy.random.get_state(legacy=False)
        if drawn["bit_generator"] == "MT19937":
            words = drawn["state"]["key"].tobytes()
            drawn["state"]["key"] = torch.frombuffer(bytearray(words), dtype=torch.int32)
        else:  # the script has set another one
            drawn = encoded(drawn, {}, lambda value, _: value)
        state["numpy"] = drawn
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "cuda" in state and torch.cuda.is_available():
        for device, drawn in enumerate(state.get("cuda_all", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(drawn, device)
        torch.cuda.set_rng_state(state["cuda"])  # last: the rank's own device may have another number now
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        drawn = decoded(state["numpy"])
        if isinstance(words := drawn["state"].get("key"), torch.Tensor):
            drawn = {**drawn, "state": {**drawn["state"], "key": words.numpy().view(numpy.uint32)}}
        try:
            numpy.random.set_state(drawn)
        except ValueError as error:
            raise KeyError(
                f"numpy drew from {drawn['bit_generator']}: set the same bit generator before `restore`"
            ) from error


_NO_STATE = {"_computed", "_forward_cache", "_cache", "training"}


def is_metric(module: nn.Module) -> bool:
    """Returns whether a module keeps its state as torchmetrics does: in attributes no state_dict shows."""
    named = (getattr(module, name, None) for name in ("_defaults", "_persistent"))
    return all(isinstance(each, dict) for each in named) and hasattr(module, "persistent")


def keys_of_metrics(model: nn.Module) -> set[str]:
    """Returns the state_dict keys that `MetricStates` keeps: a metric may show copies."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_metric(module)
        for name in module._defaults
    }


class MetricStates:
    """Saves all metrics in some modules, as an object of the script's state."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def found(self) -> dict[str, nn.Module]:
        """Returns each metric, by where it is."""
        named = ((name, *each) for name, module in self._modules.items() for each in module.named_modules())
        return {f"{name}.{path}": each for name, path, each in named if is_metric(each)}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns each metric's numbers, tensors, and lists of them: counts are not among its states."""
        return {
            path: {
                name: _with_tensors(value, torch.Tensor.detach)
                for name, value in vars(metric).items()
                if name in metric._defaults or (name not in _NO_STATE and _is_data(value))  # type: ignore[operator]
            }
            for path, metric in self.found().items()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Restores the metrics. Raises KeyError for one that only one side has."""
        found = self.found()
        if different := sorted(found.keys() ^ state.keys()):
            where = "the checkpoint" if different[0] in state else "the script"
            raise KeyError(f"metric {different[0]} is only in {where}")
        for path, metric in found.items():
            to_device = methodcaller("to", getattr(metric, "device", "cpu"))
            for name, value in {**state[path], "_computed": None}.items():
                setattr(metric, name, _with_tensors(value, to_device))


def _is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_data, value))
    return isinstance(value, torch.Tensor) or type(value) in (bool, int, float)


def _with_tensors(value: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy in which `of` has replaced each tensor."""
    if isinstance(value, deque):
        return deque((_with_tensors(each, of) for each in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(each, of) for each in value)
    return of(value) if isinstance(value, torch.Tensor) else value
