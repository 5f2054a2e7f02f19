"""What the plan says weights, states, KV and adapters take, beside what a process has grown by.

On models of some hundred megabytes, where a percentage means something: hybrids, a quantised one,
and one with LoRA adapters. What every process takes is measured elsewhere
(tests/processes/test_memory.py), and loaded here before the first look.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from foveal_runtime.main.local.serve import adapter_bytes
from foveal_runtime.model import profiler
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs
from foveal_runtime.plan.config import MIB, LoraSource
from tests.support.models import lora, quantised

pytestmark = pytest.mark.extended

KV_BYTES, NUM_SEQS, RANK = 48 * MIB, 12, 128
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_000,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LINEAR = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA = {
    "attn_layer_indices": [3, 7],
    "mamba_n_heads": 16,
    "mamba_d_state": 128,
    "mamba_n_groups": 2,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
GROWTH = """
import json, sys
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import LoraSource
from foveal_runtime.telemetry.memory import release_free_memory, taken_bytes

def load(path, kv_bytes, num_sequences, num_snapshots, adapters, lora_bytes, quantization="auto"):
    runner = TorchRunner.load(path, lora_bytes=lora_bytes, quantization=quantization)
    blocks = kv_bytes // runner.kv_block_bytes
    runner.allocate_kv(blocks, num_sequences=num_sequences, num_snapshots=num_snapshots)
    for adapter in adapters:
        runner.loras.load(LoraSource(adapter, adapter))
    release_free_memory()
    return runner

small = load(sys.argv[1], 1 << 20, 2, 2, [], 0)
before = taken_bytes()
large = load(*json.loads(sys.argv[2]))
print(taken_bytes() - before)
"""

STATES = {"hybrid": "qwen3_next", "mamba": "bamba"}
SMALL = {**STATES, "experts": "qwen3_moe", "experts-int4": "qwen3_moe"}
"""Tiny ones, whose code is loaded before the first look."""

# Compiled products are planned with what every process takes, not with the model.
NO_CACHES = dict.fromkeys(("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"), "1")


def save_random(config: object, folder: Path) -> Path:
    torch.manual_seed(1)
    getattr(hf, config.architectures[0])(config).save_pretrained(folder)
    return folder


def llama(folder: Path) -> Path:
    return save_random(hf.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]), folder)


@pytest.mark.parametrize(
    "kind", ["hybrid", "mamba", "quantised", "int4", "adapters", "experts", "experts-int4"]
)
def test_the_plan_is_what_a_process_grows_by(kind: str, tiny, tmp_path, monkeypatch) -> None:
    adapters: list[str] = []
    if kind == "hybrid":
        config = hf.Qwen3_5TextConfig(**SIZES, **LINEAR, architectures=["Qwen3_5ForCausalLM"])
        path = save_random(config, tmp_path / "hybrid")
    elif kind == "mamba":
        config = hf.BambaConfig(**SIZES, **MAMBA, architectures=["BambaForCausalLM"])
        path = save_random(config, tmp_path / "mamba")
    elif kind == "quantised":
        path, _ = quantised.make(llama(tmp_path / "source"), tmp_path, "W4A16")
    elif kind == "int4":
        path = llama(tmp_path / "plain")
    elif "experts" in kind:
        config = hf.Qwen3MoeConfig(**SIZES, **EXPERTS, architectures=["Qwen3MoeForCausalLM"])
        path = save_random(config, tmp_path / "experts")
    else:
        path = llama(tmp_path / "plain")
        monkeypatch.setattr(lora, "RANK", RANK)
        model = lora.plain(str(path))
        adapters = [
            str(lora.write_adapter(tmp_path / f"{n}", model, n, r=RANK, lora_alpha=8))
            for n in (1, 2)
        ]
    quantization = "int4" if "int4" in kind else "auto"
    profile = profiler.predict(str(path), quantization=quantization)
    lora_bytes = sum(adapter_bytes(LoraSource(one, one), profile.dtype) for one in adapters)
    engine = EngineInputs(device="cpu", max_num_seqs=NUM_SEQS, kv_bytes=KV_BYTES)
    found = plan(BudgetInputs(engine=engine), profile)
    lines = {line.name: line.bytes for line in found.engine.lines}
    names = ("weights", "state", "snapshots", "kv")
    planned = sum(lines.get(name, 0) for name in names) + lora_bytes
    assert ("state" in lines) == ("snapshots" in lines) == (kind in STATES)
    num_snapshots = lines.get("snapshots", 0) // (profile.state_bytes or 1)
    request = [str(path), KV_BYTES, NUM_SEQS, num_snapshots, adapters, lora_bytes, quantization]
    small = str(tiny(SMALL.get(kind, "llama")))
    grown = subprocess.run(
        [sys.executable, "-c", GROWTH, small, json.dumps(request)],
        check=True, capture_output=True, text=True, timeout=300, env={**os.environ, **NO_CACHES},
    )  # fmt: skip
    measured = int(grown.stdout)
    print(f"{kind}: planned {planned / MIB:.1f} MiB, grown by {measured / MIB:.1f} MiB, {lines}")
    assert measured > 100 * MIB
    assert abs(planned - measured) <= 0.05 * measured
