"""Imports put off until they are used: a good part of what a process does before it can serve.

torch imports its exporter. transformers and torchvision import torch's compiler, its sharded
tensors with sympy, accelerate with boto3, and models and data sets of torchvision, for annotations,
checks of types and functions that serving never calls. Called before torch and transformers are
imported by engines of one rank, media workers and what makes profiles. Stand-ins take those
modules' places; whoever asks one for anything that it does not have gets the real module, imported
then.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, new_class
from typing import Any

_COMPILER = "torch._dynamo"
_FLEX = "torch.nn.attention.flex_attention"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
_EXPORTER = "torch.export"
_SHAPES = "torch._meta_registrations"
_OF_PLAIN_SIZES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious",
         "statically_known_true"), lambda one: one
    ),
    "is_nested_int": lambda one: False,
    "sym_and": lambda *all_: functools.reduce(operator.and_, all_),
    "sym_eq": lambda one, other: one == other,
    "sym_or": lambda *all_: functools.reduce(operator.or_, all_),
}  # fmt: skip
"""What they compute of sizes that are no symbols. Each array without values asks them."""
_LATER = {
    _EXPORTER: (),
    f"{_COMPILER}.utils": ("is_compile_supported",),
    f"{_COMPILER}._trace_wrapped_higher_order_op": ("TransformGetItemToIndex",),
    _FLEX: ("AuxRequest", "BlockMask", "create_block_mask", "flex_attention"),
    _SYMBOLS: ("guarding_hint_or_throw", "has_guarding_hint", *_OF_PLAIN_SIZES),
    "torch.distributed._composable.fsdp": ("fully_shard",),
    "torch.distributed.checkpoint.hf_storage": (
        "HuggingFaceStorageReader",
        "HuggingFaceStorageWriter",
    ),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy"),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.placement_types": ("Shard", "_StridedShard"),
    "accelerate": ("PartialState", "dispatch_model"),
    "accelerate.hooks": ("AlignDevicesHook", "add_hook_to_module"),
    "accelerate.utils": (
        "extract_model_from_parallel",
        "get_balanced_memory",
        "get_max_memory",
        "infer_auto_device_map",
        "reduce",
    ),
    "accelerate.utils.modeling": ("clean_device_map", "get_max_layer_size"),
    "torchvision.datasets": (),
    "torchvision.models": (),
    "torchvision.ops": (),
    "torchvision.ops.boxes": ("box_iou",),
    "sympy": ("Basic",),
    "scipy.optimize": ("linear_sum_assignment",),
}
"""Module -> its names that are imported, but not used, by what a server imports."""
_PLACEMENTS = ("Partial", "Replicate", "Shard", "_StridedShard")
"""Classes that are called while something is imported, too."""
_CONSTANTS = {_FLEX: {"_DEFAULT_SPARSE_BLOCK_SIZE": 128}}

_replacing = threading.Lock()


class StandIn(ModuleType):
    """A module that is imported when it is asked for something that it does not have."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__: list[str] = []
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module by those who walk over all of them
            raise AttributeError(name)
        return getattr(real(self.__name__), name)


class _LateClass(type):
    """A class of a module that is not imported yet. Nothing is an instance of it until the module
    is there; called, or asked for anything, it is the real one."""

    def __new__(
        meta, name: str, bases: tuple[Any, ...], members: dict[str, Any], **options: Any
    ) -> Any:
        if not bases:
            return super().__new__(meta, name, bases, members)
        below = tuple(one.real() if type(one) is _LateClass else one for one in bases)
        return new_class(name, below, options, lambda body: body.update(members))

    def __instancecheck__(cls, instance: Any) -> bool:
        was_made_early = type(instance) is _LateInstance
        return isinstance(instance, cls.real() if was_made_early else cls.known())

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.known())

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        if cls.__name__ in _PLACEMENTS and not cls.known():
            return _LateInstance(lambda: cls.real()(*arguments, **options))
        return cls.real()(*arguments, **options)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cls.real(), name)

    def known(cls) -> Any:
        """The real class, or () where nobody has imported it."""
        module = sys.modules.get(cls.__module__)
        is_there = module is not None and not isinstance(module, StandIn)
        return getattr(module, cls.__name__, ()) if is_there else ()  # half imported: not yet

    def real(cls) -> Any:
        return getattr(real(cls.__module__), cls.__name__)


class _LateInstance:
    """What a late class makes: the real object, made when it is asked for anything."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made(), name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._made())

    def __eq__(self, other: object) -> bool:
        return bool(self._made() == other)

    def __hash__(self) -> int:
        return hash(self._made())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._made().__reduce_ex__(protocol)

    def _made(self) -> Any:
        found = self.__dict__.get("_real")
        if found is None:
            found = self.__dict__["_real"] = self._make()
        return found


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


def defer(needs_shapes: bool = True) -> None:
    """Puts the stand-ins where nothing of these modules is there yet.

    needs_shapes: whether tensors without values will be computed with. What torch knows of their
    shapes is registered when it is imported, and never asked for by name: without it a process
    starts 0.4 s of CPU time sooner and takes 17 MiB less.
    """
    if "torch" not in sys.modules:
        for name in (_EXPORTER, *([] if needs_shapes else [_SHAPES])):
            sys.modules[name] = StandIn(name)
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
        package, parent, child = module.partition(".")[0], *module.rpartition(".")[::2]
        if module in sys.modules or find_spec(package) is None:
            continue
        members = {name: _late(module, name) for name in wanted}
        stand_in = StandIn(module, **members, **_CONSTANTS.get(module, {}))
        sys.modules[module] = stand_in
        if parent in sys.modules:
            setattr(sys.modules[parent], child, stand_in)


def real(module: str) -> ModuleType:
    """The module itself; the parts of a package are there together or not at all."""
    roots = [one for one in (_COMPILER, *_LATER) if f"{module}.".startswith(f"{one}.")]
    root = min(roots, key=len, default=module)
    replaced = []
    with _replacing:  # else a second thread takes out what the first has just put there
        for name, found in list(sys.modules.items()):
            if isinstance(found, StandIn) and f"{name}.".startswith(f"{root}."):
                del sys.modules[name]
                replaced.append(found)
    module_found = importlib.import_module(module)
    for one in replaced:  # for those who hold on to it
        there = vars(sys.modules.get(one.__name__, one))
        vars(one).update({n: there[n] for n in _LATER.get(one.__name__, ()) if n in there})
    return module_found


def _is_plain(size: Any) -> bool:
    return type(size) in (bool, int) or (type(size) is tuple and all(map(_is_plain, size)))


def _late(module: str, name: str) -> Any:
    if name.lstrip("_")[0].isupper():
        return _LateClass(name, (), {"__module__": module})

    def call(*arguments: Any, **options: Any) -> Any:
        plain = _OF_PLAIN_SIZES.get(name) if module == _SYMBOLS else None
        if plain is not None and not options and all(map(_is_plain, arguments)):
            return plain(*arguments)
        return getattr(real(module), name)(*arguments, **options)

    return call
