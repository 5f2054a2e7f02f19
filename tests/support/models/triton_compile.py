"""Compiles the Triton kernels for NVIDIA GPUs that are not there, and tells what they take.

    triton_compile.py dtype[/pool's],head-size,group,architecture,rules ...
    triton_compile.py layer,dtype,width,MLP's-width,architecture ...
    triton_compile.py codes,dtype,codes,inputs of a scale,architecture ...
    triton_compile.py recurrence,dtype,architecture ...

One JSON line a kernel: name, shared memory in bytes, bytes spilled a thread, instructions of its
longest loop, what it does with memory before it waits for earlier ones (null: it does not wait).
Run by `compiled` in a process of its own, because in tests the kernels are interpreted.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget

from foveal_runtime.model.attention import FP8_MAX, LayerGeometry
from foveal_runtime.model.attention.triton import FEW_SPLITS, MIN_DOT, VECTOR, Tuning, kernels
from foveal_runtime.model.gpu import code_kernels, codes, product_kernels, recurrent_kernels
from foveal_runtime.model.gpu import kernels as between
from foveal_runtime.model.gpu.products import MAX_ROWS, ROWS_TILES, VECTOR_TILE

SMALL_CARD_BYTES = 101376
"""Shared memory that a block may have on cards of compute capability 8.6 and 8.9."""
KINDS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8": "fp8e4nv"}
RULES = {"WINDOW": 100, "CHUNK": 64, "SOFTCAP": 30.0, "HAS_SINKS": True}
INTEGERS = {"num_splits", "query_token_stride", "query_head_stride", "table_stride",
            "key_token_stride", "key_head_stride", "value_token_stride",
            "value_head_stride", "count", "first", "x_stride", "mixed_stride",
            "step_stride"}  # fmt: skip
NUMBERS = {"scale", "eps", "query_eps", "key_eps"}
TABLES = {"rows", "seq_of_token", "pos_of_token", "block_table", "tile_sequence", "tile_first",
          "q_start", "seq_lens", "groups"}  # fmt: skip
POOL = {"keys", "values", "codes"}
"""Whose type is another than the activations'."""
FLOATS = {"partial", "partial_top", "partial_total", "scales", "zeros", "decay", "shift", "skip",
          "state"}  # fmt: skip


def compiled(*cases: str) -> list[dict]:
    """What the kernels take on GPUs that are not here; each case must compile."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *cases]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def compile_kernel(
    kernel, pointers: tuple[str, str], architecture: int, constants: dict, **options
) -> None:
    function, signature, known = kernel.jit, {}, {}
    for at, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            known[at,] = constants[name]
        elif name in INTEGERS:
            signature[name] = "i32"
        elif name in NUMBERS:
            signature[name] = "fp32"
        elif name == "slots":
            signature[name] = "*i64"
        else:
            is_float = name in FLOATS or (name == "out" and constants.get("IS_SPLIT"))
            pointer = pointers[name in POOL]
            signature[name] = "*i32" if name in TABLES else "*fp32" if is_float else pointer
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(function.arg_names)
               if signature[name].startswith("*")}  # fmt: skip
    source = triton.compiler.ASTSource(function, signature, known, aligned)
    target = GPUTarget("cuda", architecture, 32)
    made = triton.compile(source, target=target, options=options)
    name = function.fn.__name__
    found = {"kernel": name, "shared_bytes": made.metadata.shared, "spilled_bytes": spilled(made),
             "loop_instructions": loop_instructions(made),
             "before_wait": before_wait(made.asm["ptx"])}  # fmt: skip
    print(json.dumps(found), flush=True)


def before_wait(ptx: str) -> list[str] | None:
    """The accesses to memory before the wait of a kernel that may start early."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    found = re.findall(r"\b(?:(?:ld|st|atom|red)\.\S*global|cp\.async)\S*", before)
    return found if wait else None


def spilled(made) -> int:
    return int(re.search(r"STACK:(\d+)", dumped(made, "--dump-resource-usage"))[1])


def loop_instructions(made) -> int:
    """Of the longest loop, each time through; 0 without one."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", dumped(made, "--dump-sass"))
    places = [int(place, 16) for place, _ in found]
    backward = [(int(target[1], 16), place) for place, (_, text) in zip(places, found, strict=True)
                if "BRA" in text and (target := re.search(r"0x([0-9a-f]+)", text))
                and int(target[1], 16) < place]  # fmt: skip
    return max((sum(start <= one <= end for one in places) for start, end in backward), default=0)


def dumped(made, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [tool, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_case(case: str) -> None:
    kind, head_dim, group_size, architecture_text, rules = case.split(",")
    dim, group, architecture = int(head_dim), int(group_size), int(architecture_text)
    kind, _, kept = kind.partition("/")
    dtype, pointer = getattr(torch, kind), ("*" + KINDS[kind], "*" + KINDS[kept or kind])
    layer, tuning = LayerGeometry(0, 8 * group, 8, dim, dim, 0.1), Tuning(132)
    wide = max(MIN_DOT, triton.next_power_of_2(dim))
    common = {"NUM_KV_HEADS": 8, "GROUP": group, "PAGE": 16, "DK": dim, "DV": dim,
              "BLOCK_DK": wide, "BLOCK_DV": wide, "WINDOW": 0, "CHUNK": 0, "SOFTCAP": 0.0,
              "HAS_SINKS": False, "WIDEN": False}  # fmt: skip
    if rules == "rules":
        common |= RULES
    early = {"launch_pdl": True} if architecture >= 90 else {}
    heads = min(group, tuning.decode_heads)
    decode = {"HEADS": heads, "BLOCK_H": max(MIN_DOT, triton.next_power_of_2(heads)),
              "BLOCK_N": tuning.decode_block(layer, dtype), "VECTOR": VECTOR,
              "EARLY": bool(early)}  # fmt: skip
    for is_split in (True, False):
        compile_kernel(
            kernels.decode_kernel, pointer, architecture,
            common | decode | {"IS_SPLIT": is_split},
            num_warps=tuning.decode_warps, num_stages=tuning.decode_stages, **early,
        )  # fmt: skip
    block_m, block_n, warps, stages = tuning.prefill_blocks(layer, dtype)
    prefill = {"HEADS": min(group, block_m), "BLOCK_M": block_m, "BLOCK_N": block_n,
               "HAS_GROUPS": rules == "rules", "GROUPS_IGNORE_WINDOW": False}  # fmt: skip
    compile_kernel(
        kernels.prefill_kernel, pointer, architecture, common | prefill,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    reduction = {"NUM_HEADS": 8 * group, "DV": dim, "FEW": FEW_SPLITS, "BLOCK_S": tuning.max_splits,
                 "BLOCK_DV": wide, "HAS_SINKS": rules == "rules",
                 "EARLY": bool(early)}  # fmt: skip
    compile_kernel(kernels.reduce_kernel, pointer, architecture, reduction,
                   num_warps=tuning.reduce_warps(wide), **early)  # fmt: skip
    writing = {"KEY_WIDTH": 8 * dim, "VALUE_WIDTH": 8 * dim, "DK": dim, "DV": dim, "BLOCK": 1024,
               "LARGEST": FP8_MAX if kept else 0.0}  # fmt: skip
    compile_kernel(kernels.write_kernel, pointer, architecture, writing)


def compile_layer(case: str) -> None:
    """Products of a layer's two shapes, whole and half empty tiles, and what is between them."""
    kind, *numbers = case.split(",")
    width, inner, architecture = (int(number) for number in numbers)
    pointers = ("*" + KINDS[kind],) * 2
    early = {"launch_pdl": True} if architecture >= 90 else {}
    common = {"EARLY": bool(early)}
    for n, k, activation in ((width, inner, ""), (inner, width, "gelu_tanh")):
        product = {"N": n, "K": k, "ACTIVATION": activation, "HAS_BIAS": bool(activation),
                   "HAS_RESIDUAL": not activation, **common}  # fmt: skip
        compile_kernel(
            product_kernels.vector_kernel, pointers, architecture,
            product | {"BLOCK_N": VECTOR_TILE[0], "BLOCK_K": VECTOR_TILE[1]},
            num_warps=VECTOR_TILE[2], **early,
        )  # fmt: skip
        for block_n, block_k, warps, stages in ROWS_TILES:
            compile_kernel(
                product_kernels.rows_kernel, pointers, architecture,
                product
                | {"ROWS": MAX_ROWS, "BLOCK_N": block_n, "BLOCK_K": block_k, "WIDEN": False},
                num_warps=warps, num_stages=stages, **early,
            )  # fmt: skip
    norm = {"WIDTH": width, "OFFSET": 1.0, "HAS_RESIDUAL": True,
            "BLOCK": triton.next_power_of_2(width)}  # fmt: skip
    compile_kernel(between.norm_kernel, pointers, architecture, common | norm, num_warps=8, **early)
    heads = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "DIM": 128, "TURNED": 96, "HAS_QUERY_NORM": True,
             "HAS_KEY_NORM": True, "OFFSET": 0.0, "LARGEST": 0.0, "BLOCK": 128}  # fmt: skip
    compile_kernel(
        between.heads_kernel, pointers, architecture, common | heads, num_warps=1, **early
    )


def compile_codes(case: str) -> None:
    """Products of a few and of more rows with what follows them, and the widening of a slab."""
    kind, coded, deep, architecture = case.split(",")
    pointers = ("*" + KINDS[kind], {"int4": "*i32", "int8": "*i8", "fp8": "*i8"}[coded])
    num_lines, _, stages = codes.TILE
    parts = codes.warps_of(4096, 4096 // int(deep), int(deep))
    common = {"K": 4096, "GROUPS": 4096 // int(deep), "SHARE": 1, "DEEP": int(deep), "KIND": coded,
              "HAS_ZEROS": coded == "int4"}  # fmt: skip
    early = {"launch_pdl": True} if int(architecture) >= 90 else {}
    for rows, activation in itertools.product((16, codes._MOST_ROWS), ("", "swish")):
        product = {"N": 4096, "ACTIVATION": activation, "HAS_BIAS": bool(activation),
                   "HAS_RESIDUAL": not activation, "ROWS": rows,
                   "BLOCK_N": num_lines // (2 if activation else 1), "PARTS": parts,
                   "WIDEN": False, "EARLY": bool(early)}  # fmt: skip
        compile_kernel(
            code_kernels.coded_rows_kernel, pointers, int(architecture), common | product,
            num_warps=parts, num_stages=stages, **early,
        )  # fmt: skip
    block_n, block_k = codes._WIDEN_TILE
    compile_kernel(code_kernels.widen_kernel, pointers, int(architecture),
                   common | {"BLOCK_N": block_n, "BLOCK_K": block_k})  # fmt: skip


def compile_recurrence(case: str) -> None:
    """One token through Qwen3.5's heads of 128 x 128, and through Nemotron-H's of 64 x 128."""
    kind, architecture = case.split(",")
    pointers = ("*" + KINDS[kind],) * 2
    conv = {"WIDTH": 6144, "TAPS": 4, "HAS_BIAS": True, "HAS_SILU": True, "BLOCK": 128}
    delta = {"KEY_HEADS": 16, "HEADS": 32, "KEYS": 128, "VALUES": 128, "KEY_BLOCK": 128,
             "VALUE_BLOCK": 128}  # fmt: skip
    mamba = {"GROUPS": 8, "HEADS": 128, "VALUES": 64, "KEYS": 128, "VALUE_BLOCK": 64,
             "KEY_BLOCK": 128}  # fmt: skip
    for one, constants, warps in (
        (recurrent_kernels.convolve_kernel, conv, 4),
        (recurrent_kernels.delta_kernel, delta, 8),
        (recurrent_kernels.mamba_kernel, mamba, 8),
    ):
        compile_kernel(one, pointers, int(architecture), constants, num_warps=warps)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ways = {"layer": compile_layer, "codes": compile_codes, "recurrence": compile_recurrence}
    for one in sys.argv[1:]:
        what, _, rest = one.partition(",")
        ways[what](rest) if what in ways else compile_case(one)
