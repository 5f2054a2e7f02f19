"""Every supported architecture says what transformers' own forward says, token by token.

Chunked prefill under a small odd budget, staggered admission, preemption, prefix reuse and shared
encoder outputs, in fp32 on random weights; compared are greedy tokens and all their logits.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from foveal_runtime.engine.step import MMInput
from foveal_runtime.model.loader import class_for, read_config
from foveal_runtime.model.runner import TorchRunner
from foveal_runtime.model.sampler import Sampler
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import pack_item

pytestmark = pytest.mark.model

TOLERANCE = 2e-5
TEXT_NAMES = [
    "llama",
    "mistral_sliding",
    "gemma2_softcap",
    "gpt_oss_sinks",
    "cohere2",
    "qwen3_moe",
    "llama4_text",
    "deepseek_v3_mla",
]
MEDIA_NAMES = [
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "idefics3",
    "smolvlm",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "gemma3",
    "paligemma",
    "paligemma2",
    "voxtral",
    "audioflamingo3",
    "qwen2_audio",
]
NUM_OUTPUTS = 6


class RecordingSampler(Sampler):
    """Greedy, and keeps the logits of every output token by (request id, output index)."""

    def __init__(self) -> None:
        super().__init__(())
        self.logits: dict[tuple[str, int], torch.Tensor] = {}

    def sample(self, logits, sequences, failed=None):
        for row, sequence in zip(logits, sequences, strict=True):
            self.logits[sequence.request_id, len(sequence.output_token_ids)] = row.clone()
        return super().sample(logits, sequences, failed)


def pack(item) -> bytes:
    fields = {}
    for name, tensor in item.fields.items():
        fields[name] = (str(tensor.dtype).removeprefix("torch."), tensor.numpy())
    return pack_item(item.modality, tuple(item.ids), item.embed_runs, fields)


class Bench:
    """One runner, and transformers' own model beside it."""

    def __init__(self, name: str, path, checkpoints: ModuleType, drivers: ModuleType, **options):
        torch.set_num_threads(1)
        self.case = checkpoints.CASES[name]
        self.checkpoints = checkpoints
        self.drivers = drivers
        self.path = str(path)
        self.sampler = RecordingSampler()
        self.runner = TorchRunner.load(
            self.path, num_blocks=96, block_size=8, attention="torch", sampler=self.sampler
        )
        self.driver = drivers.StepDriver(self.runner, 96, self.case.budget, **options)
        config = read_config(self.path)
        self.reference = class_for(config).from_pretrained(self.path).eval()

    def prompt(self, seed: int, items=(), **options):
        return self.checkpoints.make_prompt(self.case, seed, list(items), **options)

    def job(self, request_id: str, prompt, start_step: int = 0, **sampling):
        values = tuple(pack(item) for item in prompt.items)
        inputs = tuple(
            MMInput(
                hashlib.sha256(value).digest(),
                item.modality,
                PlaceholderRange(offset, len(item.ids), item.embed_runs),
            )
            for value, item, offset in zip(values, prompt.items, prompt.offsets, strict=True)
        )
        params = SamplingParams(max_tokens=NUM_OUTPUTS, temperature=0.0, **sampling)
        return self.drivers.Job(request_id, prompt.ids, inputs, values, params, start_step)

    @torch.inference_mode()
    def deviation(self, job, prompt) -> float:
        """Largest |difference| of any logit of the job's outputs; checks greedy tokens, too."""
        ids = torch.tensor([job.tokens[:-1]])
        whole = replace(prompt, ids=job.tokens[:-1])
        kwargs = self.case.forward_kwargs(whole)
        logits = self.reference(input_ids=ids, use_cache=False, **kwargs).logits[0]
        logits = logits[len(prompt.ids) - 1 :]
        ours = torch.stack([self.sampler.logits[job.request_id, i] for i in range(NUM_OUTPUTS)])
        assert logits.shape == ours.shape
        self.spread = float(logits.std())
        self.tokens_equal = logits.argmax(-1).tolist() == job.outputs
        return float((logits - ours).abs().max())

    def check(self, job, prompt) -> None:
        assert job.request_id not in self.driver.failed, self.driver.failed
        difference = self.deviation(job, prompt)
        assert difference <= TOLERANCE, (job.request_id, difference, self.spread)
        assert self.tokens_equal
        assert self.spread > 0.2

    @torch.inference_mode()
    def generate(self, prompt) -> list[int]:
        kwargs = self.case.forward_kwargs(prompt)
        out = self.reference.generate(
            input_ids=torch.tensor([prompt.ids]),
            attention_mask=torch.ones(1, len(prompt.ids), dtype=torch.long),
            max_new_tokens=NUM_OUTPUTS,
            min_new_tokens=NUM_OUTPUTS,
            do_sample=False,
            eos_token_id=-1,
            **kwargs,
        )
        return out[0, len(prompt.ids) :].tolist()


@pytest.fixture
def bench(tiny, checkpoints, driver_module):
    def make(name: str, **options) -> Bench:
        return Bench(name, tiny(name), checkpoints, driver_module, **options)

    return make


@pytest.mark.parametrize("name", TEXT_NAMES + MEDIA_NAMES)
def test_equals_transformers(name: str, bench) -> None:
    one = bench(name)
    kinds = list(one.case.items)
    # Two prompts share an item, one is text only, one has all kinds; b, c arrive while a runs.
    mixed = [(kind, 7 + kind) for kind in kinds]
    prompts = {
        "a": one.prompt(11, mixed, num_text=9),
        "b": one.prompt(12, [*mixed[:1], *[(k, 30 + k) for k in kinds[:1]]]),
        "c": one.prompt(13, mixed[-1:], num_text=21),
        "d": one.prompt(14, [], num_text=30),
    }
    starts = {"a": 0, "b": 1, "c": 2, "d": 4}
    jobs = {name: one.job(name, prompt, starts[name]) for name, prompt in prompts.items()}
    one.driver.run(list(jobs.values()), preempt={5: "a", 8: "b"})
    for key, job in jobs.items():
        one.check(job, prompts[key])
    assert jobs["a"].outputs == one.generate(prompts["a"])
    distinct = {one.mm_hash for job in jobs.values() for one in job.mm_inputs}
    assert one.driver.num_encodes == len(distinct)

    # The same prompt again reads its prefix from the pool and needs no encoder.
    again = one.job("again", prompts["a"])
    one.driver.run([again])
    one.check(again, prompts["a"])
    if one.driver.rule != "prompt":
        assert again.num_cached > 0
    assert one.driver.num_encodes == len(distinct)


@pytest.mark.parametrize("name", ["llava"])
def test_control_hash_without_item_keys_is_seen(name: str, bench) -> None:
    """Prompts that differ only in the image must not share blocks; if they do, logits differ."""
    one = bench(name, image_keys=False)
    first, second = one.prompt(11, [(0, 1)]), one.prompt(11, [(0, 2)])
    assert first.ids == second.ids
    a, b = one.job("a", first), one.job("b", second)
    one.driver.run([a])
    one.check(a, first)
    one.driver.run([b])
    assert b.num_cached > 0
    assert one.deviation(b, second) > 0.1
