"""The openai package's embeddings client, unmodified, against real processes of the bundled model.

The vectors are those of plain transformers' hidden states, texts and images alike.
"""

from __future__ import annotations

import base64

import numpy as np
import openai
import pytest
from evaluate import to_request

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
TEXTS = ["How many shapes are there?", "Describe the image.", "a blue circle"]


@pytest.fixture(scope="module")
def reference(model_folder, samples):
    """reference(text or messages) → transformers' hidden states (T, E) after the last norm."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(model_folder)

    def hidden(sample) -> np.ndarray:
        if isinstance(sample, str):
            inputs = processor.tokenizer(sample, return_tensors="pt")
        else:
            text = processor.apply_chat_template(
                sample.messages, add_generation_prompt=False, tokenize=False
            )
            images = [picture.image for picture in sample.pictures]
            inputs = processor(text=[text], images=images or None, return_tensors="pt")
        with torch.inference_mode():
            return model.model(**inputs).last_hidden_state[0].double().numpy()

    return hidden


@pytest.fixture(scope="module")
def served(deployment_of, start_seconds, asker_for):
    """A server for both tasks that pools by the mean."""
    with deployment_of(task="both", pooling="mean", dtype="float32") as deployment:
        deployment.wait_ready(start_seconds)
        yield asker_for(deployment.frontends[0].url)


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_texts_as_numbers_and_as_base64(client, reference):
    for given in (None, "float", "base64"):  # by itself the package asks for base64 and unpacks it
        more = {} if given is None else {"encoding_format": given}
        answer = client.embeddings.create(model="tiny-vlm", input=TEXTS, **more)
        assert [one.index for one in answer.data] == [0, 1, 2]
        assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
        for text, one in zip(TEXTS, answer.data, strict=True):
            vector = one.embedding
            if isinstance(vector, str):
                vector = np.frombuffer(base64.b64decode(vector), "<f4")
            wanted = unit(reference(text).mean(0))
            assert np.abs(np.asarray(vector) - wanted).max() < 1e-5
            assert np.abs(np.asarray(vector) - unit(reference(text)[-1])).max() > 1e-3


def test_tokens_and_dimensions(client, reference):
    ids = client.post("/../tokenize", body={"prompt": TEXTS[0]}, cast_to=object)["tokens"]
    answer = client.embeddings.create(model="tiny-vlm", input=[ids, ids[:3]], dimensions=16)
    wanted = unit(reference(TEXTS[0]).mean(0)[:16])
    assert len(answer.data[1].embedding) == 16
    assert np.abs(np.asarray(answer.data[0].embedding) - wanted).max() < 1e-5


def test_an_image_embedded_once_serves_chat_and_search(served, reference, samples):
    """What the processor, the wire and the encoder did for one does not happen for the other."""
    sample = next(sample for sample in samples if len(sample.pictures) == 1)
    served.check(sample)
    hits = served.metric("vllm:mm_cache_hits_total")
    encoded = served.metric("foveal_encoder_items_total")
    body = {"model": "tiny-vlm", "messages": to_request(sample, "tiny-vlm")["messages"]}
    answer = served.http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    found = np.asarray(answer.json()["data"][0]["embedding"])
    assert np.abs(found - unit(reference(sample).mean(0))).max() < 1e-5
    assert served.metric("vllm:mm_cache_hits_total") == hits + 1
    assert served.metric("foveal_encoder_items_total") == encoded > 0
    served.check(sample)


def test_wrong_requests_are_the_packages_errors(client):
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="tiny-vlm", input="x", dimensions=10_000)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
