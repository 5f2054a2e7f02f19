"""LoRA adapters: read from PEFT's files, and added to the decoder's linear layers row by row.

Made by the runner. An adapter gives some linear layers a term: out += rows @ A.T @ B.T * scale. A
step may hold rows of several adapters and of none: each layer computes all rows as before, then
adds each adapter's term to its own rows. The weights themselves stay as they are. What an adapter
would change besides is refused as it is loaded, in one line and before its tensors are read.

While rows of an adapter are computed, so are all others of the step by modules: the C kernel of
small steps, recorded steps and the short last layer know nothing of adapters.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError
from torch import nn

from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.checkpoint.weights import StoredTensor, check_complete, file_header
from foveal_runtime.model.cpu.packing import ACTIVATIONS, IDENTITY, Activation, PackedLinear
from foveal_runtime.plan.lora import (
    LORA_WEIGHTS,
    TERM_BYTES,
    LoraRef,
    LoraSource,
    adapter_refusal,
    read_adapter_config,
)
from foveal_runtime.plan.quantity import short_bytes

_ROOTS = ("model.language_model.", "language_model.model.", "language_model.", "model.",
          "thinker.model.language_model.", "thinker.model.")  # fmt: skip
"""What stands before a decoder layer's name in adapters, by the class they were trained with; the
name in the class that is served comes first."""
_FLOATS = {"F32", "F16", "BF16"}
_call = threading.local()


class _Pair(NamedTuple):
    """down (r, in) and up (out, r), which has the scale in it."""

    down: torch.Tensor
    up: torch.Tensor


class Lora:
    """A loaded adapter: `pairs` by the name of the layer below the decoder."""

    def __init__(self, ref: LoraRef, pairs: dict[str, _Pair]) -> None:
        self.ref = ref
        self.pairs = pairs
        self.num_bytes = sum(one.nbytes for pair in pairs.values() for one in pair)


class LoraRows(NamedTuple):
    """Rows of a step, i64 (n) on the device, that an adapter is for."""

    lora: Lora
    index: torch.Tensor


@contextmanager
def lora_rows(rows: Sequence[LoraRows], num_rows: int) -> Iterator[None]:
    """Linear layers of the decoder called within add the adapters' terms to these rows of all."""
    _call.rows, _call.num_rows = rows, num_rows
    try:
        yield
    finally:
        _call.rows = ()


class _LoraLinear:
    """Stands where a linear layer's forward stood."""

    def __init__(self, module: Any, name: str) -> None:
        self._forward = module.forward
        self._name = name

    def __call__(
        self,
        rows: torch.Tensor,
        activation: Activation = IDENTITY,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = getattr(_call, "rows", ())
        mine = [(one.lora.pairs[self._name], one.index) for one in found
                if self._name in one.lora.pairs]  # fmt: skip
        out: torch.Tensor
        if not mine:
            is_plain = activation == IDENTITY and times is None
            out = self._forward(rows) if is_plain else self._forward(rows, activation, times)
            return out
        out = self._forward(rows)
        flat, terms = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, out.shape[-1])
        assert len(flat) == _call.num_rows, "the layer is computed for other rows"
        for pair, index in mine:
            (rank, ins), outs = pair.down.shape, len(pair.up)
            most = TERM_BYTES // ((ins + rank + outs) * pair.down.itemsize)
            for part in index.split(max(1, most)):
                term = flat[part].to(pair.down.dtype) @ pair.down.t() @ pair.up.t()
                terms.index_add_(0, part, term.to(terms.dtype))
        out = ACTIVATIONS[activation](terms.reshape(out.shape))
        return out if times is None else out * times


class Loras:
    """The adapters of one runner.

    Args:
        capacity_bytes: what all of them may take, those that were unloaded and still run included.
    """

    def __init__(self, loaded: LoadedModel, capacity_bytes: int) -> None:
        self._loaded = loaded
        self._capacity_bytes = capacity_bytes
        self._by_name: dict[str, Lora] = {}
        self._alive: weakref.WeakSet[Lora] = weakref.WeakSet()
        self._wrapped: set[str] = set()
        self._linears: dict[str, Any] = {
            name: module
            for name, module in loaded.decoder.named_modules()
            if name.startswith("layers.") and _is_linear(module) and ".experts." not in name
        }
        names = (name for name, one in loaded.model.named_modules() if one is loaded.decoder)
        self._roots = (*(f"{name}." for name in names), *_ROOTS)

    @property
    def refs(self) -> tuple[LoraRef, ...]:
        return tuple(one.ref for one in self._by_name.values())

    @property
    def num_bytes(self) -> int:
        """On the device, now."""
        return sum(one.num_bytes for one in self._alive)

    def find(self, digest: bytes) -> Lora | None:
        """Also one that was unloaded while a request holds it."""
        return next((one for one in self._alive if one.ref.digest == digest), None)

    def hold(self, ref: LoraRef) -> Lora | None:
        """See `engine.types.step.LoraTable`."""
        return next((one for one in self._by_name.values() if one.ref == ref), None)

    def load(self, source: LoraSource) -> None:
        """Nothing happens where this very adapter is loaded. Raises StartupError, in one line."""
        if self._loaded.adapter.has_state:
            raise adapter_refusal(source, "models with recurrent state are served without adapters")
        config = read_adapter_config(source)
        there = self._by_name.get(source.name)
        if there is not None:
            if there.ref.digest == self._digest(config, _read_weights(source)):
                return
            raise adapter_refusal(source, "another adapter of this name is loaded; unload it first")
        layers = self._layers_of(source, config)
        dtype = self._loaded.dtype
        needed = (
            sum(sum(dim * config["r"] for dim in _dims(self._linears[name])) for name in layers)
            * dtype.itemsize
        )
        if self.num_bytes + needed > self._capacity_bytes:
            raise adapter_refusal(
                source,
                f"it takes {short_bytes(needed)}, and {short_bytes(self.num_bytes)} of the "
                f"{short_bytes(self._capacity_bytes)} for adapters (--lora-memory, "
                "engine.lora.memory) are in use",
            )
        self._add(source, config, layers)

    def unload(self, name: str) -> bool:
        """Nobody gets it any more; who runs with it keeps it. False: there is none."""
        return self._by_name.pop(name, None) is not None

    def _digest(self, config: dict[str, Any], data: bytes) -> bytes:
        stated = json.dumps([config["r"], _scale(config), self._loaded.dtype.itemsize]).encode()
        return blake3(blake3(stated).digest() + data).digest(length=16)

    def _layers_of(self, source: LoraSource, config: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Layer below the decoder → the names of its A and B. Raises StartupError."""
        file = Path(source.path) / LORA_WEIGHTS
        check_complete([file])
        found: dict[str, dict[str, str]] = {}
        for key, tensor in file_header(file).items():
            path, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
            if kind not in ("A.weight", "B.weight"):
                raise adapter_refusal(
                    source, f"{key}: only lora_A and lora_B of linear layers are served"
                )
            name = self._layer_named(path)
            if name is None:
                raise adapter_refusal(
                    source, f"it targets {path}, which is no linear layer of the decoder (towers, "
                    "projectors, embeddings, heads and experts are served without adapters)"
                )  # fmt: skip
            self._check_shape(source, key, tensor, config["r"], self._linears[name], kind[0])
            found.setdefault(name, {})[kind[0]] = key
        for name, pair in found.items():
            if len(pair) != 2:
                raise adapter_refusal(
                    source, f"{name} has no lora_{'B' if 'A' in pair else 'A'}.weight"
                )
        if not found:
            raise adapter_refusal(source, f"{LORA_WEIGHTS} is empty")
        return {name: (pair["A"], pair["B"]) for name, pair in found.items()}

    def _layer_named(self, path: str) -> str | None:
        for root in self._roots:
            name = path.removeprefix(root)
            if name != path and name in self._linears:
                return name
        return None

    @staticmethod
    def _check_shape(
        source: LoraSource, key: str, tensor: StoredTensor, rank: int, linear: Any, kind: str
    ) -> None:
        ins, outs = _dims(linear)
        wanted = (rank, ins) if kind == "A" else (outs, rank)
        if tensor.shape != wanted or tensor.dtype not in _FLOATS:
            raise adapter_refusal(
                source, f"{key} is {tensor.dtype} {list(tensor.shape)}; this model takes "
                f"floating-point {list(wanted)}"
            )  # fmt: skip

    def _add(
        self, source: LoraSource, config: dict[str, Any], layers: dict[str, tuple[str, str]]
    ) -> None:
        data = _read_weights(source)
        try:
            tensors = safetensors.torch.load(data)
        except SafetensorError as error:
            raise adapter_refusal(source, f"{LORA_WEIGHTS}: {error}") from error
        if not all(key in tensors for pair in layers.values() for key in pair):
            raise adapter_refusal(source, f"{LORA_WEIGHTS} changed while it was read")
        scale = _scale(config)
        decoder: Any = self._loaded.decoder
        device, dtype = decoder.device, self._loaded.dtype
        pairs = {
            name: _Pair(
                tensors[down].to(device, dtype), (tensors[up].float() * scale).to(device, dtype)
            )
            for name, (down, up) in layers.items()
        }
        lora = Lora(LoraRef(source.name, self._digest(config, data)), pairs)
        for name in pairs.keys() - self._wrapped:
            module = self._linears[name]
            module.forward = _LoraLinear(module, name)
            self._wrapped.add(name)
        self._alive.add(lora)
        self._by_name[source.name] = lora


def _is_linear(module: nn.Module) -> bool:
    """Whether it gives one tensor, as nn.Linear does; routers that inherit from it give several."""
    kind = type(module)
    return (
        isinstance(module, PackedLinear | QuantizedLinear)
        or (isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward)
        or kind.__name__ == "FalconLinear"
    )


def _dims(linear: Any) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _scale(config: dict[str, Any]) -> float:
    scale: float = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1.0)
    return scale


def _read_weights(source: LoraSource) -> bytes:
    """Raises StartupError."""
    try:
        return (Path(source.path) / LORA_WEIGHTS).read_bytes()
    except OSError as error:
        raise adapter_refusal(source, f"{source.path}/{LORA_WEIGHTS}: {error.strerror}") from error
