"""all-MiniLM-L6-v2 behind `--task embed`, asked by the openai package, beside transformers.

Pooling, unit length and the longest input are those of its sentence-transformers files. Skipped
where the package with its weights cannot be had.
"""

from __future__ import annotations

import numpy as np
import openai
import pytest

from foveal_runtime.main.local.serve import find_profile
from tests.support import packages
from tests.support.models import minilm

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]
LONG = "the cat sat on the mat and looked at the moon " * 40
TEXTS = [
    "A man is eating food.",
    "Someone eats a meal",
    "The stock market fell by 3.2 % today",
    "Ünïcode — Straße, 日本語 and 🙂",
    "word " * 200,
]


@pytest.fixture(scope="module")
def path():
    return packages.or_skip(minilm.folder)


@pytest.fixture(scope="module")
def reference(path):
    """reference(text, most) → mean of transformers' hidden states at unit length, of the first
    tokens as the checkpoint's own tokenizer cuts."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)

    def vector(text: str, most: int = 256) -> np.ndarray:
        inputs = tokenizer(
            text, truncation=True, max_length=most, padding=False, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = model(**inputs).last_hidden_state[0].double().numpy()
        found = hidden.mean(0)
        return found / np.linalg.norm(found)

    return vector


@pytest.fixture(scope="module")
def client(deployment_of, start_seconds, path):
    with deployment_of(model=str(path), name="minilm", task="embed", dtype="float32") as deployment:
        deployment.wait_ready(start_seconds)
        url = deployment.frontends[0].url
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            yield client


def embed(client, texts, **options) -> list[np.ndarray]:
    answer = client.embeddings.create(model="minilm", input=texts, **options)
    return [np.asarray(one.embedding) for one in answer.data]


def test_vectors_are_transformers_own(client, reference):
    found = embed(client, TEXTS)
    for text, one in zip(TEXTS, found, strict=True):
        assert one.shape == (384,)
        assert np.abs(one - reference(text)).max() < 1e-5, text
    assert found[0] @ found[1] > 0.6 > 0.2 > found[0] @ found[2]


def test_many_at_once_are_each_as_alone(client, reference):
    texts = [f"{TEXTS[n % 3]} {'x ' * (n % 37)}{n}" for n in range(100)]
    for text, one in zip(texts, embed(client, texts), strict=True):
        assert np.abs(one - reference(text)).max() < 1e-5, text


def test_what_is_too_long_is_refused_or_cut_as_asked(client, reference):
    """256 tokens by sentence_bert_config.json; a cut keeps the mark at the end."""
    with pytest.raises(openai.BadRequestError, match="256 tokens"):
        embed(client, LONG)
    for size, kept in ((-1, 256), (40, 40)):
        [found] = embed(client, LONG, extra_body={"truncate_prompt_tokens": size})
        assert np.abs(found - reference(LONG, kept)).max() < 1e-5
    models = client.models.list().data
    assert models[0].max_model_len == 256


def test_it_generates_nothing(client):
    with pytest.raises(openai.BadRequestError, match="embeds: use /v1/embeddings"):
        client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "x"}])


def test_the_plan_counts_it(path):
    """Its profile, and KV for two steps and no more."""
    import argparse

    from foveal_runtime.plan.budget.planner import plan
    from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs

    options = argparse.Namespace(
        profile="", dtype="float32", quantization="auto", max_num_batched_tokens=2048
    )
    profile = find_profile(options, path, "cpu")
    assert profile.is_encoder
    assert profile.max_model_len == 256
    found = plan(BudgetInputs(engine=EngineInputs(device="cpu", generates=False)), profile)
    assert found.fits
    assert found.kv_tokens == 2 * (2048 + 128 * 16)
