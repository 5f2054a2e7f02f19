"""Runs vision and audio encoders on serialised items and keeps their outputs by content hash.

Called by the runner at the start of a step. What is encoded, kept, moved to the host tier or
dropped is decided by the engine's plan; nothing here evicts by itself. An item whose encoder fails
is noted with a reason: it fails the requests that need it, not the step.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foveal_runtime.engine.types.step import EncoderInput, StepPlan
from foveal_runtime.model.adapters import EncoderSpec
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.device import Device
from foveal_runtime.model.family_code import CUSTOM_ENCODERS
from foveal_runtime.model.runner.traits import read_traits
from foveal_runtime.plan.media import MODALITIES, MMHash
from foveal_runtime.wire.item import EMBEDS, BadItem, Item, view_item

ITEM_ERRORS = (ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AssertionError)
"""What a model's own code raises for fields that do not fit."""


def field_tensor(items: Sequence[Item], name: str) -> torch.Tensor:
    """One field of all items, concatenated along dimension 0, in memory of its own."""
    arrays = [item.fields[name].numpy() for item in items]
    tensor = torch.from_numpy(np.concatenate(arrays))
    return tensor.view(torch.bfloat16) if items[0].fields[name].dtype == "bfloat16" else tensor


class EncoderStore:
    """Encoder outputs (levels, n, E) by hash, on the device and in the host tier.

    Level 0 goes into the prompt, further levels are deepstack features.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._outputs: dict[MMHash, torch.Tensor] = {}
        self._host: dict[MMHash, torch.Tensor] = {}
        self._failures: dict[MMHash, str] = {}

    def obey(self, plan: StepPlan) -> None:
        """The plan's moves. Stores precede frees: an output may leave the device for the host."""
        for mm_hash in plan.store_encoder:
            output = self._outputs.get(mm_hash)
            if output is not None:
                self._host[mm_hash] = self._device.keep(output)
        for mm_hash in plan.free_encoder:
            self._outputs.pop(mm_hash, None)
            self._failures.pop(mm_hash, None)
        for mm_hash in plan.load_encoder:
            output = self._host.get(mm_hash)
            if output is None:
                self.fail(mm_hash, "its encoder output is not in the host tier")
            else:
                self.put(mm_hash, self._device.send(output))
        for mm_hash in plan.drop_host_encoder:
            self._host.pop(mm_hash, None)

    def put(self, mm_hash: MMHash, output: torch.Tensor) -> None:
        self._outputs[mm_hash] = output
        self._failures.pop(mm_hash, None)

    def fail(self, mm_hash: MMHash, reason: str) -> None:
        """Notes why an output is not there, until the hash is freed or encoded again."""
        self._outputs.pop(mm_hash, None)
        self._failures[mm_hash] = reason

    def lookup(self, mm_hash: MMHash) -> torch.Tensor | None:
        return self._outputs.get(mm_hash)

    def failures_of(self, mm_hashes: Iterable[MMHash]) -> dict[MMHash, str]:
        """Why those of the given outputs that are not here are missing."""
        return {h: self.lookup_failure(h) for h in mm_hashes if h not in self._outputs}

    def lookup_failure(self, mm_hash: MMHash) -> str:
        return self._failures.get(mm_hash, "its encoder output is not on the device")

    def save(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        """Writes those outputs that are here to a safetensors file. Raises OSError."""
        self._device.settle()  # a copy to the host tier may be on its way
        found = {key: self._outputs.get(key, self._host.get(key)) for key in mm_hashes}
        tensors = {
            key.hex(): output.contiguous().cpu()
            for key, output in found.items()
            if output is not None
        }
        try:
            save_file(tensors, path)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        return [bytes.fromhex(name) for name in tensors]

    def load(
        self,
        path: str,
        device: Mapping[MMHash, int],
        host: Mapping[MMHash, int],
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> list[MMHash]:
        """See `ModelRunner.load_encoder`; `shape` is (levels, E) of every output."""
        taken = []
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = set(file.keys())
                for tier, wanted in (("device", device), ("host", host)):
                    for mm_hash, num_embeds in wanted.items():
                        if mm_hash.hex() not in names:
                            continue
                        # A copy of its own: what the file's mapping lends goes with the file.
                        output = file.get_tensor(mm_hash.hex()).clone()
                        if output.shape != (shape[0], num_embeds, shape[1]):
                            continue
                        if output.dtype != dtype:
                            continue
                        if tier == "device":
                            self.put(mm_hash, self._device.send(output, is_own=True))
                        else:
                            self._host[mm_hash] = output
                        taken.append(mm_hash)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
        return taken

    def check_integrity(self) -> None:
        assert not self._outputs.keys() & self._failures.keys()
        for output in (*self._outputs.values(), *self._host.values()):
            assert output.dim() == 3
            assert output.untyped_storage().nbytes() == output.nbytes


class InterruptionFailed(Exception):
    """What was done in the middle of encoding failed; no item is to blame."""


class _Pause:
    """Calls `between` when so many seconds have gone by since it returned last.

    Attributes:
        spent: seconds in `between`.
    """

    def __init__(self, seconds: float, between: Callable[[], None]) -> None:
        self._seconds = seconds
        self._between = between
        self._since = time.perf_counter()
        self.spent = 0.0

    def __call__(self) -> None:
        if time.perf_counter() - self._since >= self._seconds:
            self.now()

    def now(self) -> None:
        """Whatever has gone by."""
        began = time.perf_counter()
        try:
            self._between()
        except Exception as error:
            raise InterruptionFailed(f"{type(error).__name__}: {error}") from error
        self._since = time.perf_counter()
        self.spent += self._since - began


class EncoderRunner:
    """Turns EncoderInputs into outputs in an EncoderStore, in batches of equal shape."""

    def __init__(self, loaded: LoadedModel, store: EncoderStore, device: Device) -> None:
        self._core: Any = loaded.core
        self._adapter = loaded.adapter
        self._dtype = loaded.dtype
        traits = read_traits(loaded)
        self._levels, self._width = traits.embed_levels, traits.embed_width
        self._device = device
        self._store = store
        self._pause: _Pause | None = None
        decoder = set(loaded.decoder.modules())
        for module in loaded.core.modules():
            if isinstance(module, torch.nn.ModuleList) and module not in decoder:
                for layer in module:
                    layer.register_forward_pre_hook(self._at_layer)

    def _at_layer(self, *_: object) -> None:
        """Before each layer of a tower."""
        if self._pause is not None:
            self._pause()

    def encode(
        self,
        inputs: Sequence[EncoderInput],
        slice_seconds: float = 0.0,
        between: Callable[[], None] | None = None,
    ) -> float:
        """Encodes all inputs; failures are noted in the store. `between` is called between two
        layers or inputs, whenever `slice_seconds` have gone by, and once after all: the rest of the
        step takes time of its own. Returns the seconds spent there."""
        if between is None or not slice_seconds:
            self._encode(inputs)
            return 0.0
        self._pause = pause = _Pause(slice_seconds, between)
        try:
            self._encode(inputs)
            pause.now()
        finally:
            self._pause = None
        return pause.spent

    def _encode(self, inputs: Sequence[EncoderInput]) -> None:
        batches: dict[Any, list[tuple[EncoderInput, Item]]] = defaultdict(list)
        for number, one in enumerate(inputs):
            spec = self._adapter.encoders.get(MODALITIES[one.modality])
            if spec is None:
                self._store.fail(
                    one.mm_hash, f"the model takes no {MODALITIES[one.modality]} input"
                )
                continue
            try:
                item = view_item(one.value)
                if EMBEDS in item.fields:
                    self._store.put(one.mm_hash, self._given(item, one.num_embeds))
                    continue
                key = batch_key(spec, item, one.modality)
                if spec.grid:
                    check_grid(item, spec, one.num_embeds, self._core.config)
            except BadItem as error:
                self._store.fail(one.mm_hash, str(error))
                continue
            batches[key if spec.batched else (number,)].append((one, item))
        for batch in batches.values():
            self._at_layer()
            self._run(batch)

    def _run(self, batch: list[tuple[EncoderInput, Item]]) -> None:
        """One batch; when it fails and has several items, each alone, to find the bad one."""
        modality = MODALITIES[batch[0][0].modality]
        spec = self._adapter.encoders[modality]
        promised = [one.num_embeds for one, _ in batch]
        try:
            outputs = self._forward(spec, [item for _, item in batch], promised)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except ITEM_ERRORS as error:
            if len(batch) == 1:
                reason = f"{modality} encoder: {' '.join(str(error).split())[:200]}"
                self._store.fail(batch[0][0].mm_hash, reason)
            else:
                for pair in batch:
                    self._run([pair])
            return
        for (one, _), output in zip(batch, outputs, strict=True):
            self._store.put(one.mm_hash, output)

    def _forward(
        self, spec: EncoderSpec, items: list[Item], promised: list[int]
    ) -> list[torch.Tensor]:
        """Outputs (levels, n, E) of the items. Raises ValueError when a count is not promised."""
        names = [n for n in (*spec.fields, *spec.optional) if n in items[0].fields]
        dtype = torch.float32 if spec.is_wide else self._dtype
        kwargs = {name: self._load(items, name, dtype) for name in names}
        if spec.method in CUSTOM_ENCODERS:
            found = CUSTOM_ENCODERS[spec.method](self._core, **kwargs)
            levels = list(found) if self._adapter.deepstack else [found]
        else:
            result = getattr(self._core, spec.method)(**kwargs, return_dict=True)
            levels = [result.pooler_output]
            if self._adapter.deepstack:
                levels += list(getattr(result, "deepstack_features", ()))
        split = [split_rows(level, promised) for level in levels]
        if missing := self._levels - len(split):  # of sounds: nothing is added to later layers
            split += [[torch.zeros_like(rows) for rows in split[0]]] * missing
        stacked = (torch.stack([level[i] for level in split]) for i in range(len(items)))
        return [one.to(self._dtype) for one in stacked]

    def _given(self, item: Item, num_embeds: int) -> torch.Tensor:
        """Outputs (levels, n, E) that came with the item. Raises BadItem."""
        shape = (1, num_embeds, self._levels * self._width)
        given = item.fields[EMBEDS]
        if given.shape != shape or given.dtype not in ("float32", "float16", "bfloat16"):
            raise BadItem(f"{EMBEDS} is {given.dtype} {given.shape}; {shape} are needed")
        rows = self._load([item], EMBEDS, self._dtype)[0]
        return rows.view(num_embeds, self._levels, self._width).transpose(0, 1).contiguous()

    def _load(self, items: list[Item], name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor = field_tensor(items, name)
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return self._device.send(tensor, is_own=True).to(kind)


def batch_key(spec: EncoderSpec, item: Item, modality: int) -> tuple[object, ...]:
    """Items with equal keys can be concatenated. Raises BadItem when a field is missing."""
    missing = [name for name in spec.fields if name not in item.fields]
    if missing:
        raise BadItem(f"item lacks the field {missing[0]}")
    shapes = []
    for name in (*spec.fields, *spec.optional):
        info = item.fields.get(name)
        if info is not None:
            shape = info.shape[1:] if name in spec.ragged else info.shape
            shapes.append((name, info.dtype, tuple(shape)))
    return modality, *shapes


def check_grid(item: Item, spec: EncoderSpec, num_embeds: int, config: Any) -> None:
    """Raises BadItem unless the grid makes `num_embeds` embeddings.

    Encoders and position functions allocate by the grid before they look at anything else.
    """
    field, merge = item.fields.get(spec.grid), _merge_side(item, spec, config)
    is_crops = spec.layout == "crops"
    needed = (field.shape[0] if field and field.shape else 1, 2) if is_crops else (1, 3)
    if field is None or field.shape != needed:
        shape = "missing" if field is None else f"of the shape {list(field.shape)}"
        raise BadItem(f"{spec.grid} is {shape}; {list(needed)} is needed")
    rows = field.numpy().tolist()
    sizes_fit = all(size > 0 for row in rows for size in row) and merge > 0
    sides_fit = sizes_fit and all(side % merge == 0 for row in rows for side in row[-2:])
    if not sides_fit or sum(_count(row, merge, spec.layout) for row in rows) != num_embeds:
        grid = rows if is_crops else rows[0]
        raise BadItem(f"{spec.grid} {grid} does not make {num_embeds} embeddings")


def _count(grid: Sequence[int], merge: int, layout: str) -> int:
    """Embeddings of one grid."""
    height, width = (side // merge for side in grid[-2:])
    if layout == "lines":
        return height * (width + 1) + 2
    return math.prod(grid[:-2]) * height * width


def _merge_side(item: Item, spec: EncoderSpec, config: Any) -> int:
    """Raises BadItem where the item's own is no number of patches."""
    if spec.merge in item.fields:
        given = item.fields[spec.merge]
        if math.prod(given.shape) != 1 or given.dtype not in ("int32", "int64"):
            raise BadItem(f"{spec.merge} is {given.dtype} {list(given.shape)}; int64 [1] is needed")
        return int(given.numpy().item())
    if spec.layout == "crops":
        ratio = getattr(config, "downsample_ratio", None)
        return round(1 / ratio) if ratio else math.isqrt(int(config.downsample_mode.rstrip("x")))
    side = getattr(config.vision_config, spec.merge)
    return int(side[0] if isinstance(side, (list, tuple)) else side)


def split_rows(output: Any, promised: list[int]) -> list[torch.Tensor]:
    """An encoder's output as one (n_i, E) per item, whatever shape the family returns.

    Families return a list or tuple with one tensor an item, or one tensor whose rows are all items'
    in order. Raises ValueError when an item has not the promised number of rows.
    """
    if isinstance(output, (list, tuple)) and len(output) == len(promised):
        rows = [part.reshape(-1, part.shape[-1]) for part in output]
    else:
        flat = torch.cat([p.reshape(-1, p.shape[-1]) for p in output])  # a tensor iterates, too
        if flat.shape[0] != sum(promised):
            raise ValueError(f"returned {flat.shape[0]} embeddings, {sum(promised)} expected")
        rows = list(flat.split(promised))
    for part, count in zip(rows, promised, strict=True):
        if part.shape[0] != count:
            raise ValueError(f"returned {part.shape[0]} embeddings, {count} expected")
    return rows
