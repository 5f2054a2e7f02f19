"""Memory while a checkpoint is quantised at load: no more than its plan counts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
LOAD = """
import sys, threading
from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.telemetry.memory import release_free_memory, status_bytes
path, kind = sys.argv[1:]
plan = profiler.predict(path, quantization=kind)
release_free_memory()
before, most, done = status_bytes("self")["RssAnon"], [0], threading.Event()
def watch():
    while not done.wait(0.002):
        most.append(max(most.pop(), status_bytes("self")["RssAnon"]))
thread = threading.Thread(target=watch)
thread.start()
load_model(path, quantization=kind)
done.set()
thread.join()
print(plan.weight_bytes, plan.load_bytes, most[0] - before)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """What is held beyond the result is a weight and some MiB, whatever the model: of so many
    layers as make that little beside the quarter that is planned."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10,
        num_attention_heads=16, max_position_embeddings=512,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("quantised")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(path: Path, kind: str) -> tuple[int, ...]:
    """Planned weights, those that are cast, and what loading grew by at most."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), kind],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return tuple(map(int, done.stdout.split()[-3:]))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_load_takes_what_is_planned(kind, path) -> None:
    """Weights, and the quarter of them that `loadStaging` counts."""
    weights, cast, grown = load(path, kind)
    assert cast == 0
    assert weights // 2 < grown <= weights * 5 // 4


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_load_takes_what_is_cast_beside_it(kind, path, tmp_path) -> None:
    """The last three of ten layers are stored as float32, and loaded as bfloat16."""
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    wide = {name: one.float() for name, one in tensors.items() if re.search(r"rs\.[789]\.", name)}
    save_file(tensors | wide, tmp_path / "model.safetensors", {"format": "pt"})
    weights, cast, grown = load(tmp_path, kind)
    assert cast == sum(one.nbytes // 2 for one in wide.values())
    assert weights * 5 // 4 < grown <= weights + cast


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_load_takes_experts_that_are_stacked_beside_it(kind, tmp_path) -> None:
    """Files have them one by one; on CPUs they are quantised, too."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=512, moe_intermediate_size=256,
        num_experts=32, num_experts_per_tok=4, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    weights, copied, grown = load(tmp_path, kind)
    assert copied == 10 * 32 * 3 * 256 * 512 * 2
    assert copied < grown <= weights * 5 // 4 + copied
