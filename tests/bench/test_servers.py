"""What the compared servers are told: what the bench says is equal must be so."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.bench.servers import KV_GIB, MAKERS, MAX_MODEL_LEN, Options, Spec

MODEL = Path("/nowhere")


def spec(name: str, **options: object) -> Spec:
    return MAKERS[name](name, Options(MODEL, **options))  # type: ignore[arg-type]


def option(made: Spec, name: str) -> str:
    return made.command[made.command.index(name) + 1]


def test_foveal_and_vllm_have_equal_contexts_and_kv_memory() -> None:
    foveal, vllm = spec("foveal"), spec("vllm")
    for made in (foveal, vllm):
        assert option(made, "--max-model-len") == str(MAX_MODEL_LEN)
        assert option(made, "--dtype") == "float32"
    assert option(foveal, "--kv-cache") == f"{KV_GIB}Gi"
    assert vllm.env["VLLM_CPU_KVCACHE_SPACE"] == str(KV_GIB)


def test_threads_reach_each_server_or_it_is_refused() -> None:
    assert option(spec("foveal", threads=3), "--threads") == "3"
    assert spec("transformers", threads=3).env["OMP_NUM_THREADS"] == "3"
    for name in MAKERS:
        if name.startswith("vllm"):
            assert spec(name)
            with pytest.raises(SystemExit, match=f"--threads 3 does not reach {name}, "):
                spec(name, threads=3)
