"""Imports put off until they are used: a quarter of what a process does before it can serve.

transformers and torchvision import torch's compiler and scipy's optimisers for decorators and
functions that serving never calls. Called by engines and media workers before they import
transformers. Stand-ins take those modules' places; whoever asks one for anything that it does not
have gets the real module, imported then.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LATER = {
    f"{_COMPILER}.utils": ("is_compile_supported",),
    f"{_COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    "scipy.optimize": ("linear_sum_assignment",),
}
"""Module -> its names that are imported, but not called, by what a server imports."""


class StandIn(ModuleType):
    """A module that is imported when it is asked for something that it does not have."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=name == _COMPILER)
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by those who walk over all of them
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


def defer() -> None:
    """Puts the stand-ins where nothing of these modules is there yet."""
    importlib.import_module("torch")  # its compiler is a part of it, and not imported with it

    def marked(function: Any = None, *arguments: Any, **options: Any) -> Any:
        """A decorator for functions that are compiled: nothing is."""
        del arguments, options
        return function if function is not None else lambda one: one

    if _COMPILER not in sys.modules:
        names = ("allow_in_graph", "assume_constant_result", "disable")
        sys.modules[_COMPILER] = StandIn(_COMPILER, __path__=[], **dict.fromkeys(names, marked))
    for module, wanted in _LATER.items():
        package = module.partition(".")[0]
        if module not in sys.modules and find_spec(package) is not None:
            sys.modules[module] = StandIn(module, **{name: _late(module, name) for name in wanted})


def real(module: str) -> ModuleType:
    """The module itself; the compiler's parts are there together or not at all."""
    parts = [module]
    if module.startswith(_COMPILER):
        parts = [name for name in (_COMPILER, *_LATER) if name.startswith(_COMPILER)]
    for name in parts:
        if isinstance(sys.modules.get(name), StandIn):
            del sys.modules[name]
    return importlib.import_module(module)


def _late(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(real(module), name)(*arguments, **options)

    return call
