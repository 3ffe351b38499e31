"""What was imported beforehand stays out of sight until the script imports it itself.

So the script sees the `sys.modules` that it would have seen, and the moment of its first `import torch` is
known: a variable that it has set before, and that torch reads at import, is then noticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Curtain(MetaPathFinder, Loader):
    """`before`: names of modules that stay visible. `opening` is called once, just before the others are
    shown."""

    def __init__(self, before: frozenset[str], opening: Callable[[], None]) -> None:
        self._opening = opening
        seen = {name.partition(".")[0] for name in before} | sys.stdlib_module_names | {"__mp_main__"}
        self._hidden = {
            name: module for name, module in sys.modules.items() if name.partition(".")[0] not in seen
        }
        for name in self._hidden:
            del sys.modules[name]
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Of a hidden module: looking for it does not show it, only loading does."""
        if fullname not in self._hidden:
            return None
        true = self._hidden[fullname].__spec__
        spec = ModuleSpec(fullname, self, origin=true.origin if true else None)
        if true is not None:
            spec.submodule_search_locations = true.submodule_search_locations
            spec.has_location = true.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self in sys.meta_path:
            self._opening()
            sys.meta_path.remove(self)
            self._specs = {name: module.__spec__ for name, module in self._hidden.items()}
            sys.modules.update(self._hidden)
        return self._hidden[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It has been executed; the import system has only put its own spec on it."""
        name = module.__spec__.name if module.__spec__ else module.__name__
        module.__spec__ = self._specs[name]
