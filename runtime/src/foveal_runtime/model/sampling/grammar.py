"""Grammars that bind what a request may output: which tokens are allowed next.

Used by the sampler. A request's state is the tokens it has output so far and nothing else, so it
is rebuilt wherever they are known: after preemption, on another engine, on every rank. Grammars
come from frontends that compiled them first; one that fails here fails its request alone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import llguidance
import numpy as np
import torch

from foveal_runtime.engine.types.step import GrammarStats, ModelTraits
from foveal_runtime.model.device import Device
from foveal_runtime.plan.budget.types import GRAMMAR_CACHE_BYTES, compiled_grammar_bytes

MAX_CACHED_GRAMMARS = 256
MAX_LEXER_STATES = 20_000
"""Of one grammar: its library's default would let one take 500 MB."""
_SHIFTS = np.arange(32, dtype=np.int32)


class Bound(Protocol):
    """What is read of a sequence; `scratch` keeps its matcher between steps."""

    @property
    def scratch(self) -> dict[str, object]: ...


class Grammars:
    """The grammars of one model.

    Args:
        model_path: directory of the checkpoint; its tokenizer.json is read at the first use.
        vocab_size: width of the model's logits.
        end_ids: tokens that end a sequence; allowed where the grammar may end.
    """

    def __init__(self, model_path: str, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._path = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._fresh: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self.stats = GrammarStats()

    @classmethod
    def open(cls, model_path: str, traits: ModelTraits) -> Grammars | None:
        """Those of a checkpoint; None where its traits name no grammar library."""
        if not traits.grammars:
            return None
        return cls(model_path, traits.vocab_size, traits.eos_token_ids)

    def words(
        self, sequence: Bound, grammar: str, outputs: Sequence[int], min_tokens: int
    ) -> np.ndarray:
        """The allowed tokens as bits, i32 (ceil(V / 32)), lowest bit first.

        Before `min_tokens` outputs, and where a grammar takes any token but may not end, end tokens
        are allowed only where nothing else is. Raises ValueError, with a reason for the client,
        when the grammar cannot go on after `outputs`; other outputs may be asked about then, such
        as those without a wrong guess.
        """
        begin = time.perf_counter()
        matcher, known = self._state(sequence, grammar, outputs)
        new = list(outputs[known:])
        sequence.scratch["grammar"] = (matcher, list(outputs[:known]))
        if (new and matcher.validate_tokens(new) < len(new)) or not matcher.consume_tokens(new):
            raise ValueError("the output does not follow its grammar")
        sequence.scratch["grammar"] = (matcher, list(outputs))
        bits = np.frombuffer(matcher.compute_bitmask(), np.int32).copy()
        if matcher.is_error():
            raise ValueError("the grammar needs more time or memory than it may have")
        if np.count_nonzero(bits) == 1:
            bits = self._spelt(matcher, bits)
        if len(outputs) < min_tokens or not matcher.is_accepting():
            bits = self._without_ends(bits)
        self.stats.mask_seconds += time.perf_counter() - begin
        return bits

    def _spelt(self, matcher: llguidance.LLMatcher, bits: np.ndarray) -> np.ndarray:
        """Where the text that must follow begins like the name of an added token (`<b>`), the
        library allows that token alone, and refuses it then, for it is no text: the tokens that
        spell its beginning instead."""
        tokens = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        if len(tokens) > 1 or matcher.is_accepting() or matcher.validate_tokens(tokens):
            return bits
        assert self._tokenizer is not None
        name = self._tokenizer.decode_str(tokens)
        spelt = np.zeros_like(bits)
        for size in range(1, len(name)):
            start = self._tokenizer.tokenize_str(name[:size])
            if len(start) == 1 and matcher.validate_tokens(start):
                spelt[start[0] // 32] |= np.uint32(1 << start[0] % 32).view(np.int32)
        return spelt if spelt.any() else bits

    def _without_ends(self, bits: np.ndarray) -> np.ndarray:
        others = bits.copy()
        for token in self._end_ids:
            others[token // 32] &= ~np.int32(np.uint32(1 << token % 32).view(np.int32))
        return others if others.any() else bits

    def _state(
        self, sequence: Bound, grammar: str, outputs: Sequence[int]
    ) -> tuple[llguidance.LLMatcher, int]:
        """A matcher and how many of the outputs it has consumed, and nothing else."""
        found = sequence.scratch.get("grammar")
        if isinstance(found, tuple):
            matcher, consumed = found
            if outputs[: len(consumed)] == consumed:
                return matcher, len(consumed)
            pairs = enumerate(zip(consumed, outputs, strict=False))
            common = next((i for i, (a, b) in pairs if a != b), len(outputs))
            if matcher.rollback(len(consumed) - common):
                return matcher, common
        self.stats.num_lookups += 1
        fresh = self._fresh.get(grammar)
        if fresh is None:
            begin = time.perf_counter()
            fresh = self._compile(grammar)
            seconds = time.perf_counter() - begin
            self.stats.compile_seconds += seconds
            self.stats.mask_seconds -= seconds  # is counted within the mask that needed it
        else:
            self.stats.num_hits += 1
        self._fresh.move_to_end(grammar)
        return fresh.deep_copy(), 0

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        if self._tokenizer is None:
            text = self._path.read_text(encoding="utf-8")
            self._tokenizer = llguidance.LLTokenizer(
                text, n_vocab=self._vocab_size, eos_token=self._end_ids
            )
        limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        fresh = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if fresh.is_error():
            raise ValueError("the grammar cannot be compiled for this model's vocabulary")
        self._fresh[grammar] = fresh
        stats = self.stats
        stats.cached_bytes += compiled_grammar_bytes(grammar)
        while len(self._fresh) > 1 and (
            len(self._fresh) > MAX_CACHED_GRAMMARS or stats.cached_bytes > GRAMMAR_CACHE_BYTES
        ):
            stats.cached_bytes -= compiled_grammar_bytes(self._fresh.popitem(last=False)[0])
        stats.num_cached = len(self._fresh)
        return fresh


def forbidden(words: np.ndarray, vocab_size: int, device: Device) -> torch.Tensor:
    """Bits of allowed tokens i32 (n, W) as a mask (n, V) of those that are not."""
    if device.torch.type == "cpu":  # a tenth of the time that shifting takes there
        raw = np.ascontiguousarray(~words).view(np.uint8)
        bits = np.unpackbits(raw, axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    packed, shifts = device.upload(words, _SHIFTS)
    bits = (packed[:, :, None] >> shifts) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] == 0
