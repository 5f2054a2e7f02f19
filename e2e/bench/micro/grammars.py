"""What grammars cost at a vocabulary of a real size: compiling, and the mask of each token.

    PYTHONPATH=runtime/src python -m e2e.bench.micro.grammars [--vocab 49152] [--rounds 20]

The vocabulary is a byte-level BPE trained here on Python's own standard library, with as many
tokens as SmolLM2's. For each schema: compile time, then the time of one mask (`Grammars.words`, the
consumed token included) at the median, the 95th percentile and the longest, over answers of random
allowed tokens; then one step of 32 sequences, and what applying the masks to logits adds. The
limits: 30 us a token at the median, 200 us at the 95th percentile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.model.device import open_device
from foveal_runtime.model.sampling.grammar import Grammars, forbidden

END = "<|end|>"
NUM_ROWS = 32
MAX_TOKENS = 400
_NAMES = [f"property_{number}" for number in range(100)]
SCHEMAS: dict[str, Any] = {
    "call of a tool": {
        "type": "object", "required": ["part", "times"], "additionalProperties": False,
        "properties": {
            "part": {"enum": ["left", "right"]},
            "times": {"type": "integer", "minimum": 1, "maximum": 9},
        },
    },
    "invoice": {
        "type": "object", "required": ["number", "date", "lines"], "additionalProperties": False,
        "properties": {
            "number": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "date": {"type": "string", "format": "date"},
            "lines": {"type": "array", "maxItems": 4, "items": {"$ref": "#/$defs/line"}},
        },
        "$defs": {
            "line": {
                "type": "object", "required": ["text", "price"], "additionalProperties": False,
                "properties": {
                    "text": {"type": "string", "maxLength": 40},
                    "price": {"type": "number", "minimum": 0},
                },
            }
        },
    },
    "100 properties": {
        "type": "object", "required": _NAMES, "additionalProperties": False,
        "properties": {name: {"type": "boolean"} for name in _NAMES},
    },
    "enum of 1000": {"enum": [f"value {number * 7919} of many" for number in range(1000)]},
    "any object": {"type": "object"},
}  # fmt: skip


def texts(limit_bytes: int = 12 << 20) -> Iterator[str]:
    """The standard library's sources, which every machine has."""
    total = 0
    for path in sorted(Path(os.__file__).parent.glob("**/*.py")):
        if total > limit_bytes or "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        total += len(text)
        yield text


def train(folder: str, vocab_size: int) -> int:
    """Writes tokenizer.json; returns the number of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(Path(folder, "tokenizer.json")))
    return int(tokenizer.get_vocab_size())


def allowed(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def answer(grammars: Grammars, grammar: str, drawn: np.random.Generator) -> list[float]:
    """Seconds of each mask of one answer of random allowed tokens."""
    sequence = SimpleNamespace(scratch={})
    outputs: list[int] = []
    seconds = []
    while len(outputs) < MAX_TOKENS:
        begin = time.perf_counter()
        words = grammars.words(sequence, grammar, outputs, 0)
        seconds.append(time.perf_counter() - begin)
        outputs.append(int(drawn.choice(allowed(words))))
        if outputs[-1] == 0:  # the end token
            break
    return seconds


def step(grammars: Grammars, grammar: str, vocab_size: int, rounds: int) -> tuple[float, float]:
    """Median seconds of (masks of 32 sequences, applying them to logits)."""
    device = open_device(torch.device("cpu"))
    drawn = np.random.default_rng(1)
    sequences = [SimpleNamespace(scratch={}) for _ in range(NUM_ROWS)]
    outputs: list[list[int]] = [[] for _ in sequences]
    logits = torch.zeros(NUM_ROWS, vocab_size)
    masks, applied = [], []
    for _ in range(rounds):
        begin = time.perf_counter()
        words = [
            grammars.words(one, grammar, out, 0)
            for one, out in zip(sequences, outputs, strict=True)
        ]
        middle = time.perf_counter()
        logits.masked_fill_(forbidden(np.stack(words), vocab_size, device), -torch.inf)
        masks.append(middle - begin)
        applied.append(time.perf_counter() - middle)
        for out, row in zip(outputs, words, strict=True):
            going_on = [token for token in allowed(row) if token]
            if not going_on:
                return statistics.median(masks), statistics.median(applied)
            out.append(int(drawn.choice(going_on)))
    return statistics.median(masks), statistics.median(applied)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = train(folder, arguments.vocab)
        grammars = Grammars(folder, vocab_size, [0])
        grammars.words(SimpleNamespace(scratch={}), compiled({"type": "null"}), [], 0)
        print(f"{vocab_size} tokens; microseconds of a mask: median, 95 %, longest")
        for name, schema in SCHEMAS.items():
            grammar = compiled(schema)
            begin = time.perf_counter()
            grammars.words(SimpleNamespace(scratch={}), grammar, [], 0)
            first = time.perf_counter() - begin
            drawn = np.random.default_rng(7)
            found = [s for _ in range(arguments.rounds) for s in answer(grammars, grammar, drawn)]
            p50, p95, longest = (np.percentile(found, q) * 1e6 for q in (50, 95, 100))
            masks, applied = step(grammars, grammar, vocab_size, 50)
            print(
                f"{name:>15}: compiled with its first mask in {first * 1e3:6.1f} ms; "
                f"{p50:5.0f} {p95:5.0f} {longest:6.0f} us ({len(found)} masks); a step of "
                f"{NUM_ROWS}: {masks * 1e3:.2f} ms masks, {applied * 1e3:.2f} ms applying them"
            )


def compiled(schema: Any) -> str:
    done = compile_job("json", schema, True)
    return str(done["grammar"])


if __name__ == "__main__":
    main()
