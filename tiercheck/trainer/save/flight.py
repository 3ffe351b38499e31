"""Copies an artifact off a device, which is given all copies at once and in order.

Small tensors travel together, because each copy costs more than its bytes are worth. Whether values are
finite is found out on the device, at the speed of its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiercheck.trainer.save import staging
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark

SMALL = 64 * 1024
"""Bytes: smaller tensors are packed."""
_STAGE = 64 * 1024 * 1024
"""Bytes after which a mark tells that what came before may be let go."""


@dataclass
class _Stage:
    """What has landed once the device has passed `mark`. The tensors are kept, so that their memory is not
    given away."""

    mark: Mark
    names: list[str]
    sources: list[Tensor]


@dataclass
class Flight:
    """Copies of named tensors under way. `begin` and `land` are called by the saver's thread, in this
    order.
    """

    device: Accelerator
    _stages: list[_Stage] = field(default_factory=list)
    _packed: Tensor | None = None
    _small: list[tuple[str, Tensor]] = field(default_factory=list)
    """Name and target, in the order in which they are packed."""
    _checked: list[str] = field(default_factory=list)
    _finite: Tensor | None = None
    _judged: list[tuple[str, Tensor]] = field(default_factory=list)
    """Those that are looked at on the host when they have landed."""

    @torch.no_grad()
    def begin(
        self, items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor], finite: Collection[str] = ()
    ) -> None:
        """Give all copies to the device, after what it was given. `finite`: names whose values are looked at
        (`non_finite`)."""
        try:
            self._begin(items, views, finite)
        except BaseException:
            self.device.passed().synchronize()  # nothing may write into a slot that is given back
            raise

    def _begin(
        self, items: Iterable[tuple[str, Tensor]], views: Mapping[str, Tensor], finite: Collection[str]
    ) -> None:
        small: list[tuple[str, Tensor]] = []
        names: list[str] = []
        sources: list[Tensor] = []
        size = 0
        extremes: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in items:
            target, look = views[name], name in finite
            if not self.device.has(tensor):
                staging.copy_tensor(target, tensor)
                names.append(name)
            elif tensor.nbytes < SMALL and _is_plain(tensor):
                small.append((name, tensor))
            else:
                if look and _may_be_infinite(tensor):
                    low, high = torch.aminmax(tensor)
                    extremes.setdefault(tensor.dtype, []).extend(((name, low), (name, high)))
                    look = False
                self.device.fetch(target, tensor)
                names.append(name)
                sources.append(tensor)
                size += tensor.nbytes
            if look:
                self._judged.append((name, target))
            if size >= _STAGE:
                self._stages.append(_Stage(self.device.passed(), names, sources))
                names, sources, size = [], [], 0
        self._pack(small, views)
        self._fetch_extremes(extremes)
        names += (name for name, _ in small)
        sources += (tensor for _, tensor in small)
        self._stages.append(_Stage(self.device.passed(), names, sources))

    @torch.no_grad()
    def land(self, landed: Callable[[str], None] = lambda name: None) -> None:
        """Wait for all of them. `landed` is told each name as soon as its tensor may be let go. May be called
        again."""
        while self._stages:
            stage = self._stages.pop(0)
            stage.mark.synchronize()
            stage.sources.clear()
            for name in stage.names:
                landed(name)
        if self._packed is not None:
            at = 0
            for _, target in self._small:
                if target.nbytes:
                    target.view(-1).view(torch.uint8).copy_(self._packed[at : at + target.nbytes])
                at += target.nbytes
            self._packed = None

    def non_finite(self, names: Collection[str]) -> str | None:
        """The first of these names, all of which were to be looked at, with an infinity or a NaN. After
        `land`."""
        if self._finite is not None:
            for name, good in zip(self._checked, self._finite.tolist(), strict=True):
                if not good and name in names:
                    return name
        return staging.non_finite([(name, target) for name, target in self._judged if name in names])

    def _pack(self, small: list[tuple[str, Tensor]], views: Mapping[str, Tensor]) -> None:
        if not small:
            return
        together = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in small])
        self._packed = self.device.room(together.numel())
        self._small = [(name, views[name]) for name, _ in small]
        self.device.fetch(self._packed, together)

    def _fetch_extremes(self, found: Mapping[torch.dtype, list[tuple[str, Tensor]]]) -> None:
        if not found:
            return
        finite = torch.cat([torch.stack([value for _, value in each]).isfinite() for each in found.values()])
        self._checked = [name for each in found.values() for name, _ in each]
        self._finite = self.device.room(finite.numel()).view(torch.bool)
        self.device.fetch(self._finite, finite)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes, in their order, are what has to be stored."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _may_be_infinite(tensor: Tensor) -> bool:
    """Whether the device can tell (as `non_finite`)."""
    return tensor.is_floating_point() and tensor.element_size() >= 2
