"""Images as encoder outputs, on real processes: the answer is that about the image itself."""

from __future__ import annotations

import base64

import httpx
import pytest
from evaluate import to_request

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def encode(model_folder):
    """encode(image) → base64 of a safetensors file with what plain transformers makes of it."""
    import torch
    from safetensors.torch import save
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(model_folder)

    def one(image) -> str:
        pixels = processor.image_processor(images=[image], return_tensors="pt")["pixel_values"]
        with torch.inference_mode():
            found = model.model.get_image_features(pixel_values=pixels, return_dict=True)
        rows = found.pooler_output[0]
        file = save({"image_embeds": rows.reshape(-1, rows.shape[-1]).contiguous()})
        return base64.b64encode(file).decode()

    return one


def with_embeds(sample, encode, longest_reply) -> dict:
    """The request with every image replaced by its embeddings."""
    body = {**to_request(sample, "tiny-vlm"), "max_tokens": longest_reply}
    images = [encode(picture.image) for picture in sample.pictures]
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                del part["image_url"]
                part |= {"type": "image_embeds", "image_embeds": images.pop(0)}
    assert not images
    return body


def test_the_answer_is_that_about_the_image(
    deployment_of, start_seconds, asker_for, samples, encode, longest_reply, shared
):
    asked = [sample for sample in samples if sample.pictures][:6]
    with deployment_of(media_embeds=True, dtype="float32", num_frontends=2) as deployment:
        deployment.wait_ready(start_seconds)
        askers = [asker_for(frontend.url) for frontend in deployment.frontends]
        for sample in asked:
            body = with_embeds(sample, encode, longest_reply)
            for asker in (*askers, askers[0]):
                answer = asker.http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["message"]["content"] == sample.reference
        hits = askers[0].metric("foveal_cache_hits_total", cache="ipc")
        assert hits >= len(asked)
        wrong = {"type": "image_embeds", "image_embeds": base64.b64encode(b"PK\x03\x04").decode()}
        body["messages"][-1]["content"] = [wrong]
        refused = askers[0].http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "pickle" in refused.text
        assert (
            refused.json()["error"]["param"] == f"messages[{len(body['messages']) - 1}].content[0]"
        )
    refused = httpx.post(shared[1].url + "/v1/chat/completions", json=body, timeout=start_seconds)
    assert refused.status_code == 400
    assert "--enable-mm-embeds" in refused.text
