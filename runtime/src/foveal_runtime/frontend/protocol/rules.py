"""Rules of requests: allowed options, and the sampling parameters that follow from them.

Called by chat.py and completions.py after parsing and before anything costs something. Pure: the
only outside thing is the random seed, which the caller hands in. An option that would change the
output and is not served is refused by name, never ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from foveal_runtime.frontend.protocol.requests import (
    MAX_CHOICES,
    ChatCompletionRequest,
    CompletionRequest,
)
from foveal_runtime.plan.config import RequestDefaults
from foveal_runtime.plan.errors import (
    InvalidRequest,
    NotFound,
    StartupError,
    Unsupported,
)
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.sampling import SamplingParams

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature leave the range of 32-bit floats: greedy."""
MIN_TOP_P = 1e-6
MIN_REPETITION_PENALTY = 1e-3
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a text completion that names none, as in the OpenAI API."""

MEANINGLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "prediction",
        "request_id", "session_id", "verbosity", "stream_interval", "include_reasoning",
        "return_mm_kwargs", "mm_payload", "return_token_offsets", "routed_experts_prompt_start",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Accepted in any form: they cannot change the tokens of this server's answers."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "detokenize": (True,),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "documents": ([],),
    "mcp_servers": ([],),
    "container": ({}, {"skills": []}),
    "context_management": ({}, {"edits": []}),
    "extra_body": ({},),
    "media_io_kwargs": ({},),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "watermarking": (False,),
    "early_stopping": (False,),
    "return_prompt_text": (False,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}
"""Fields that are not served, with the values that mean "not used"."""

_BAD_SALT_CHARS = "@/\\\0"


def check_fields(
    request: ChatCompletionRequest | CompletionRequest, *, ignore_unknown: bool = False
) -> None:
    """Raises Unsupported naming the first field that would change the output and is not served.

    `ignore_unknown`: fields that this server does not know at all are left out instead.
    """
    check_extra(request.model_extra or {}, ignore_unknown)
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        generates = request.add_generation_prompt
        if generates and request.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other",
                param="continue_final_message",
            )
    elif request.suffix:
        raise Unsupported("suffix is not supported", param="suffix")
    elif request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens: 0 needs echo", param="max_tokens")
    if request.logprob_token_ids:
        named = request.logprob_token_ids
        if request.logprobs is None or request.logprobs is False:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
        if getattr(request, "top_logprobs", None):
            raise InvalidRequest(
                "logprob_token_ids and top_logprobs exclude each other", param="logprob_token_ids"
            )
        if len(set(named)) < len(named):
            raise InvalidRequest("logprob_token_ids names a token twice", param="logprob_token_ids")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise Unsupported("best_of is supported only when it equals n", param="best_of")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise Unsupported("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    check_salt(request.cache_salt)


def check_salt(salt: str | None) -> None:
    for char in _BAD_SALT_CHARS:
        if char in (salt or ""):
            raise InvalidRequest(f"cache_salt may not contain {char!r}", param="cache_salt")


def check_extra(extra: Mapping[str, Any], ignore_unknown: bool) -> None:
    """Raises Unsupported naming the first field, of those that a request does not declare, that is
    neither without meaning nor neutral."""
    for name, value in extra.items():
        if value is None or name in MEANINGLESS:
            continue
        if name in NEUTRAL and any(value == neutral for neutral in NEUTRAL[name]):
            continue
        if name not in NEUTRAL and ignore_unknown:
            continue
        known = "" if name in NEUTRAL else " (unknown field)"
        if name in ("audio", "modalities"):
            known = ": answers are text alone"
        if name == "extra_body":
            known = ": it is an option of the client library, which puts its fields here"
        raise Unsupported(f"{name} is not supported{known}", param=name)


def check_truncates(parts: Sequence[object]) -> None:
    if parts:
        raise InvalidRequest(
            "truncate_prompt_tokens cannot be used with media: it would cut them off",
            param="truncate_prompt_tokens",
        )


def check_num_sequences(num_prompts: int, num_choices: int) -> None:
    if num_prompts * num_choices > MAX_CHOICES:
        raise InvalidRequest(
            f"{num_prompts} prompts x n={num_choices} are more than {MAX_CHOICES} sequences",
            param="n",
        )


def lora_of(model: str | None, served: str, loras: Mapping[str, LoraRef]) -> LoraRef | None:
    """The adapter that a request names as its model; None: the model itself, as where it names none
    ("" is none). Raises NotFound."""
    if not model or model == served:
        return None
    if model not in loras:
        there = ", ".join(repr(name) for name in (served, *sorted(loras)[:8]))
        raise NotFound(
            f"the model {model!r} does not exist; this server has {there}", param="model"
        )
    return loras[model]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What applies when a request says nothing: what the server is given, else the checkpoint's
    generation_config.json, else the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None

    @classmethod
    def load(cls, model_path: str | Path, given: RequestDefaults | None = None) -> SamplingDefaults:
        path = Path(model_path) / "generation_config.json"
        document: Any = {}
        try:
            if path.is_file():
                document = json.loads(path.read_bytes())
            if not isinstance(document, dict):
                raise ValueError("not an object")
            found = cls.from_document(document)
        except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise StartupError(f"{path}: {error}") from error
        over = {one.name: getattr(given, one.name, None) for one in fields(cls)}
        if over["top_k"] is not None:
            over["top_k"] = max(0, over["top_k"])
        return replace(found, **{name: value for name, value in over.items() if value is not None})

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> SamplingDefaults:
        """`do_sample: false` does not mean greedy here, as in other servers: only the numbers
        count."""
        known: dict[str, Any] = {}
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            if document.get(name) is not None:
                known[name] = float(document[name])
        if document.get("top_k") is not None:
            known["top_k"] = max(0, int(document["top_k"]))
        if document.get("max_new_tokens"):
            known["max_tokens"] = int(document["max_new_tokens"])
        return cls(**known)


def _pick(value: Any, default: Any) -> Any:
    return default if value is None else value


def max_tokens_of(
    request: ChatCompletionRequest | CompletionRequest,
    defaults: SamplingDefaults,
    *,
    room: int,
    limit: int,
) -> int:
    """Output tokens at most: what was asked for, as far as it fits into `room` (`limit`, which is
    max_model_len, less the unexpanded prompt). More than the model can ever give is refused."""
    given: int | None = request.max_tokens
    name = "max_tokens"
    if isinstance(request, ChatCompletionRequest):
        if request.max_completion_tokens is not None:
            given, name = request.max_completion_tokens, "max_completion_tokens"
        fallback = min(room, defaults.max_tokens or room)
    else:
        fallback = min(room, defaults.max_tokens or DEFAULT_COMPLETION_TOKENS)
    if given is None:
        return fallback
    if given > limit:
        raise InvalidRequest(
            f"{name} is {given}, but the model's context is {limit} tokens; ask for fewer",
            param=name,
        )
    return max(1, min(given, room))  # a score of the prompt alone still takes one step


def wanted_tokens(request: ChatCompletionRequest | CompletionRequest) -> int | None:
    """Output tokens that a request names, by either name."""
    return getattr(request, "max_completion_tokens", None) or request.max_tokens


def sampling_params(
    request: ChatCompletionRequest | CompletionRequest,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    vocab_size: int,
    encode: Callable[[str], list[int]],
    drawn_seed: int,
    grammar: str = "",
) -> SamplingParams:
    """The options of choice 0. `drawn_seed` is used when the request names none, or
    -1; `encode` makes tokens of a text, without special ones."""
    min_tokens = _pick(request.min_tokens, 0)
    wanted = wanted_tokens(request)
    if wanted and min_tokens > wanted:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, but max_tokens allows at most {wanted}",
            param="min_tokens",
        )
    temperature = float(_pick(request.temperature, defaults.temperature))
    penalty = request.repetition_penalty
    if penalty is not None and penalty < MIN_REPETITION_PENALTY:
        raise InvalidRequest(
            f"repetition_penalty is {penalty}; it must be at least {MIN_REPETITION_PENALTY}",
            param="repetition_penalty",
        )
    seed = drawn_seed if request.seed is None or request.seed == -1 else request.seed
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=max(MIN_TOP_P, float(_pick(request.top_p, defaults.top_p))),
        top_k=max(0, _pick(request.top_k, defaults.top_k)),
        min_p=float(_pick(request.min_p, defaults.min_p)),
        seed=seed & (2**64 - 1),
        repetition_penalty=float(_pick(request.repetition_penalty, defaults.repetition_penalty)),
        presence_penalty=float(_pick(request.presence_penalty, 0.0)),
        frequency_penalty=float(_pick(request.frequency_penalty, 0.0)),
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        stop_token_ids=_token_ids("stop_token_ids", request.stop_token_ids, vocab_size),
        # Where its grammar allows nothing else, the output ends whatever the request says.
        ignore_eos=bool(request.ignore_eos) and not grammar,
        grammar=grammar,
        logprobs=_num_logprobs(request),
        prompt_logprobs=_num_prompt_logprobs(request),
        allowed_token_ids=_token_ids("allowed_token_ids", request.allowed_token_ids, vocab_size),
        bad_words=bad_words(request.bad_words or (), encode),
        logprob_token_ids=_token_ids("logprob_token_ids", request.logprob_token_ids, vocab_size),
    )


def bad_words(
    words: Iterable[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word as they stand at the start of a text and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = (tuple(encode(space + word.lstrip())) for space in ("", " "))
        if bare:
            found[bare] = None
        if spaced and len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(found)


def _num_logprobs(request: ChatCompletionRequest | CompletionRequest) -> int:
    if request.logprob_token_ids:
        return len(request.logprob_token_ids)
    if isinstance(request, CompletionRequest):
        return _pick_int(request.logprobs, -1)
    return _pick_int(request.top_logprobs, 0) if request.logprobs else -1


def _num_prompt_logprobs(request: ChatCompletionRequest | CompletionRequest) -> int:
    """Echo with logprobs shows the prompt's logprobs too."""
    if request.prompt_logprobs is not None:
        return request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo:
        return _pick_int(request.logprobs, -1)
    return -1


def _pick_int(value: int | None, default: int) -> int:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for name, value in bias.items():
        is_number = len(name) <= 12 and name.isascii() and name.isdigit()
        if not is_number or int(name) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: {name[:32]!r} is not a token id below {vocab_size}",
                param="logit_bias",
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(
                f"logit_bias of token {name} is {value}; allowed is -100 to 100",
                param="logit_bias",
            )
        pairs.append((int(name), float(value)))
    return tuple(pairs)


def _token_ids(name: str, ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token_id in ids or ():
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{name}: {token_id} is not a token id below {vocab_size}", param=name
            )
    return tuple(ids or ())


def stop_strings(request: ChatCompletionRequest | CompletionRequest) -> tuple[str, ...]:
    stop = request.stop
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def seed_of_choice(seed: int, index: int) -> int:
    """Choice 0 has the request's seed; others a 64-bit value derived from it and their index."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
