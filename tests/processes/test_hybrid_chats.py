"""Conversations with a Mamba-2 decoder over HTTP: tokens are those of transformers' generate.

Two clients at once, each turn behind the last one's answer, so that states are batched, saved and
restored between processes as they are in service.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.models import tiny_checkpoints, tiny_mamba

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]
NUM_TURNS, NUM_TOKENS = 4, 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nemotron_h")
    # generate has no lower limit of steps in answers, so here it is below all of them.
    settings = {**tiny_mamba.NEMOTRON, "time_step_min": 1e-9}
    case = tiny_checkpoints.text_case("NemotronHConfig", **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_checkpoints.CASES, "nemotron_h", case)
        tiny_checkpoints.save("nemotron_h", folder)
    words = {f"w{number}": number for number in range(tiny_checkpoints.VOCAB)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="w0", bos_token="w1", eos_token="w2"
    ).save_pretrained(folder)
    return folder


@torch.inference_mode()
def generate(model, ids: list[int]) -> list[int]:
    found = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1,
    )  # fmt: skip
    return found[0, len(ids) :].tolist()


def test_two_conversations_are_transformers_own(deployment_of, start_seconds, path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with deployment_of(model=str(path), name="m", dtype="float32") as deployment:
        deployment.wait_ready(start_seconds)
        with httpx.Client(base_url=deployment.frontends[0].url, timeout=start_seconds) as client:

            def converse(seed: int) -> list[tuple[list[int], list[int], int]]:
                """Of each turn: prompt, answer, and how many tokens of the prompt were cached."""
                draw, ids, turns = random.Random(seed), [], []
                for count in (70, *[9] * (NUM_TURNS - 1)):
                    ids = [*ids, *draw.choices(range(20, tiny_checkpoints.VOCAB), k=count)]
                    body = {
                        "model": "m", "prompt": ids, "max_tokens": NUM_TOKENS, "temperature": 0,
                        "ignore_eos": True, "return_token_ids": True,
                    }  # fmt: skip
                    answer = client.post("/v1/completions", json=body).raise_for_status().json()
                    said = answer["choices"][0]["token_ids"]
                    details = answer["usage"].get("prompt_tokens_details") or {}
                    turns.append((ids, said, details.get("cached_tokens") or 0))
                    ids = [*ids, *said]
                return turns

            with ThreadPoolExecutor(2) as pool:
                chats = list(pool.map(converse, (1, 2)))
    for turns in chats:
        for number, (ids, said, num_cached) in enumerate(turns):
            assert said == generate(model, ids), number
            assert (num_cached > len(ids) - 2 * 16 - 9) == (number > 0), (number, num_cached)
