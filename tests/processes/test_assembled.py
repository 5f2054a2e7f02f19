"""SmolLM2 that hears and SmolLM2 that sees (e2e/assembled), through real processes.

Text model and Whisper are published weights, so a wrong cache entry, a wrong place or a wrong mask
shows in texts that mean something. Where a package cannot be had, the tests are skipped and say so.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.assembled import assemble, evaluate, images, speech, wordings
from tests.support import packages
from tests.support.models import smollm2

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]
MIB = 1024**2
NUM_ITEMS = 16
LEAST_SHARE = 0.75
WORDING = wordings.TRAINED[0]


def checkpoint(kind: str) -> Path:
    if kind == "audio":
        packages.or_skip(speech.speaker)
    return packages.or_skip(lambda: assemble.folder(kind))


@pytest.fixture(scope="module")
def asker_of(deployment_of, start_seconds, asker_for) -> Any:
    @contextmanager
    def serve(kind: str) -> Iterator[Any]:
        path, name = checkpoint(kind), f"smollm2-{kind}"
        options = {"kv_bytes": 256 * MIB, "max_model_len": 2048}
        with deployment_of(model=str(path), name=name, **options) as deployment:
            deployment.wait_ready(start_seconds)
            yield asker_for(deployment.frontends[0].url)

    return serve


@pytest.fixture(scope="module")
def listening(asker_of) -> Iterator[Any]:
    """An asker of the model that hears."""
    with asker_of("audio") as asker:
        yield asker


@pytest.fixture(scope="module")
def looking(asker_of) -> Iterator[Any]:
    """An asker of the model that sees."""
    with asker_of("vision") as asker:
        yield asker


@pytest.fixture(scope="module")
def clips() -> list[speech.Clip]:
    """By voices that training does not have."""
    checkpoint("audio")
    rng = random.Random("processes")
    return [speech.draw(rng, speech.HELD_OUT) for _ in range(NUM_ITEMS)]


@pytest.fixture(scope="module")
def heard(listening, clips) -> list[str]:
    """What is served, four clips at a time."""
    with ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(lambda c: evaluate.ask(listening.http, "smollm2-audio", c, WORDING), clips)
        )


def test_what_is_heard_is_what_transformers_hears(heard, clips) -> None:
    import torch
    from transformers import AudioFlamingo3ForConditionalGeneration, AutoProcessor

    path = checkpoint("audio")
    model = AudioFlamingo3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(path)
    prompt = processor.apply_chat_template(
        wordings.messages(WORDING, {"type": "audio"}), add_generation_prompt=True, tokenize=False
    )
    for clip, text in zip(clips, heard, strict=True):
        inputs = processor(text=[prompt], audio=[clip.samples])
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        fresh = out[0, inputs["input_ids"].shape[1] :]
        assert processor.tokenizer.decode(fresh, skip_special_tokens=True) == text, clip.digits


def test_what_is_heard_was_said(heard, clips) -> None:
    """A clip in another's place would be a wrong answer. Rates of more clips are in the README."""
    pairs = [(text, clip.digits) for text, clip in zip(heard, clips, strict=True)]
    assert sum(text == said for text, said in pairs) >= LEAST_SHARE * len(clips), pairs
    assert len({said[0] for _, said in pairs}) >= 6


def test_a_clip_that_was_heard_is_not_encoded_again(listening, heard, clips) -> None:
    """In other words, and by the transcription API, whose words are the wording's."""
    encoded = listening.metric("foveal_encoder_items_total")
    assert encoded == len(clips)
    for clip, text in zip(clips[:6], heard, strict=False):
        again = evaluate.ask(listening.http, "smollm2-audio", clip, WORDING)
        form = {"model": "smollm2-audio", "max_completion_tokens": "16"}
        files = {"file": ("clip.wav", clip.wav())}
        told = listening.http.post("/v1/audio/transcriptions", data=form, files=files)
        assert (again, told.json()["text"]) == (text, text)
    assert listening.metric("foveal_encoder_items_total") == encoded


@pytest.fixture(scope="module")
def questions() -> list[images.Sample]:
    """About scenes and scans that training does not have, of the families that the model learnt."""
    checkpoint("vision")
    return [
        sample
        for family in images.LEARNT
        for sample in images.held_out(family, "processes", NUM_ITEMS // len(images.LEARNT))
    ]


def answer_of(asker: Any, body: dict[str, Any]) -> str:
    answer = asker.http.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def seen(looking, questions) -> list[str]:
    """What is served, four questions at a time."""
    bodies = [images.to_request(one, "smollm2-vision") for one in questions]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda body: answer_of(looking, body), bodies))


def test_what_is_seen_is_what_transformers_sees(seen, questions) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = checkpoint("vision")
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(path)
    for sample, text in zip(questions, seen, strict=True):
        prompt = processor.apply_chat_template(
            sample.messages, add_generation_prompt=True, tokenize=False
        )
        images = [picture.image for picture in sample.pictures]
        inputs = processor(text=[prompt], images=images, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=160, do_sample=False)
        fresh = out[0, inputs["input_ids"].shape[1] :]
        told = processor.tokenizer.decode(fresh, skip_special_tokens=True)
        assert told == text, sample.messages


def test_what_is_seen_is_there(seen, questions) -> None:
    """An image in another's place would be a wrong answer. Rates are in the README."""
    pairs = [(text, one.verdict) for text, one in zip(seen, questions, strict=True)]
    right = sum(images.is_right(text, verdict) for text, verdict in pairs)
    assert right >= LEAST_SHARE * len(pairs), pairs
    assert len({verdict for _, verdict in pairs}) >= 6


def test_an_image_that_was_seen_is_not_encoded_again(looking, seen, questions) -> None:
    encoded = looking.metric("foveal_encoder_items_total")
    assert encoded == len(questions)
    for sample, text in list(zip(questions, seen, strict=True))[::4]:
        assert answer_of(looking, images.to_request(sample, "smollm2-vision")) == text
    assert looking.metric("foveal_encoder_items_total") == encoded


@pytest.mark.parametrize("kind", ["audio", "vision"])
def test_alone_it_is_smollm2(kind, request) -> None:
    """Ears and eyes change nothing of what the text model says: transformers' stored ids of
    SmolLM2."""
    import json

    from transformers import AutoTokenizer

    asker = request.getfixturevalue({"audio": "listening", "vision": "looking"}[kind])
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder())
    stored = json.loads(smollm2.IDS.read_text(encoding="utf-8"))
    for prompt, ids in list(zip(smollm2.prompts(), stored, strict=True))[:6]:
        end = ids.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in ids else len(ids)
        body = {"model": f"smollm2-{kind}", "temperature": 0, "max_tokens": smollm2.NUM_OUTPUTS,
                "messages": [{"role": "user", "content": prompt}]}  # fmt: skip
        assert answer_of(asker, body).startswith(tokenizer.decode(ids[:end])), prompt
