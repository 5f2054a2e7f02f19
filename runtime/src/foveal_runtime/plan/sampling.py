"""Sampling parameters of a request: parsed once at the edge, obeyed by engine and model.

Built by the frontend's HTTP app, sent inside the request body, read by engine/ (limits, stops)
and model/ (logits). Never changed after construction.
"""

from __future__ import annotations

from importlib import metadata
from typing import Literal

import msgspec

from foveal_runtime.plan.config import Pooling

GRAMMAR_LIBRARY = "llguidance"


def grammar_version() -> str:
    """Library and version that grammars are written for; "" when it is not installed. Frontends
    send a grammar only to engines with the same."""
    try:
        return f"{GRAMMAR_LIBRARY}-{metadata.version(GRAMMAR_LIBRARY)}"
    except metadata.PackageNotFoundError:
        return ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Sampling options of one sequence (`n` is expanded into sequences before this point).

    Attributes:
        max_tokens: output tokens at most, counted over all attempts of the request.
        min_tokens: stop ids and EOS are masked until this many output tokens exist.
        temperature: 0 means greedy.
        top_k: 0 means off. top_p in (0, 1]. min_p in [0, 1].
        seed: 64-bit; always set (the frontend draws one when the user gave none), so that the
            token at output index i depends only on (seed, i) and the logits, never on the batch
            or on the engine that computes it.
        stop_token_ids: end the sequence; kept out of the text, in contrast to `stop` strings,
            which the frontend's detokenizer watches.
        logprobs: number of alternatives per output token; -1 means none at all.
        prompt_logprobs: the same for prompt tokens; the prefix cache is then not read.
        allowed_token_ids: no other token is ever chosen, EOS included; empty: all are allowed.
        grammar: what the output must follow, in the form of the grammar library
            (`GRAMMAR_LIBRARY`); "": anything. It is stronger than min_tokens.
        logprob_token_ids: the alternatives themselves, `logprobs` of them; empty: the most likely.
        bad_words: token sequences whose last token is masked where the others were just output.
        pooling: the sequence is not continued but embedded: by the mean of its tokens' hidden
            states after the last norm, by the last token's ("last"), or by the first one's
            ("cls"). "": tokens are generated.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    prompt_logprobs: int = -1
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    logprob_token_ids: tuple[int, ...] = ()
    pooling: Pooling | Literal[""] = ""

    @property
    def least_outputs(self) -> int:
        """Output tokens that the context must have room for."""
        return 0 if self.pooling else 1

    @property
    def reads_prefix(self) -> bool:
        """Whether tokens that were computed for another request need no computing again: not where
        something is wanted of each of them, because a cache holds keys and values alone."""
        return self.prompt_logprobs < 0 and self.pooling in ("", "last")
