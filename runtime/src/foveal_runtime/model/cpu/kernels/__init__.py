"""Finds and loads the compiled kernels that fit this CPU; the one place that knows ctypes.

The shared objects are compiled when the package is built (runtime/setup.py), one per instruction
set. Nothing is ever compiled here: without a fitting object there is a reason instead of a kernel.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DONE, UNSUPPORTED, NO_MEMORY = 0, 1, 2
FLOAT32, BFLOAT16 = 0, 1
HEAD_DIMS = frozenset({16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256})
MAX_HEAD_DIM = 256
MAX_GROUP_VALUES = 8192
"""Query heads per kv head times head dimension: what one task's accumulators hold."""

_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16"}
_TILES = {"amx_tile", "amx_bf16"}
_NEEDS = {"v4_amx": _BF16 | _TILES, "v4_bf16": _BF16, "v4": _V4, "v3": _V3}
"""Instruction sets of the variants, best first; not every kernel has all."""
MOST_IN_ORDER = 32
"""Of `DecoderKernel`, with AVX-512 on Intel's CPUs."""


class DecodeJob(ctypes.Structure):
    """Mirrors `Job` in paged_decode.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "head_dim", "num_heads", "num_kv_heads", "block_size", "num_rows",
            "num_threads", "window", "chunk")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("row_token", ctypes.c_void_p),
        ("row_sequence", ctypes.c_void_p),
        ("row_length", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    )  # fmt: skip


class DenseJob(ctypes.Structure):
    """Mirrors `DenseJob` in paged_prefill.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "head_dim", "num_heads", "num_kv_heads", "num_sequences", "num_queries",
            "num_keys", "num_threads")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values")),
        *((name, ctypes.c_int64) for name in (
            "query_token_stride", "query_head_stride", "key_token_stride", "key_head_stride",
            "value_token_stride", "value_head_stride")),
        ("out", ctypes.c_void_p),
    )  # fmt: skip


class RmsNorm(ctypes.Structure):
    """Mirrors `RmsNorm` in rows.h. Without a weight: no norm."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("rounds_first", ctypes.c_int32),
    )


class NormJob(ctypes.Structure):
    """Mirrors `NormJob` in rows.c, field by field."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("norm", RmsNorm),
    )


class Product(ctypes.Structure):
    """Mirrors `Product` in products.h: a packed linear layer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scales", "zeros")),
        *((name, ctypes.c_int32) for name in ("ins", "outs", "wide", "deep", "paired", "bits")),
        *((name, ctypes.c_int64) for name in ("out_stride", "in_stride")),
    )


class ProductJob(ctypes.Structure):
    """Mirrors `ProductJob` in decoder_layers.c."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("num_rows", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("product", Product),
    )


class Expert(ctypes.Structure):
    """Mirrors `Expert` in experts.h."""

    _fields_ = tuple((name, Product) for name in ("gate", "up", "down"))


class ExpertsJob(ctypes.Structure):
    """Mirrors `ExpertsJob` in experts.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "num_threads", "activation", "num_experts", "num_used")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("x", "out", "which", "factors", "experts")),
    )  # fmt: skip


class Routing(ctypes.Structure):
    """Mirrors `Routing` in experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scores", "shared", "experts")),
        *((name, ctypes.c_int32) for name in (
            "num_experts", "num_used", "activation", "normalises", "rounds")),
    )  # fmt: skip


PRODUCTS = ("q", "k", "v", "z", "o", "gate", "up", "down")
NORMS = ("before", "after", "of_attention", "of_mlp", "query", "key")
"""Of a layer; those that it lacks have no weight."""


class Layer(ctypes.Structure):
    """Mirrors `Layer` in decoder_layers.c."""

    _fields_ = (
        *((name, RmsNorm) for name in NORMS),
        *((name, Product) for name in PRODUCTS),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "sinks")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        *((name, ctypes.c_int32) for name in ("window", "chunk", "place", "gated", "taps")),
        *((name, ctypes.c_void_p) for name in (
            "conv_weight", "conv_bias", "past", "delta", "routing")),
    )  # fmt: skip


class Place(ctypes.Structure):
    """Mirrors `Place` in decoder_layers.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "block_table")),
        ("table_stride", ctypes.c_int64),
    )


class DecoderStep(ctypes.Structure):
    """Mirrors `Step` in decoder_layers.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "num_threads", "num_layers", "num_rows", "width", "mlp_width", "num_heads",
            "num_kv_heads", "head_dim", "rope_dim", "activation", "block_size")),
        *((name, ctypes.c_void_p) for name in (
            "layers", "rows", "places", "row_token", "row_sequence", "row_length")),
        ("num_single", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("chunk_rows", ctypes.c_void_p),
        ("num_segments", ctypes.c_int64),
        ("segments", ctypes.c_void_p),
    )  # fmt: skip


class DeltaJob(ctypes.Structure):
    """Mirrors `DeltaJob` in delta_rule.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "num_threads", "num_segments", "num_key_heads", "num_value_heads", "key_dim",
            "value_dim", "taps")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (
            "segments", "mixed", "gate", "rate", "step", "out", "past", "state", "conv_weight",
            "decay", "shift", "norm_weight")),
        ("eps", ctypes.c_float),
    )  # fmt: skip


class MambaJob(ctypes.Structure):
    """Mirrors `MambaJob` in mamba.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (
            "dtype", "num_threads", "num_segments", "num_groups", "num_heads", "head_dim",
            "state_dim", "taps")),
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (
            "segments", "mixed", "gate", "step", "out", "past", "state", "conv_weight",
            "conv_bias", "decay", "shift", "skip")),
        ("norm", RmsNorm),
        ("norm_size", ctypes.c_int32),
        ("gates_last", ctypes.c_int32),
    )  # fmt: skip


def _function(path: Path, name: str, *arguments: Any, returns: Any = ctypes.c_int) -> Any:
    """A function of a library, which releases the GIL while it runs."""
    found = getattr(ctypes.CDLL(str(path)), name)
    found.argtypes, found.restype = arguments, returns
    return found


class RowKernels:
    """The loaded rows.c."""

    def __init__(self, path: Path) -> None:
        job = ctypes.POINTER(NormJob)
        numbers = (ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p)
        self._norm = _function(path, "foveal_rms_norm", job, returns=None)
        self._gelu = _function(path, "foveal_quick_gelu", *numbers, returns=None)

    def norm(self, job: NormJob) -> None:
        self._norm(ctypes.byref(job))

    def quick_gelu(self, dtype: int, num_threads: int, count: int, address: int) -> None:
        """`count` numbers from `address` on, in place."""
        self._gelu(dtype, num_threads, count, address)


class Kernel:
    """The loaded paged_decode.c."""

    def __init__(self, path: Path) -> None:
        self.variant = path.stem.removeprefix("paged_decode_")
        self._run = _function(path, "foveal_paged_decode", ctypes.POINTER(DecodeJob))

    def run(self, job: DecodeJob) -> int:
        """DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._run(ctypes.byref(job)))


class PrefillKernel:
    """The loaded paged_prefill.c."""

    def __init__(self, path: Path) -> None:
        chunks = (ctypes.c_void_p, ctypes.c_int32)
        self._run = _function(path, "foveal_paged_prefill", ctypes.POINTER(DecodeJob), *chunks)
        self._run_dense = _function(path, "foveal_dense_attention", ctypes.POINTER(DenseJob))

    def run(self, job: DecodeJob, chunk_rows: int, num_chunks: int) -> int:
        """`chunk_rows`: address of int32 (num_chunks). DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._run(ctypes.byref(job), chunk_rows, num_chunks))

    def run_dense(self, job: DenseJob) -> int:
        """DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._run_dense(ctypes.byref(job)))


class DecoderKernel:
    """The loaded decoder_layers.c."""

    def __init__(self, path: Path) -> None:
        variant = path.stem.removeprefix("decoder_layers_")
        self.has_tiles = variant == "v4_amx"
        """Whether it multiplies bfloat16 numbers by AMX."""
        self.has_dots = variant in ("v4_bf16", "v4_amx")
        """Whether it multiplies such, and codes of quantised weights, as pairs of them."""
        best = "v4_amx" if "amx_bf16" in cpu_flags() else "v4" if has_slow_dots() else "v4_bf16"
        self.is_fast_in_bfloat16 = variant == best
        """Whether it multiplies bfloat16 numbers as fast as oneDNN."""
        self.is_fast_in_float32 = variant != "generic"
        """Whether its products are as fast as oneDNN's."""
        self.has_chunks = not variant.startswith("v4")
        """Whether many rows share what they read of quantised weights."""
        self._most_in_order = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "foveal_most_in_order")
        if variant.startswith("v4"):
            self.most_in_order = MOST_IN_ORDER if cpu_vendor() == "GenuineIntel" else 0
        self._run = _function(path, "foveal_decoder_layers", ctypes.POINTER(DecoderStep))
        self._multiply = _function(path, "foveal_multiply", ctypes.POINTER(ProductJob))
        self._experts = _function(path, "foveal_experts", ctypes.POINTER(ExpertsJob))

    @property
    def most_in_order(self) -> int:
        """Rows that go through weights chunk by chunk instead of six at a time, at most; their
        bits are the same. Of the library, so of all that loaded it."""
        return int(self._most_in_order.value)

    @most_in_order.setter
    def most_in_order(self, rows: int) -> None:
        self._most_in_order.value = rows

    def multiply(self, job: ProductJob) -> int:
        """DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._multiply(ctypes.byref(job)))

    def experts(self, job: ExpertsJob) -> int:
        """DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._experts(ctypes.byref(job)))

    def run(self, step: DecoderStep) -> int:
        """DONE, UNSUPPORTED or NO_MEMORY."""
        return int(self._run(ctypes.byref(step)))


class RecurrentKernels:
    """The loaded recurrent.c."""

    def __init__(self, path: Path) -> None:
        self._delta_rule = _function(path, "foveal_delta_rule", ctypes.POINTER(DeltaJob))
        self._mamba = _function(path, "foveal_mamba", ctypes.POINTER(MambaJob))

    def delta_rule(self, job: DeltaJob) -> int:
        """DONE or UNSUPPORTED."""
        return int(self._delta_rule(ctypes.byref(job)))

    def mamba(self, job: MambaJob) -> int:
        """DONE or UNSUPPORTED."""
        return int(self._mamba(ctypes.byref(job)))


_CPUINFO = Path("/proc/cpuinfo")


def _cpu_says(name: str, cpuinfo: Path) -> str:
    """A line of the first CPU; "" where the system does not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2] for line in lines if line.startswith(name)), "").strip()


def cpu_vendor(cpuinfo: Path = _CPUINFO) -> str:
    """GenuineIntel, AuthenticAMD, ...; "" where the system does not say."""
    return _cpu_says("vendor_id", cpuinfo)


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Instruction set names of the first CPU; empty where the system does not say. Those of AMX
    only where this process may use it: Linux keeps its registers for who has asked."""
    flags = frozenset(_cpu_says("flags", cpuinfo).split())
    return flags if not flags & _TILES or _may_use_tiles() else flags - _TILES


def has_slow_dots(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether bfloat16 numbers are better widened here than multiplied as pairs. Intel's CPUs that
    have AMX, of which AVX512-FP16 is the sign, multiply pairs at half of their rate for float32
    numbers; many virtual machines do not show the AMX that would do it instead."""
    flags = cpu_flags(cpuinfo)
    is_such = {"avx512_bf16", "avx512_fp16"} <= flags and "amx_bf16" not in flags
    return is_such and cpu_vendor(cpuinfo) == "GenuineIntel"


@functools.cache
def _may_use_tiles() -> bool:
    """Asks once, for all threads."""
    arch_prctl, ask, tile_data = 158, 0x1023, 18  # linux/arch/x86/include/uapi/asm/prctl.h
    try:
        return int(ctypes.CDLL(None).syscall(arch_prctl, ask, tile_data)) == 0
    except (OSError, AttributeError):
        return False


def variants(machine: str, flags: frozenset[str]) -> list[str]:
    """Names of the variants this CPU can run, best first."""
    if machine not in ("x86_64", "AMD64"):
        return ["generic"]
    return [name for name, needs in _NEEDS.items() if needs <= flags] + ["generic"]


def preferred_variants(cpuinfo: Path = _CPUINFO) -> list[str]:
    """Names of the variants worth loading on this CPU, best first."""
    able = variants(platform.machine(), cpu_flags(cpuinfo))
    return [name for name in able if name != "v4_bf16" or not has_slow_dots(cpuinfo)]


def load_kernel(folder: Path | None = None) -> Kernel | str:
    """The best decode kernel there is, or one line that says why there is none."""
    return _load(Kernel, "paged_decode", folder)


def load_prefill_kernel() -> PrefillKernel | str:
    """The best prefill kernel there is, or one line that says why there is none."""
    return _load(PrefillKernel, "paged_prefill")


def load_row_kernels(folder: Path | None = None) -> RowKernels | str:
    """The best of rows.c there is, or one line that says why there is none."""
    return _load(RowKernels, "rows", folder)


def load_decoder_kernel() -> DecoderKernel | str:
    """The best of decoder_layers.c there is, or one line that says why there is none."""
    return _load(DecoderKernel, "decoder_layers")


def load_recurrent_kernels(folder: Path | None = None) -> RecurrentKernels | str:
    """The best of recurrent.c there is, or one line that says why there is none."""
    return _load(RecurrentKernels, "recurrent", folder)


def _load(kind: Callable[[Path], T], stem: str, folder: Path | None = None) -> T | str:
    folder = folder or Path(__file__).parent
    wanted = preferred_variants()
    for name in wanted:
        path = folder / f"{stem}_{name}.so"
        if path.exists():
            try:
                return kind(path)
            except (OSError, AttributeError) as error:
                return f"{path.name} cannot be loaded ({error})"
    return f"no {stem}_{{{','.join(wanted)}}}.so beside the package"
