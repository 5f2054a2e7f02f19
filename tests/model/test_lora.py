"""LoRA adapters: each row as the merged weights would give it, whatever else is in the step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save, save_file

from foveal_runtime.engine.types.step import NewRequest, StepPlan
from foveal_runtime.main.engine import _load_runner
from foveal_runtime.main.local.serve import adapter_bytes
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.layers.lora import Loras
from foveal_runtime.plan.config import EngineConfig, ModelConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.lora import LoraSource
from tests.support.models.bench import Bench
from tests.support.models.compiled import NEEDS_KERNEL, NEEDS_PACKING
from tests.support.models.lora import ALPHA, CONFIG, RANK, merged, write_adapter

MIB = 1 << 20


class LoraBench(Bench):
    """A bench whose jobs are compared with the merged model of their adapter."""

    def __init__(self, name: str, path: Path, folder: Path, **options: object) -> None:
        super().__init__(name, path, **options)
        self.runner.loras = Loras(self.runner.loaded, MIB)
        self.models: dict[str, torch.nn.Module] = {"": self.reference}
        for seed, adapter in enumerate(("red", "blue"), 1):
            at = write_adapter(folder / adapter, self.reference, seed)
            self.runner.loras.load(LoraSource(adapter, str(at)))
            self.models[adapter] = merged(self.path, at)
        self.digests = {ref.name: ref.digest for ref in self.runner.loras.refs} | {"": b""}

    def job(self, request_id, prompt, start_step=0, *, lora="", **sampling):
        job = super().job(request_id, prompt, start_step, **sampling)
        job.lora = self.digests[lora]
        return job

    def check_lora(self, job, prompt) -> None:
        names = {digest: name for name, digest in self.digests.items()}
        self.reference = self.models[names[job.lora]]
        self.check(job, prompt)


@pytest.fixture
def lora_bench(tiny, tmp_path):
    return lambda name, **options: LoraBench(name, tiny(name), tmp_path, **options)


@pytest.mark.parametrize("name", ["llama", "qwen2_vl", "gemma3", "smolvlm"])
def test_mixed_steps_equal_the_merged_weights(lora_bench, name: str) -> None:
    """Two adapters and none in the same steps; chunked prefill, one preemption, decode steps."""
    one = lora_bench(name)
    items = [] if name == "llama" else [(0, 1)]
    prompt = one.prompt(1, items, num_text=30)
    jobs = [
        one.job(f"{lora or 'base'}-{i}", prompt, i, lora=lora)
        for i, lora in enumerate(("red", "", "blue", "red"))
    ]
    one.driver.run(jobs, preempt={6: "blue-2"})
    for job in jobs:
        one.check_lora(job, prompt)
    assert jobs[0].outputs == jobs[3].outputs
    assert jobs[3].num_cached > 0
    if items:
        assert one.driver.num_encodes == 1, "adapters share what towers make of an image"


def test_terms_are_computed_of_few_rows_at_once(lora_bench, monkeypatch) -> None:
    one = lora_bench("llama")
    monkeypatch.setattr("foveal_runtime.model.layers.lora.TERM_BYTES", 3 * 4 * (48 + 4 + 48))
    prompt = one.prompt(6, num_text=17)
    job = one.job("red", prompt, lora="red")
    one.driver.run([job])
    one.check_lora(job, prompt)


@NEEDS_KERNEL
@NEEDS_PACKING
def test_steps_without_adapters_stay_as_fast(lora_bench, checkpoints) -> None:
    """The C kernel computes them while an adapter is loaded, and never a row of one."""
    sizes = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6}
    config = lambda: transformers.AutoConfig.for_model("llama", **checkpoints.TEXT | sizes)  # noqa: E731
    checkpoints.CASES.setdefault("llama_heads_16", checkpoints.Case(config))
    one = lora_bench("llama_heads_16", attention="cpu")
    small = one.runner.forward.decoder_layers
    assert small is not None
    calls: list[int] = []
    run, small.run = small.run, lambda *given: (calls.append(1), run(*given))[1]
    prompt = one.prompt(2, num_text=12)
    plain, red = one.job("plain", prompt), one.job("red", prompt, lora="red")
    one.driver.run([red])
    assert not calls
    one.driver.run([plain])
    assert calls
    one.check_lora(plain, prompt)
    one.check_lora(red, prompt)


def test_an_adapter_never_finds_what_another_computed(lora_bench) -> None:
    one = lora_bench("llama")
    prompt = one.prompt(3, num_text=40)
    jobs = [one.job(name, prompt, lora=name) for name in ("red", "blue")]
    for job in jobs:
        one.driver.run([job])
        assert job.num_cached == 0
        one.check_lora(job, prompt)


def test_the_control_fails_without_the_adapter_in_keys(lora_bench) -> None:
    """What such a hit would do: this test's twin above could fail."""
    one = lora_bench("llama")
    one.driver.lora_keys = False
    prompt = one.prompt(3, num_text=40)
    for name in ("red", "blue"):
        job = one.job(name, prompt, lora=name)
        one.driver.run([job])
    assert job.num_cached > 0
    with pytest.raises(AssertionError):
        one.check_lora(job, prompt)


def test_a_running_sequence_keeps_an_unloaded_adapter(lora_bench) -> None:
    one = lora_bench("llama")
    prompt = one.prompt(4, num_text=20)
    job = one.job("red", prompt, lora="red")
    one.driver.one_step([job])
    held = one.runner.loras.num_bytes
    assert one.runner.loras.unload("red")
    assert not one.runner.loras.unload("red")
    assert one.runner.loras.num_bytes == held, "what still runs is counted"
    one.driver.run([job])
    one.check_lora(job, prompt)
    one.driver.one_step([])
    assert one.runner.loras.num_bytes == held // 2
    new = NewRequest("late", prompt.ids, 20, (), (), job.sampling, 0, job.lora)
    one.runner.execute(StepPlan(99, new=[new]))
    assert one.runner._failed == {"late": "its LoRA adapter was unloaded"}


def test_a_preempted_request_keeps_an_unloaded_adapter(lora_bench) -> None:
    """The runner forgets it and sees it again as a new one: the engine's request holds it."""
    one = lora_bench("llama")
    prompt = one.prompt(4, num_text=20)
    job = one.job("red", prompt, lora="red")
    [red, _] = one.runner.loras.refs
    held = one.runner.loras.hold(red)
    assert held is not None
    one.driver.one_step([job])
    assert one.runner.loras.unload("red")
    assert one.runner.loras.hold(red) is None
    one.runner._sequences.clear()
    one.driver.run([job], preempt={0: "red"})
    one.check_lora(job, prompt)
    num_bytes = one.runner.loras.num_bytes
    del held
    one.driver.one_step([])
    assert one.runner.loras.num_bytes == num_bytes // 2


def test_rank_stabilised_scale(lora_bench, tmp_path) -> None:
    one = lora_bench("llama")
    at = write_adapter(tmp_path / "stable", one.reference, 7, use_rslora=True)
    one.runner.loras.load(LoraSource("stable", str(at)))
    one.models["stable"] = merged(one.path, at, ALPHA / RANK**0.5)
    one.digests["stable"] = one.runner.loras.refs[-1].digest
    prompt = one.prompt(5, num_text=9)
    job = one.job("a", prompt, lora="stable")
    one.driver.run([job])
    one.check_lora(job, prompt)


def test_the_digest_is_of_the_content(tiny, tmp_path) -> None:
    """The same files under another name are the same adapter; another scale is another one."""
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    shutil.copytree(at, tmp_path / "b")
    shutil.copytree(at, tmp_path / "c")
    (tmp_path / "c" / "adapter_config.json").write_text(json.dumps(CONFIG | {"lora_alpha": 16}))
    loras = Loras(loaded, MIB)
    for name in "abc":
        loras.load(LoraSource(name, str(tmp_path / name)))
    a, b, c = (ref.digest for ref in loras.refs)
    assert a == b
    assert a != c
    planned = sum(adapter_bytes(LoraSource(n, str(tmp_path / n)), "float32") for n in "abc")
    assert loras.num_bytes == planned, "what foveal serve plans is what they take"


def test_loading_the_same_again_changes_nothing(tiny, tmp_path) -> None:
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    loras = Loras(loaded, MIB)
    loras.load(LoraSource("red", str(at)))
    before, num_bytes = loras.refs, loras.num_bytes
    loras.load(LoraSource("red", str(at)))
    assert (loras.refs, loras.num_bytes) == (before, num_bytes)
    other = write_adapter(tmp_path / "b", loaded.model, 2)
    with pytest.raises(StartupError, match="another adapter of this name is loaded"):
        loras.load(LoraSource("red", str(other)))
    assert loras.refs == before


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 513}, "rank 513 is not between 1 and 512"),
        ({"r": 8}, r"\[4, 48\]; this model takes floating-point \[8, 48\]"),
        ({"peft_type": "IA3"}, "peft_type LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": 10**400}, "lora_alpha is no finite number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is no finite number"),
    ],
)
def test_refused_configurations(tiny, tmp_path, config: dict[str, object], text: str) -> None:
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1, **config)
    _refused(loaded, at, text)


def _refused(loaded, at: Path, text: str, capacity: int = MIB) -> None:
    loras = Loras(loaded, capacity)
    with pytest.raises(StartupError, match=text) as refusal:
        loras.load(LoraSource("one", str(at)))
    assert "\n" not in refusal.value.message
    assert refusal.value.message.startswith("LoRA adapter 'one': ")
    assert not loras.refs
    assert not loras.num_bytes


@pytest.mark.parametrize(
    ("key", "shape", "text"),
    [
        ("model.vision_tower.layers.0.self_attn.q_proj.lora_A.weight", (4, 32), "decoder"),
        ("model.multi_modal_projector.linear_1.lora_A.weight", (4, 32), "decoder"),
        ("lm_head.lora_A.weight", (4, 32), "decoder"),
        ("model.embed_tokens.lora_embedding_A", (4, 32), "only lora_A and lora_B"),
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (32,), "only lora_A and lora_B"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 31), "31"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 32), "no lora_B"),
    ],
)
def test_refused_tensors(tiny, tmp_path, key: str, shape: tuple[int, ...], text: str) -> None:
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    save_file({f"base_model.model.{key}": torch.zeros(shape)}, at / "adapter_model.safetensors")
    _refused(loaded, at, text)


def test_refused_files(tiny, tmp_path) -> None:
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    _refused(loaded, at, "for adapters .--lora-memory, engine.lora.memory. are", capacity=1000)
    weights = at / "adapter_model.safetensors"
    weights.rename(at / "adapter_model.bin")
    _refused(loaded, at, "pickle")
    (at / "adapter_model.bin").unlink()
    _refused(loaded, at, "has no adapter_model.safetensors")
    (at / "adapter_config.json").write_text("{")
    _refused(loaded, at, "not valid JSON")
    (at / "adapter_config.json").write_text("[" * 100_000)
    _refused(loaded, at, "not valid JSON")
    _refused(loaded, tmp_path / "nowhere", "No such file")


def test_files_that_go_or_change_while_they_are_read(tiny, tmp_path, monkeypatch) -> None:
    loaded = load_model(str(tiny("llama")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    weights = at / "adapter_model.safetensors"
    check = Loras._check_shape
    other = save({"other": torch.zeros(1)})
    for change, text in (
        (lambda: weights.write_bytes(other), "changed while it was read"),
        (lambda: weights.unlink(missing_ok=True), "No such file"),
    ):
        monkeypatch.setattr(
            Loras, "_check_shape", staticmethod(lambda *given, c=change: (check(*given), c()))
        )
        kept = weights.read_bytes()
        _refused(loaded, at, text)
        weights.write_bytes(kept)


def test_a_router_is_no_linear_layer(tiny, tmp_path) -> None:
    """Some inherit from nn.Linear and return more than one tensor."""

    class Router(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows), rows

    loaded = load_model(str(tiny("llama")))
    loaded.decoder.layers[0].self_attn.q_proj = Router(48, 48)
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    _refused(loaded, at, "which is no linear layer of the decoder")


def test_several_devices_refuse_adapters(tmp_path) -> None:
    config = EngineConfig(
        model=ModelConfig(path=str(tmp_path)), tensor_parallel=2,
        loras=(LoraSource("red", str(tmp_path)),),
    )  # fmt: skip
    with pytest.raises(StartupError, match="LoRA adapters run on one device"):
        _load_runner(config)


def test_models_with_recurrent_state_refuse_adapters(tiny, tmp_path) -> None:
    loaded = load_model(str(tiny("lfm2")))
    at = write_adapter(tmp_path / "a", loaded.model, 1)
    _refused(loaded, at, "recurrent state")
