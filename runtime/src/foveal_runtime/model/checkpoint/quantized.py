"""The quantisation schemes of checkpoints: which can be run, how each layer is stored, and the
refusal of the others.

Called by the loader right after config.json is read and before any weight is, so the profile, the
plan that needs one and the engine give the same answer. Without this check transformers widens some
formats silently (an FP8 model takes twice the bytes that its files have) and fails in others with
an ImportError in the middle of loading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from foveal_runtime.model.checkpoint.weights import StoredTensor, stored_dtypes, stored_tensors
from foveal_runtime.plan.errors import StartupError

if TYPE_CHECKING:
    from torch import nn

_SIDE_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq"}
"""Files beside config.json that say the same for producers that do not write into it."""
_PACKED_DTYPES = ("F8_", "F4", "F6_")
"""Prefixes of the tensor types that only quantised weights have."""
_ALLOWED: Mapping[str, Mapping[str, set[Any]]] = {
    "fp8": {"fmt": {"e4m3", "float8_e4m3fn"}},
    "awq": {"version": {"gemm"}, "bits": {4}, "zero_point": {True}},
    "gptq": {"checkpoint_format": {"gptq", "gptq_v2"}, "bits": {4, 8}},
    "mxfp4": {},
    "compressed-tensors": {"format": {
        "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
    }},
}  # fmt: skip
"""Method → key of its scheme → the values that are known; a key that is not there is fine."""
_FLOATS = {"F32", "F16", "BF16"}


class StoredAs(NamedTuple):
    """How one layer's weight (outputs N, inputs K) is stored.

    Attributes:
        kind: one of CODES.
        bits: of one code in packed kinds.
        scale: name of the buffer with the scales.
        rows, columns: outputs and inputs that share a scale.
        zero_offset: what is added to stored zero points (GPTQ stores them minus 1).
        is_reordered: the scheme says that inputs are grouped in an order of their own.
    """

    kind: str
    bits: int = 8
    scale: str = "weight_scale"
    rows: int = 1
    columns: int = 1
    zero_offset: int = 0
    is_reordered: bool = False


class UnsupportedQuantization(StartupError):
    """The checkpoint's weights are quantised in a format that cannot be run."""

    code = "unsupported_quantization"


def check_quantization(path: str, config: Any) -> dict[str, Any] | None:
    """The scheme of a quantised checkpoint that can be run; None for plain weights.

    Raises UnsupportedQuantization for others, in one line that names the format. Tensor types in
    the headers of the weight files count as well: quantised ones that config.json is silent about
    would be widened as they are loaded.
    """
    declared = check_declared(path, config)
    has_files = any(Path(path).glob("*.safetensors"))
    if declared and not has_files:
        raise UnsupportedQuantization(
            f"model {path}: weights are quantised ({describe(declared[0])}), and which of them is "
            "read from their files: put the *.safetensors there"
        )
    if declared or not has_files:
        return declared[0] if declared else None
    found = sorted(dtype for dtype in stored_dtypes(path) if dtype.startswith(_PACKED_DTYPES))
    if found:
        raise refusal(path, f"{', '.join(found)} tensors that config.json does not explain")
    return None


def check_declared(path: str, config: Any, shown: str = "") -> list[dict[str, Any]]:
    """The schemes that config.json declares, which are known before there are weight files.
    Raises UnsupportedQuantization; `shown` names the model there instead of `path`."""
    declared = list(_schemes(path, config))
    for scheme in declared:
        if method_of(scheme) not in LOADERS:
            raise refusal(shown or path, describe(scheme))
        if reason := _unsupported(scheme):
            raise refusal(shown or path, f"{describe(scheme)}, {reason}")
    return declared


def refusal(path: str, what: str) -> UnsupportedQuantization:
    known = ", ".join(sorted(LOADERS))
    return UnsupportedQuantization(
        f"model {path}: weights are quantised ({what}), which is not supported; supported are "
        f"{known} and the checkpoint with float32, bfloat16 or float16 weights"
    )


def _schemes(path: str, config: Any) -> Iterator[dict[str, Any]]:
    """Every scheme that the checkpoint declares: of the model, of its parts, in files beside."""
    subs = getattr(config, "sub_configs", ())
    names = subs if isinstance(subs, dict | tuple) else ()
    parts = [config, *(getattr(config, name, None) for name in names)]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            scheme = getattr(part, key, None)
            if scheme:
                yield scheme if isinstance(scheme, dict) else getattr(scheme, "to_dict", dict)()
    for name, method in _SIDE_FILES.items():
        file = Path(path) / name
        if not file.is_file():
            continue
        try:
            found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            found = {}
        nested = found.get("quantization")
        yield {"quant_method": method, **(nested if isinstance(nested, dict) else found)}


def method_of(scheme: Mapping[str, Any]) -> str:
    """The scheme's quant_method, under the name that the field uses."""
    method = scheme.get("quant_method")
    if method is None:
        flags = ("load_in_4bit", "load_in_8bit")
        method = "bitsandbytes" if any(scheme.get(flag) for flag in flags) else "unknown method"
    name = str(getattr(method, "value", method))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name


def describe(scheme: Mapping[str, Any]) -> str:
    """The format in a few words, e.g. "compressed-tensors, pack-quantized, int4, groups of 128"."""
    words = [method_of(scheme)]
    groups = scheme.get("config_groups")
    weights: Mapping[str, Any] = scheme
    if isinstance(groups, Mapping) and groups:
        first = next(iter(groups.values()))
        weights = (first.get("weights") if isinstance(first, Mapping) else None) or {}
    for name in ("format", "quant_algo", "bnb_4bit_quant_type"):
        if isinstance(scheme.get(name), str):
            words.append(scheme[name])
    bits = weights.get("num_bits") or weights.get("bits")
    if isinstance(bits, int):
        words.append(f"{weights.get('type', 'int')}{bits}")
    elif scheme.get("load_in_8bit"):
        words.append("int8")
    size = weights.get("group_size")
    if isinstance(size, int) and size > 0:
        words.append(f"groups of {size}")
    block = scheme.get("weight_block_size")
    if isinstance(block, list | tuple):
        words.append(f"blocks of {'x'.join(map(str, block))}")
    return ", ".join(words)


def _unsupported(scheme: Mapping[str, Any]) -> str:
    """What in a known method's scheme changes the weights in a way not known here; "" = nothing."""
    if scheme.get("transform_config"):
        return "with transforms of its inputs"
    sparsity = scheme.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        return "with sparse weights"
    for key, values in _ALLOWED[method_of(scheme)].items():
        value = scheme.get(key)
        plain = value.lower() if isinstance(value, str) else value
        if value is not None and all(plain != one for one in values):  # lists have no hash
            return f"{key} {value}"
    return ""


def quantized_layers(path: str) -> dict[str, dict[str, StoredTensor]]:
    """Layer's name in the checkpoint → its tensors by the rest of their names, of the layers that
    are quantised. Raises StartupError for a file that cannot be read."""
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored_tensors(path).items():
        layer, _, suffix = name.rpartition(".")
        layers.setdefault(layer, {})[suffix] = tensor
    return {
        name: found for name, found in layers.items()
        if "weight_packed" in found or "qweight" in found
        or ("weight" in found and found["weight"].dtype not in (*_FLOATS, "F64"))
    }  # fmt: skip


_Shapes = dict[str, tuple[set[str], tuple[int, ...]]]
"""Tensor's name → the types and the shape that it must have."""


def layout_of(
    path: str,
    scheme: Mapping[str, Any],
    names: tuple[str, str],
    stored: Mapping[str, StoredTensor],
    linear: nn.Linear,
) -> tuple[StoredAs, tuple[str, ...]]:
    """How a layer is stored, and which of its tensors are needed. `names`: in the checkpoint, in
    the model. Raises UnsupportedQuantization where the files say another thing than the scheme."""
    try:
        found = LOADERS[method_of(scheme)](
            scheme, names, stored, linear.out_features, linear.in_features
        )
    except (AttributeError, TypeError, ValueError) as error:  # values of other types, in its JSON
        found = f"the scheme cannot be read ({error})"
    if isinstance(found, str):
        raise refusal(path, f"{describe(scheme)}, {names[0]}: {found}")
    layout, shapes = found
    for name, (dtypes, shape) in shapes.items():
        tensor = stored.get(name)
        if tensor is None or tensor.dtype not in dtypes or not _is_shape(tensor.shape, shape):
            there = "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            wanted = f"{' or '.join(sorted(dtypes))} {list(shape)}"
            raise refusal(
                path, f"{describe(scheme)}, {names[0]}.{name}: {there} instead of {wanted}"
            )
    return layout, tuple(shapes)


def _is_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """One scale for everything is stored with 0, 1 or 2 dimensions, one an output with 1 or 2."""
    if len(wanted) == 2 and wanted[1] == 1 and len(found) < 2:
        return math.prod(found) == wanted[0]
    return found == wanted


def _fp8(
    scheme: Mapping[str, Any], names: object, stored: object, outs: int, ins: int
) -> tuple[StoredAs, _Shapes] | str:
    rows, columns = scheme.get("weight_block_size") or (outs, ins)
    return StoredAs("plain", 8, "weight_scale_inv", rows, columns), {
        "weight": ({"F8_E4M3"}, (outs, ins)),
        "weight_scale_inv": (_FLOATS, (-(-outs // rows), -(-ins // columns))),
    }


def _compressed_tensors(
    scheme: Mapping[str, Any],
    names: tuple[str, str],
    stored: Mapping[str, StoredTensor],
    outs: int,
    ins: int,
) -> tuple[StoredAs, _Shapes] | str:
    weights = _group_of(scheme, names)
    if weights is None:
        return "no group of the scheme has it as a target"
    kind, bits = str(weights.get("type") or "int"), int(weights.get("num_bits") or 8)
    strategy, size = str(weights.get("strategy") or ""), int(weights.get("group_size") or 0)
    if not strategy:
        strategy = "group" if size > 0 else "channel" if size < 0 else "tensor"
    rows, columns = {
        "tensor": (outs, ins), "channel": (1, ins), "group": (1, size),
        "block": tuple(weights.get("block_structure") or (0, 0)),
    }.get(strategy, (0, 0))  # fmt: skip
    packed, has_zeros = "weight_packed" in stored, weights.get("symmetric") is False
    if (
        rows < 1 or columns < 1 or (kind, bits) not in {("int", 4), ("int", 8), ("float", 8)}
        or (packed and (kind != "int" or (has_zeros and rows != 1)))
    ):  # fmt: skip
        return f"{'packed ' * packed}{kind}{bits} weights with scales by {strategy}"
    table = (-(-outs // rows), -(-ins // columns))
    shapes: _Shapes = {"weight_scale": (_FLOATS, table)}
    if packed:
        shapes["weight_packed"] = ({"I32"}, (outs, -(-ins * bits // 32)))
    else:
        shapes["weight"] = ({"I8" if kind == "int" else "F8_E4M3"}, (outs, ins))
    if has_zeros:
        shapes["weight_zero_point"] = (
            ({"I32"}, (-(-outs * bits // 32), table[1])) if packed else ({"I8"}, table)
        )
    is_reordered = weights.get("actorder") in ("group", "dynamic", True)  # names of one thing
    if "weight_g_idx" in stored or is_reordered:
        shapes["weight_g_idx"] = ({"I32"}, (ins,))
    kind = "packed" if packed else "plain"
    return StoredAs(kind, bits, "weight_scale", rows, columns, 0, is_reordered), shapes


def _group_of(scheme: Mapping[str, Any], names: tuple[str, str]) -> Mapping[str, Any] | None:
    """The weights' arguments of the group whose targets are a layer: its names before its class."""
    by_class = None
    for group in (scheme.get("config_groups") or {}).values():
        for target in group.get("targets") or ():
            pattern = target.removeprefix("re:")
            if any(re.match(pattern, n) if pattern != target else n == target for n in names):
                return group.get("weights") or None
            if target == "Linear":
                by_class = by_class or group.get("weights")
    return by_class


def _gptq_or_awq(
    scheme: Mapping[str, Any],
    names: object,
    stored: Mapping[str, StoredTensor],
    outs: int,
    ins: int,
) -> tuple[StoredAs, _Shapes] | str:
    """Inputs in rows; codes are packed along inputs (GPTQ) or outputs (AWQ)."""
    kind, bits = method_of(scheme), int(scheme.get("bits") or 4)
    each, size = 32 // bits, int(scheme.get("group_size") or 0)
    size = size if size > 0 else ins
    is_gptq = kind == "gptq"
    if outs % each or (is_gptq and ins % each):
        return f"{ins} inputs and {outs} outputs, not multiples of {each}"
    groups = -(-ins // size)
    shapes: _Shapes = {
        "qweight": ({"I32"}, (ins // each, outs) if is_gptq else (ins, outs // each)),
        "qzeros": ({"I32"}, (groups, outs // each)),
        "scales": (_FLOATS, (groups, outs)),
    }
    if is_gptq and ("g_idx" in stored or scheme.get("desc_act")):
        shapes["g_idx"] = ({"I32"}, (ins,))
    offset = int(is_gptq and scheme.get("checkpoint_format") != "gptq_v2")
    is_reordered = is_gptq and bool(scheme.get("desc_act"))
    return StoredAs(kind, bits, "scales", 1, size, offset, is_reordered), shapes


def _mxfp4(
    scheme: object, names: object, stored: object, outs: int, ins: int
) -> tuple[StoredAs, _Shapes] | str:
    if ins % 32:
        return f"{ins} inputs, not a multiple of 32"
    return StoredAs("mxfp4", 4, "scales", 1, 32), {
        "blocks": ({"U8"}, (outs, ins // 32, 16)),
        "scales": ({"U8"}, (outs, ins // 32)),
    }


LOADERS: Mapping[str, Callable[..., tuple[StoredAs, _Shapes] | str]] = {
    "awq": _gptq_or_awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq_or_awq,
    "mxfp4": _mxfp4,
}
"""quant_method → how it stores a layer, or why that is not known. Other methods are refused."""
