"""/v1/chat/completions over real HTTP: whole and streamed answers, media parts, options."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import openai
import pytest

from foveal_runtime.frontend.protocol.responses import ChatCompletion, ChatCompletionChunk
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE
from foveal_runtime.plan.config import RequestDefaults
from foveal_runtime.plan.errors import StartupError

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def image(url: str | None = PIXEL, **more: Any) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "image_url", **more}
    if url is not None:
        part["image_url"] = {"url": url}
    return part


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


async def test_whole_answer(harness: Any) -> None:
    response = await harness.chat("hi")
    assert response.status_code == 200
    answer = ChatCompletion.model_validate(response.json())
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None
    prompt = harness.generator.requests[0].token_ids
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len("Hello, world!") + 1
    assert bytes(t for t in prompt if t < 256) == b"hi"


async def test_stream_equals_whole_answer(harness: Any) -> None:
    harness.say[0] = "Grüße, 世界! 🙂"
    events = await harness.stream(**harness.body(), stream_options={"include_usage": True})
    for event in events:
        ChatCompletionChunk.model_validate(event)
    assert text_of(events) == harness.say[0]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == len(harness.say[0].encode()) + 1
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len({event["id"] for event in events}) == 1


async def test_usage_is_absent_unless_asked_for(harness: Any) -> None:
    events = await harness.stream(**harness.body())
    assert all("usage" not in event for event in events)
    events = await harness.stream(
        **harness.body(), stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert [e["usage"]["completion_tokens"] for e in events[1:4]] == [1, 2, 3]


async def test_media_parts_in_order(harness: Any) -> None:
    content = [
        image(uuid="first"),
        {"type": "text", "text": "what"},
        {"type": "video_url", "video_url": {"url": "https://example.org/v.mp4"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        image(None, uuid="first"),
        image(None, uuid="first", image_url=None),
    ]
    response = await harness.chat(content, mm_processor_kwargs={"size": 3}, cache_salt="salt")
    assert response.status_code == 200, response.text
    parts, options = harness.processor.seen[0]
    assert [p.modality for p in parts] == ["image", "video", "audio", "image", "image"]
    assert [p.path for p in parts] == [f"messages[0].content[{i}]" for i in (0, 2, 3, 4, 5)]
    assert parts[0].url == PIXEL
    assert parts[2].url == "data:audio/wav;base64,AAAA"
    assert parts[3].is_uuid_only
    assert parts[4].is_uuid_only
    assert options.mm_processor_kwargs == {"size": 3}
    assert options.cache_salt == "salt"
    assert harness.generator.requests[0].token_ids.count(IMAGE) == 3
    assert [source.num_releases for source in harness.processor.sources] == [1] * 5


async def test_choices_share_media_and_differ_in_seed(harness: Any) -> None:
    response = await harness.chat([image()], n=3, seed=5)
    answer = ChatCompletion.model_validate(response.json())
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 3 * (len("Hello, world!") + 1)
    assert answer.usage.prompt_tokens == len(harness.generator.requests[0].token_ids)
    seeds = [request.sampling.seed for request in harness.generator.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 3
    assert len(harness.processor.seen) == 1
    assert [source.num_releases for source in harness.processor.sources] == [1]
    events = await harness.stream(**harness.body(n=3, seed=5))
    assert [text_of(events, i) for i in range(3)] == ["Hello, world!"] * 3
    assert [r.sampling.seed for r in harness.generator.requests[3:]] == seeds


async def test_stop_strings_end_the_engine_request(harness: Any) -> None:
    harness.say[0] = "one two three"
    answer = (await harness.chat(stop=[" th", "wo t"])).json()["choices"][0]
    assert answer["message"]["content"] == "one t"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "wo t")
    assert harness.generator.aborted
    assert not harness.generator.finished
    events = await harness.stream(**harness.body(stop="two", include_stop_str_in_output=True))
    assert text_of(events) == "one two"


async def test_stop_tokens_and_limits(harness: Any) -> None:
    harness.say[0] = "abcdef"
    answer = (await harness.chat(stop_token_ids=[ord("c")])).json()["choices"][0]
    assert (answer["message"]["content"], answer["stop_reason"]) == ("ab", ord("c"))
    answer = (await harness.chat(max_completion_tokens=4)).json()["choices"][0]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("abcd", "length")
    assert harness.generator.requests[-1].sampling.max_tokens == 4


async def test_logprobs_and_token_ids(harness: Any) -> None:
    harness.say[0] = "é"
    response = await harness.chat(
        logprobs=True, top_logprobs=2, return_token_ids=True, prompt_logprobs=1
    )
    body = response.json()
    ChatCompletion.model_validate(body)
    choice = body["choices"][0]
    assert choice["token_ids"] == [*"é".encode(), 256]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"][:2]] == [[195], [169]]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    assert body["prompt_token_ids"] == harness.generator.requests[0].token_ids
    assert body["prompt_logprobs"][0] is None
    assert not harness.generator.requests[0].read_prefix_cache
    events = await harness.stream(**harness.body(logprobs=True))
    found = [c["logprobs"]["content"] for e in events for c in e["choices"] if c["logprobs"]]
    assert sum(map(len, found)) == 3


async def test_logprobs_of_named_tokens(harness: Any) -> None:
    answer = await harness.chat(logprobs=True, logprob_token_ids=[65, 66, 67])
    assert answer.status_code == 200, answer.text
    sampling = harness.generator.requests[-1].sampling
    assert (sampling.logprobs, sampling.logprob_token_ids) == (3, (65, 66, 67))
    assert (await harness.chat(logprob_token_ids=[])).status_code == 200
    for wrong, says in (
        ({}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 1}, "exclude each other"),
        ({"logprobs": True, "logprob_token_ids": [65, 65]}, "twice"),
        ({"logprobs": True, "logprob_token_ids": [1 << 20]}, "not a token id below"),
    ):
        refused = await harness.chat(**{"logprob_token_ids": [65], **wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logprob_token_ids"
        assert says in refused.json()["error"]["message"]


async def test_continue_final_message(harness: Any) -> None:
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": "say"},
        {"role": "assistant", "content": "Hel"},
    ]
    response = await harness.http.post(
        "/v1/chat/completions", json={"messages": messages, "continue_final_message": True}
    )
    assert response.status_code == 200, response.text
    prompt = harness.app.service.tokenizer.decode(harness.generator.requests[0].token_ids)
    assert prompt == "<|system|>be short<|end|><|user|>say<|end|><|assistant|>Hel"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts(harness: Any, stream: bool) -> None:
    """Closing the connection reaches the engine, streamed or not, and gives everything back."""
    harness.generator.hold = asyncio.Event()
    body = harness.body([image()], stream=stream)

    async def ask() -> None:
        async with harness.http.stream("POST", "/v1/chat/completions", json=body) as response:
            await response.aread()

    task = asyncio.create_task(ask())
    await harness.until(lambda: harness.generator.running)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await harness.until(lambda: not harness.app.gate.num_requests)
    assert len(harness.generator.aborted) == 1
    assert harness.processor.sources[0].num_releases == 1


async def test_openai_clients(harness: Any) -> None:
    """The official client, asynchronous and synchronous, streamed and not."""
    client = openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key="none", max_retries=0)
    async with client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], user="me", store=False
        )
        assert answer.choices[0].message.content == "Hello, world!"
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "hi"}]
            )
        assert caught.value.code == "not_found"
        assert "'tiny'" in str(caught.value)

    def synchronous() -> list[str]:
        with openai.OpenAI(base_url=f"{harness.url}/v1", api_key="none") as sync:
            done = sync.completions.create(model="tiny", prompt="once", max_tokens=5)
            parts = sync.completions.create(model="tiny", prompt="once", max_tokens=5, stream=True)
            models = [model.id for model in sync.models.list()]
            return [done.choices[0].text, "".join(p.choices[0].text for p in parts), *models]

    assert await asyncio.to_thread(synchronous) == ["Hello", "Hello", "tiny"]


async def test_the_servers_template_and_its_variables(start: Any) -> None:
    template = "{{ messages[0].content }} {{ mood }} {{ enable_thinking }}"
    variables = {"mood": "calm", "enable_thinking": False}
    asked = [{}, {"chat_template_kwargs": {"mood": "glad"}}, {"reasoning_effort": "high"}]
    async with start(
        chat_template=template, request_defaults=RequestDefaults(chat_template_kwargs=variables)
    ) as harness:
        for more in asked:
            assert (await harness.chat("hi", **more)).status_code == 200
        counted = await harness.http.post("/tokenize", json=harness.body("hi"))
        shown = await harness.http.get("/tokenizer_info")
    said = [bytes(request.token_ids).decode() for request in harness.generator.requests]
    assert said == ["hi calm False", "hi glad False", "hi calm True"]
    assert counted.json()["tokens"] == list(harness.generator.requests[0].token_ids)
    assert shown.json()["chat_template"] == template


@pytest.mark.parametrize(
    ("config", "said"),
    [({"chat_template": "{{ messages }}\n{% if %}"}, "the chat template's line 2: Expected an exp"),
     ({"request_defaults": RequestDefaults(chat_template_kwargs={"tools": []})},
      "request defaults: chat_template_kwargs may not set 'tools'")],
)  # fmt: skip
async def test_wrong_templates_and_variables_end_the_start(
    start: Any, config: Any, said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        async with start(**config):
            pass
