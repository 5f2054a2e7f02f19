"""The runner's own promises: failures stay with their request, logprobs, KV sizes, traits."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from foveal_runtime.engine.types.step import EncoderInput, NewRequest, ScheduledRequest, StepPlan
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.model.runner.traits import end_ids
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire.item import pack_item


def test_a_wrong_item_fails_its_request_alone(bench) -> None:
    one = bench("llava")
    good, bad = one.prompt(1, [(0, 1)]), one.prompt(2, [(0, 2)])
    jobs = [one.job("good", good), one.job("bad", bad)]
    value = pack_item(0, (3,) * 16, ((0, 16),), {})
    jobs[1].values = (value,)
    one.driver.run(jobs)
    assert set(one.driver.failed) == {"bad"}
    assert "lacks the field pixel_values" in one.driver.failed["bad"]
    one.check(jobs[0], good)


def test_wrong_grids_fail_the_request_alone(bench) -> None:
    """Positions and encoders allocate by the grid: it is checked before anything else."""
    one = bench("qwen2_vl")
    good, bad = one.prompt(1, [(0, 1)]), one.prompt(2, [(0, 2)])
    flat = one.prompt(3, [(0, 3)])
    bad.items[0].fields["image_grid_thw"] = torch.tensor([[1, 1 << 40, 2]])
    flat.items[0].fields["image_grid_thw"] = flat.items[0].fields["image_grid_thw"][0]
    jobs = [one.job("good", good), one.job("bad", bad), one.job("flat", flat)]
    one.driver.run(jobs)
    assert "does not make 6 embeddings" in one.driver.failed["bad"]
    assert "is of the shape [3]; [1, 3] is needed" in one.driver.failed["flat"]
    one.check(jobs[0], good)


@pytest.mark.parametrize("error", [IndexError, OverflowError, ZeroDivisionError, KeyError])
def test_positions_that_cannot_be_made_fail_the_request_alone(
    bench, monkeypatch, error: type[Exception]
) -> None:
    """An item's fields reach the model's own code, which raises anything for those that do not fit:
    an injected video's times, say. It ended the engine, and then the next one."""
    one = bench("qwen2_vl")
    good, bad = one.prompt(1, [(0, 1)]), one.prompt(2, [(0, 2)])
    jobs = [one.job("good", good), one.job("bad", bad)]
    core, made = one.runner.loaded.core, one.runner.loaded.core.get_rope_index

    def make(*, input_ids, **more):
        if input_ids[0].tolist() == list(jobs[1].prompt):
            raise error("of the model's own")
        return made(input_ids=input_ids, **more)

    monkeypatch.setattr(core, "get_rope_index", make)
    one.driver.run(jobs)
    assert "grids do not fit the prompt" in one.driver.failed["bad"]
    one.check(jobs[0], good)


def test_items_out_of_order_fail_the_request(bench) -> None:
    one = bench("llava")
    prompt = one.prompt(1, [(0, 1), (0, 2)])
    job = one.job("a", prompt)
    job.mm_inputs = job.mm_inputs[::-1]
    one.driver.run([job])
    assert one.driver.failed == {"a": "items are not in prompt order"}


def test_an_output_that_is_not_there_fails_the_request(bench) -> None:
    """A plan that forgot to encode must not compute on placeholder embeddings."""
    one = bench("llava")
    prompt = one.prompt(1, [(0, 1)])
    job = one.job("a", prompt)
    one.driver.encoded.add(job.mm_inputs[0].mm_hash)
    one.driver.run([job])
    assert "not on the device" in one.driver.failed["a"]


def test_a_failed_request_can_come_back(bench) -> None:
    one = bench("llava")
    prompt = one.prompt(1, [(0, 1)])
    job = one.job("a", prompt)
    new = NewRequest("a", prompt.ids, len(prompt.ids), job.mm_inputs, job.values, job.sampling)
    window = ScheduledRequest("a", 0, len(prompt.ids), [1, 2, 3, 4], True)
    first = one.runner.execute(StepPlan(0, new=[new], scheduled=[window]))
    assert list(first.failed) == ["a"]
    again = one.runner.execute(StepPlan(1, scheduled=[window]))
    assert list(again.failed) == ["a"]
    encode = EncoderInput(job.mm_inputs[0].mm_hash, 0, 16, job.values[0])
    last = one.runner.execute(StepPlan(2, new=[new], scheduled=[window], encode=[encode]))
    assert not last.failed
    assert len(last.sampled) == 1


def test_an_encoding_that_fails_is_told_by_its_key(bench) -> None:
    """Regression: the reason stayed with the requests of the same step; who hit the same key in
    a later step found no output, and the scheduler believed in one."""
    one = bench("llava")
    good, bad = one.prompt(1, [(0, 1)]), one.prompt(2, [(0, 2)])
    jobs = [one.job("good", good), one.job("bad", bad)]
    jobs[1].values = (pack_item(0, (3,) * 16, ((0, 16),), {}),)
    inputs = [EncoderInput(job.mm_inputs[0].mm_hash, 0, 16, job.values[0]) for job in jobs]
    result = one.runner.execute(StepPlan(0, encode=inputs))
    assert list(result.failed_encodes) == [jobs[1].mm_inputs[0].mm_hash]
    assert "lacks the field pixel_values" in result.failed_encodes[jobs[1].mm_inputs[0].mm_hash]
    assert not result.failed
    again = one.runner.execute(StepPlan(1, encode=inputs[:1]))
    assert not again.failed_encodes


@torch.inference_mode()
def test_prompt_logprobs_equal_the_plain_forward(bench) -> None:
    one = bench("llama")
    one.driver.reuse = False
    prompt = one.prompt(5, num_text=40)
    job = one.job("a", prompt, prompt_logprobs=2)
    one.driver.run([job])
    logits = one.reference(input_ids=torch.tensor([prompt.ids])).logits[0]
    wanted = logits.log_softmax(-1)
    scored = [p for result in one.driver.results for p in result.prompt_logprobs]
    assert [p.start for p in scored] == [0, 17, 34]
    ours = [value for p in scored for value in p.logprobs]
    expected = wanted[:-1].gather(1, torch.tensor(prompt.ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(ours), expected, rtol=0, atol=2e-5)
    top = [ids for p in scored for ids in p.top_ids]
    assert top == [tuple(row) for row in wanted[:-1].topk(2).indices.tolist()]


def test_kv_sizes_come_from_the_probe(tiny) -> None:
    """MLA's keys and values differ in width; llava's decoder has 2 of 4 heads for keys."""
    runner = TorchRunner.load(str(tiny("deepseek_v3_mla")), attention="torch", block_size=8)
    assert [(x.key_dim, x.value_dim, x.num_kv_heads) for x in runner.layers] == [(16, 12, 4)] * 2
    assert runner.kv_block_bytes == 2 * 4 * (16 + 12) * 8 * 4
    assert runner.num_blocks == 0
    with pytest.raises(StartupError, match="2 is the least"):
        runner.allocate_kv(1)
    runner.allocate_kv(5)
    assert runner.num_blocks == 5
    half = TorchRunner.load(
        str(tiny("llava")), dtype="bfloat16", attention="torch", kv_bytes=1 << 16
    )
    assert half.kv_block_bytes == 2 * 2 * (8 + 8) * 16 * 2
    assert half.num_blocks == (1 << 16) // half.kv_block_bytes


def test_unknown_attention_backend_is_refused(tiny) -> None:
    loaded = load_model(str(tiny("llama")))
    with pytest.raises(StartupError, match="choose one of"):
        TorchRunner(loaded, attention="magic")


@pytest.mark.parametrize(
    ("name", "rule", "levels"),
    [
        ("llava", "none", 1),
        ("gemma3", "item", 1),
        ("paligemma", "prompt", 1),
        ("qwen3_vl", "none", 3),
    ],
)
def test_traits(name: str, rule: str, levels: int, tiny) -> None:
    traits = TorchRunner.load(str(tiny(name)), attention="torch").traits
    assert traits.bidirectional == rule
    assert traits.embed_levels == levels
    assert traits.embed_bytes == 32 * 4 * levels
    assert (traits.vocab_size, traits.max_position, traits.eos_token_ids) == (128, 512, (2,))
    assert traits.is_multimodal


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, (2,)),
        ({"generation_config.json": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"generation_config.json": {"temperature": 0.5}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "<|im_end|>"}}, (2, 9)),
        ({"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, (2, 9)),
        ({"special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}}, (2, 9)),
        (
            {
                "generation_config.json": {"eos_token_id": [5, 9]},
                "tokenizer_config.json": {"eos_token": "<|im_end|>"},
                "special_tokens_map.json": {"eos_token": "</s>"},
            },
            (5, 9),
        ),
        ({"tokenizer_config.json": {"eos_token": None}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "not one"}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": "<beyond>"}}, (2,)),
        ({"tokenizer_config.json": ["eos_token"], "tokenizer.json": 7}, (2,)),
    ],
    ids=str,
)
def test_answers_end_where_the_tokenizer_says_too(files, ids, tiny, tmp_path) -> None:
    """A model that was tuned to end its turns with <|im_end|> often keeps the generation_config of
    the one that it was tuned from; its answers went on with turns of the user."""
    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    spelled = {"</s>": 2, "<|im_end|>": 9, "<beyond>": 128}
    added = [{"id": id, "content": text, "special": True} for text, id in spelled.items()]
    tokenizer = {"version": "1.0", "added_tokens": added, "model": {"type": "BPE", "vocab": {}}}
    (tmp_path / "generation_config.json").unlink()
    for name, content in ({"tokenizer.json": tokenizer} | files).items():
        (tmp_path / name).write_text(json.dumps(content))
    assert end_ids(load_model(str(tmp_path))) == ids


def test_a_cut_group_is_an_error_of_the_plan(bench) -> None:
    """A chunk that ends inside a bidirectional group would compute wrong keys: never silently."""
    one = bench("gemma3", bidirectional="none")
    prompt = one.prompt(1, [(0, 1)], num_text=12)
    with pytest.raises(AssertionError, match="group was cut"):
        one.driver.run([one.job("a", prompt)])


def test_bfloat16_stays_close(bench, tiny) -> None:
    """Half precision end to end: every stage keeps the checkpoint's dtype."""
    one = bench("qwen3_vl")
    runner = TorchRunner.load(
        str(tiny("qwen3_vl")),
        dtype="bfloat16",
        attention="torch",
        num_blocks=64,
        block_size=8,
        sampler=one.sampler,
    )
    one.driver.runner = runner
    prompt = one.prompt(3, [(0, 1)])
    job = one.job("a", prompt)
    one.driver.run([job])
    assert one.deviation(job, prompt) < 1.0


def test_values_may_be_views(bench) -> None:
    """Items arrive as memoryviews on shared or received memory, read only."""
    one = bench("qwen2_vl")
    prompt = one.prompt(1, [(0, 1), (1, 2)])
    job = one.job("a", prompt)
    job.values = tuple(memoryview(value) for value in job.values)
    one.driver.run([job])
    one.check(job, prompt)
