"""Agents' conversations replayed turn by turn: all are answered, and each turn finds the last."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.support.processes.transcripts import browser_agent, coding_agent, requests_of

pytestmark = pytest.mark.timeout(300)
BLOCK_TOKENS = 16


def screenshots(seed, count):
    """data: URLs of images that no other test sends."""
    found = []
    for number in range(count):
        drawn = np.random.default_rng([seed, number])
        buffer = io.BytesIO()
        Image.fromarray(drawn.integers(0, 255, (48, 48, 3), dtype=np.uint8)).save(buffer, "PNG")
        found.append("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())
    return found


def chat_usage(usage):
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def messages_usage(usage):
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


@pytest.mark.parametrize(
    ("path", "conversation", "num_images", "read"),
    [
        ("/v1/chat/completions", coding_agent, 2, chat_usage),
        ("/v1/messages", browser_agent, 4, messages_usage),
    ],
    ids=["coding", "browser"],
)
def test_a_transcript_is_answered_turn_by_turn(shared, path, conversation, num_images, read):
    asker = shared[1]
    processed = asker.metric("foveal_media_items_processed_total")
    requests = list(requests_of(conversation(screenshots(num_images, num_images))))
    assert len(requests) >= 4
    last_prompt = last_cached = 0
    for number, body in enumerate(requests):
        answer = asker.http.post(path, json=body)
        assert answer.status_code == 200, (number, answer.text)
        num_prompt, num_cached = read(answer.json()["usage"])
        assert num_prompt > last_prompt
        if number:
            # All of the last prompt but what does not fill a block.
            assert num_cached >= last_prompt - BLOCK_TOKENS, number
            assert num_cached > last_cached
        last_prompt, last_cached = num_prompt, num_cached
    assert asker.metric("foveal_media_items_processed_total") - processed == num_images
    streamed = asker.http.post(path, json={**requests[-1], "stream": True})
    assert streamed.status_code == 200
    assert streamed.text.rstrip().endswith(("[DONE]", '"message_stop"}'))
