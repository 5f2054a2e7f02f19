"""Imports put off until they are used: a quarter of what a process does before it can serve.

transformers and torchvision import torch's compiler and scipy's optimisers for decorators and
functions that serving never calls. Called by engines and media workers before they import
transformers. Stand-ins take those modules' places; whoever asks one for anything that it does not
have gets the real module, imported then.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_PACKAGES = (_COMPILER, "scipy.optimize")
_LATER = {
    f"{_COMPILER}.utils": ("is_compile_supported",),
    f"{_COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "scipy.optimize": ("linear_sum_assignment",),
}
"""Module -> its names that are imported, but not called, by what a server imports."""

_replacing = threading.Lock()


class StandIn(ModuleType):
    """A module that is imported when it is asked for something that it does not have."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=name in _PACKAGES)
        if name in _PACKAGES:
            self.__path__: list[str] = []
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by those who walk over all of them
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


class _Below(MetaPathFinder, Loader):
    """Modules below a stand-in: the real ones, once the real module has taken its place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = name.rpartition(".")[0]
        if not isinstance(sys.modules.get(parent), StandIn):
            return None
        real(parent)
        module = importlib.import_module(name)
        # Of a module that has come meanwhile the import system takes its own spec, and would
        # execute it once more.
        spec = ModuleSpec(name, self, loader_state=module.__spec__)
        vars(module)["__spec__"] = spec  # a module of settings lets nobody assign it
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        vars(module)["__spec__"] = module.__spec__.loader_state


_below = _Below()


def defer() -> None:
    """Puts the stand-ins where nothing of these modules is there yet."""
    importlib.import_module("torch")  # its compiler is a part of it, and not imported with it

    def marked(function: Any = None, *arguments: Any, **options: Any) -> Any:
        """A decorator for functions that are compiled: nothing is."""
        del arguments, options
        return function if function is not None else lambda one: one

    if _below not in sys.meta_path:
        sys.meta_path.insert(0, _below)
    if _COMPILER not in sys.modules:
        names = ("allow_in_graph", "assume_constant_result", "disable")
        sys.modules[_COMPILER] = StandIn(_COMPILER, **dict.fromkeys(names, marked))
    for module, wanted in _LATER.items():
        package = module.partition(".")[0]
        if module not in sys.modules and find_spec(package) is not None:
            sys.modules[module] = StandIn(module, **{name: _late(module, name) for name in wanted})


def real(module: str) -> ModuleType:
    """The module itself; the compiler's parts are there together or not at all."""
    parts = [module]
    if module.startswith(_COMPILER):
        parts = [name for name in (_COMPILER, *_LATER) if name.startswith(_COMPILER)]
    with _replacing:  # else a second thread takes out what the first has just put there
        for name in parts:
            if isinstance(sys.modules.get(name), StandIn):
                del sys.modules[name]
    return importlib.import_module(module)


def _late(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(real(module), name)(*arguments, **options)

    return call
