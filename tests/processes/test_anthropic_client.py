"""The anthropic package, unmodified, against real processes: texts equal those of chat."""

from __future__ import annotations

import base64

import anthropic
import pytest
from evaluate import to_request

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture
def client(shared):
    with anthropic.Anthropic(base_url=shared[1].url, api_key="none", max_retries=0) as client:
        yield client


def turns_of(sample):
    """The sample's question with its pictures as Anthropic's blocks."""
    system, turns = [], []
    for message in to_request(sample, "tiny-vlm")["messages"]:
        content = message["content"]
        if message["role"] == "system":
            system.append(content if isinstance(content, str) else content[0]["text"])
            continue
        if not isinstance(content, str):
            content = [_block(part) for part in content]
        turns.append({"role": message["role"], "content": content})
    return {"messages": turns} | ({"system": "\n".join(system)} if system else {})


def _block(part):
    if part["type"] == "text":
        return {**part, "cache_control": {"type": "ephemeral"}}
    head, _, data = part["image_url"]["url"].partition(",")
    assert base64.b64decode(data)
    media_type = head.removeprefix("data:").removesuffix(";base64")
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": data},
    }


def options(sample, longest_reply):
    return {
        "model": "tiny-vlm", "max_tokens": longest_reply, **turns_of(sample),
        "extra_body": {"temperature": 0},  # not among the package's own arguments any more
    }  # fmt: skip


def test_answers_are_those_of_chat(client, samples, longest_reply):
    for sample in samples[::7]:
        answer = client.messages.create(**options(sample, longest_reply))
        assert answer.content[0].text == sample.reference
        assert answer.role == "assistant"
        assert answer.type == "message"
        if answer.usage.output_tokens < longest_reply:
            assert answer.stop_reason == "end_turn"


def test_an_image_sent_by_one_api_is_a_hit_for_the_other(shared, client, samples, longest_reply):
    sample = next(sample for sample in samples if sample.pictures)
    asker = shared[1]
    asker.check(sample)
    before = asker.metric("foveal_media_items_processed_total")
    answer = client.messages.create(**options(sample, longest_reply))
    assert answer.content[0].text == sample.reference
    assert answer.usage.cache_read_input_tokens > 0
    assert asker.metric("foveal_media_items_processed_total") == before


def test_stream_helper(client, samples, longest_reply):
    for sample in samples[:3]:
        with client.messages.stream(**options(sample, longest_reply)) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == sample.reference == final.content[0].text
        assert final.usage.output_tokens > 0
        assert final.stop_reason


def test_tokens_are_counted_as_they_are_used(client, samples):
    sample = next(sample for sample in samples if sample.pictures)
    counted = client.messages.count_tokens(model="tiny-vlm", **turns_of(sample))
    usage = client.messages.create(**options(sample, 1)).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors_are_the_packages_own(client, samples):
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**options(samples[0], 4), "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**options(samples[0], 20_000))
