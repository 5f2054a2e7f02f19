"""The KV pool's memory: taken at once, or as it fills."""

import os
from pathlib import Path

import pytest
import torch

from foveal_runtime.model.attention import FP8, KVPool
from tests.support.models.attention_batches import geometry

MIB = 1 << 20
CPU = torch.device("cpu")
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_an_untouched_pool_takes_memory_where_it_is_written(dtype: torch.dtype) -> None:
    layer = geometry(64, 1, kv_heads=8)
    num_blocks = 128 * MIB // (16 * 2 * 8 * 64 * dtype.itemsize)
    before = resident_bytes()
    pool = KVPool([layer], num_blocks, 16, dtype, CPU, is_touched=False)
    assert pool.size_bytes == 128 * MIB
    pool.keys[0][:16] = torch.ones(16, 8, 64).to(dtype)
    pool.values[0][-16:] = torch.ones(16, 8, 64).to(dtype)
    assert resident_bytes() - before < 16 * MIB
    assert pool.keys[0][16:32].float().sum() == 0
    touched = KVPool([layer], num_blocks, 16, dtype, CPU)
    assert resident_bytes() - before >= 128 * MIB
    assert touched.values[0][-1].float().sum() == 0
