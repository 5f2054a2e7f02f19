"""Memory while a checkpoint is quantised at load: no more than its plan counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

pytestmark = [pytest.mark.model, pytest.mark.extended, pytest.mark.timeout(600)]
LOAD = """
import sys, threading
from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.telemetry.memory import release_free_memory, status_bytes
path, kind = sys.argv[1:]
weights = profiler.predict(path, quantization=kind).weight_bytes
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
print(weights, most[0] - before)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=16, max_position_embeddings=512,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("quantised")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_load_takes_what_is_planned(kind, path) -> None:
    """Weights, and the quarter of them that `loadStaging` counts."""
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path), kind],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    weights, grown = map(int, done.stdout.split()[-2:])
    assert weights // 2 < grown <= weights * 5 // 4
