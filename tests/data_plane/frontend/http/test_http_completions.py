"""/v1/completions: prompts of every form, echo, logprobs, several prompts times n."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from foveal_runtime.frontend.protocol.requests import CompletionRequest
from foveal_runtime.frontend.protocol.responses import Completion
from foveal_runtime.plan.config import RequestDefaults

PATH = "/v1/completions"


async def post(harness: Any, **body: Any) -> dict[str, Any]:
    response = await harness.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    Completion.model_validate(answer)
    return answer


async def test_forms_of_a_prompt(harness: Any) -> None:
    for prompt in ("ab", [97, 98], ["ab"], [[97, 98]]):
        answer = await post(harness, prompt=prompt)
        assert answer["choices"][0]["text"] == "Hello, world!"
        assert harness.generator.requests[-1].token_ids == [97, 98]
        assert answer["usage"]["prompt_tokens"] == 2
    assert harness.generator.requests[-1].sampling.max_tokens == 16


async def test_several_prompts_and_choices(harness: Any) -> None:
    harness.generator.script = lambda request: request.token_ids
    answer = await post(harness, prompt=["one", "two", "three"], n=2)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["one", "one", "two", "two", "three", "three"]
    assert answer["usage"]["prompt_tokens"] == len("onetwothree")
    ids = [request.request_id for request in harness.generator.requests]
    assert len(set(ids)) == 6
    events = await harness.stream(PATH, prompt=["one", "two", "three"], n=2)
    streamed = ["".join(c["text"] for e in events for c in e["choices"] if c["index"] == i)
                for i in range(6)]  # fmt: skip
    assert streamed == texts


@pytest.mark.parametrize("prompt", ["abcd", [97, 98, 99, 100]])
async def test_echo_shows_what_truncation_kept(harness: Any, prompt: Any) -> None:
    """It showed the whole prompt, and offsets of tokens were those of another text."""
    asked = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2}
    for size, text in ((2, "cdHe"), (9, "abcdHe")):
        asked["truncate_prompt_tokens"] = size
        answer = await post(harness, **asked)
        (choice,) = answer["choices"]
        assert choice["text"] == text
        assert "".join(choice["logprobs"]["tokens"]) == text
        assert choice["logprobs"]["text_offset"] == list(range(len(text)))
        events = await harness.stream(PATH, **asked)
        assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_echo_with_logprobs_covers_the_prompt(harness: Any) -> None:
    harness.say[0] = "cd"
    answer = await post(harness, prompt="ab", echo=True, logprobs=2, max_tokens=2)
    choice = answer["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][2]["c"] == -0.5
    assert not harness.generator.requests[0].read_prefix_cache
    events = await harness.stream(PATH, prompt="ab", echo=True, logprobs=0, max_tokens=2)
    tokens = [t for e in events for c in e["choices"] for t in c["logprobs"]["tokens"]]
    offsets = [t for e in events for c in e["choices"] for t in c["logprobs"]["text_offset"]]
    assert (tokens, offsets) == (["a", "b", "c", "d"], [0, 1, 2, 3])
    assert "".join(c["text"] for e in events for c in e["choices"]) == "abcd"


async def test_offsets_are_places_in_the_text(harness: Any) -> None:
    """Tokens that the text leaves out moved all that came behind them."""
    processor = TemplateProcessing("<|system|> $A", special_tokens=[("<|system|>", 259)])
    harness.app.service.tokenizer.hf.backend_tokenizer.post_processor = processor
    harness.generator.script = lambda _: [99, 257, 100]
    for skips, text, places in (
        (True, "a<|end|>bcd", [0, 0, 1, 8, 9, 10, 10, 11]),
        (False, "a<|end|>bc<|user|>d<|end|>", [0, 0, 1, 8, 9, 10, 18, 19]),
    ):
        options = {
            "prompt": "a<|end|>b", "echo": True, "logprobs": 0, "skip_special_tokens": skips,
            "include_stop_str_in_output": True,
        }  # fmt: skip
        [choice] = (await post(harness, **options))["choices"]
        assert choice["text"] == text
        assert choice["logprobs"]["text_offset"] == places
        events = await harness.stream(PATH, **options)
        offsets = [t for e in events for c in e["choices"] for t in c["logprobs"]["text_offset"]]
        assert offsets == places


async def test_alternatives_of_one_name_are_the_likeliest(harness: Any) -> None:
    """Bytes of different characters are all spelt U+FFFD: the last one stood for them."""
    harness.generator.script = lambda _: [0xE9, 0x97]
    [choice] = (await post(harness, prompt="a", logprobs=2, max_tokens=2))["choices"]
    assert choice["logprobs"]["tokens"] == ["\ufffd", "\ufffd"]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -0.5}, {"\ufffd": -0.5}]


async def test_scoring_only(harness: Any) -> None:
    """max_tokens 0 with echo: the prompt's logprobs and nothing else (evaluation harnesses)."""
    answer = await post(harness, prompt="ab", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 0
    options = {"echo": True, "logprobs": 0, "max_tokens": 0}
    counted = {"stream_options": {"include_usage": True}}
    events = await harness.stream(PATH, prompt="ab", **options, **counted)
    assert events[-1]["usage"]["completion_tokens"] == 0
    [streamed] = [event["choices"][0] for event in events[:-1]]
    assert (streamed["text"], streamed["finish_reason"]) == ("ab", "length")
    assert streamed["logprobs"]["tokens"] == ["a", "b"]
    refused = await harness.http.post(PATH, json={"prompt": "ab", "max_tokens": 0})
    assert refused.json()["error"]["param"] == "max_tokens"


async def test_token_ids_and_usage_while_streaming(harness: Any) -> None:
    harness.say[0] = "xy"
    events = await harness.stream(
        PATH, prompt="ab", return_token_ids=True, stream_options={"include_usage": True}
    )
    assert events[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    tokens = [t for e in events for c in e["choices"] for t in c["token_ids"]]
    assert tokens == [120, 121, 256]
    assert events[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_sampling_options_reach_the_engine(harness: Any) -> None:
    await post(
        harness, prompt="a", temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-2,
        repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias={"5": 2, "6": -100}, min_tokens=1, max_tokens=3, ignore_eos=True, priority=-2,
        cache_salt="s",
    )  # fmt: skip
    request = harness.generator.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed) == (0.1, 2**64 - 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((5, 2.0), (6, -100.0))
    assert (sampling.min_tokens, sampling.max_tokens, sampling.ignore_eos) == (1, 3, True)
    assert (request.priority, request.cache_salt) == (-2, b"s")


async def test_a_seed_of_minus_one_is_none(harness: Any) -> None:
    """Clients that were written for other servers send it for a random one."""
    for _ in range(2):
        await post(harness, prompt="a", seed=-1)
    first, second = (request.sampling.seed for request in harness.generator.requests)
    assert len({first, second, 2**64 - 1}) == 3


async def test_defaults_come_from_generation_config(start: Any, model_path: Any) -> None:
    path = model_path / "generation_config.json"
    path.write_text('{"temperature": 0.25, "top_k": 7, "do_sample": false, "max_new_tokens": 9}')
    try:
        async with start() as harness:
            await post(harness, prompt="a", max_tokens=4)
            await harness.chat("a", top_k=0)
    finally:
        path.unlink()
    first, second = (request.sampling for request in harness.generator.requests)
    assert (first.temperature, first.top_k, first.top_p, first.max_tokens) == (0.25, 7, 1.0, 4)
    assert (second.temperature, second.top_k, second.max_tokens) == (0.25, 0, 9)


@pytest.mark.parametrize(
    ("name", "values"),
    [("temperature", (0, 100, -0.1, 100.1)), ("top_p", (0.1, 1, 0, 1.1)),
     ("top_k", (-1, 2**31 - 1, -2, 2**31)), ("min_p", (0, 1, -0.1, 1.1)),
     ("repetition_penalty", (0.1, 100, 0, 100.1)), ("max_tokens", (1, 9, -1, 1.5))],
)  # fmt: skip
def test_a_default_is_taken_where_a_request_with_it_would_be(
    name: str, values: tuple[float, float, float, float]
) -> None:
    """The bounds stand in two places, since the operator knows no requests."""
    for number, value in enumerate(values):
        wrong = contextlib.nullcontext() if number < 2 else pytest.raises(ValueError)
        with wrong:
            CompletionRequest.model_validate({"model": "m", "prompt": "a", name: value})
        with wrong:
            msgspec.convert({name: value}, RequestDefaults)


async def test_the_servers_defaults_come_before_the_checkpoints(
    start: Any, model_path: Any
) -> None:
    path = model_path / "generation_config.json"
    path.write_text('{"temperature": 0.25, "top_p": 0.5, "top_k": 7, "max_new_tokens": 9}')
    given = RequestDefaults(temperature=0.0, top_k=-1, max_tokens=3, repetition_penalty=1.5)
    try:
        async with start(request_defaults=given) as harness:
            await post(harness, prompt="a")
            await harness.chat("a", temperature=0.75, top_k=2, max_tokens=4)
    finally:
        path.unlink()
    first, second = (request.sampling for request in harness.generator.requests)
    assert (first.temperature, first.top_p, first.top_k) == (0.0, 0.5, 0)
    assert (first.repetition_penalty, first.max_tokens) == (1.5, 3)
    assert (second.temperature, second.top_p, second.top_k) == (0.75, 0.5, 2)
    assert (second.repetition_penalty, second.max_tokens) == (1.5, 4)
