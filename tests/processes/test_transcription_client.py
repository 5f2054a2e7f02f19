"""The openai package's transcriptions, unmodified, against real processes of a tiny audio model.

Its weights are random, so what it writes means nothing; but it is what the same model answers to
the same audio and words in a chat, and another recording gives another text.
"""

from __future__ import annotations

import base64
from pathlib import Path

import openai
import pytest

from tests.support.media_files import tone
from tests.support.models.tiny_media import save_tiny_audio

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
NAME = "tiny-audio"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def served(deployment_of, start_seconds, asker_for, tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("models") / NAME
    save_tiny_audio(path)
    with deployment_of(model=str(path), name=NAME) as deployment:
        deployment.wait_ready(start_seconds)
        yield asker_for(deployment.frontends[0].url)


def test_texts_are_those_of_a_chat_about_the_recording(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        texts = []
        for frequency in (200, 900):
            data = tone(frequency)
            options = {
                "model": NAME, "file": ("a.wav", data), "language": "en",
                "extra_body": {"max_completion_tokens": NUM_TOKENS},
            }  # fmt: skip
            found = client.audio.transcriptions.create(**options)
            assert found.usage.output_tokens == NUM_TOKENS
            words = (
                "Transcribe the speech in this audio. Answer with the transcript alone.\n"
                "The speech is in English."
            )
            audio = {"data": base64.b64encode(data).decode(), "format": "wav"}
            parts = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": words}]
            chat = client.chat.completions.create(
                model=NAME, temperature=0, max_completion_tokens=NUM_TOKENS,
                messages=[{"role": "user", "content": parts}],
            )  # fmt: skip
            assert found.text == chat.choices[0].message.content
            assert found.text
            stream = client.audio.transcriptions.create(**options, stream=True)
            assert (
                "".join(e.delta for e in stream if e.type == "transcript.text.delta") == found.text
            )
            texts.append(found.text)
        assert texts[0] != texts[1], "it hears nothing"
    assert served.metric("foveal_encoder_items_total") == 2, "each recording is encoded once"
