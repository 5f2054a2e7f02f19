"""Messages between a frontend and an engine about requests: bodies up, outputs down.

These structs travel inside the cache protocol's envelopes (`mirror.messages.Req.body`,
`Down.outputs`, `Welcome.info`), msgpack-encoded by `wire.codec`. Closed schema, positional fields:
a new field goes to the end with a default, any other change raises PROTOCOL_VERSION.
"""

from __future__ import annotations

import msgspec

from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.sampling import SamplingParams, grammar_version


class RequestBody(msgspec.Struct, frozen=True, array_like=True):
    """One sequence to generate, its prompt *unexpanded*.

    Attributes:
        token_ids: little-endian packed ids (u16 when every id fits, else u32; see `wire.codec`);
            each item occupies one placeholder token here, the engine splices the replacement.
        wide: True when token_ids holds u32.
        placements: per placeholder, in prompt order: (index into token_ids, index into Req.items).
        emitted: output tokens that an earlier attempt already produced, packed like token_ids.
            They count against max_tokens and are never emitted again.
        priority: smaller runs first under the priority policy.
        cache_salt: isolates prefix-cache blocks of a tenant; b"" = shared.
        read_prefix_cache: False for prompt logprobs and when the user asks.
        echo_prompt: send the expanded prompt ids with the first output.
        arrival_seconds: time waited in the frontend before sending, for queue-time metrics.
        key: what the request is, whoever sends it; by it a suspect is named. b"" = nobody knows.
        on_trial: an engine may have died of it: it is the only suspect of a step, and only one
            such request is new at a time.
        lora: the adapter that it is computed with; part of the names of its KV blocks.
    """

    token_ids: bytes
    wide: bool
    placements: tuple[tuple[int, int], ...]
    sampling: SamplingParams
    emitted: bytes = b""
    priority: int = 0
    cache_salt: bytes = b""
    read_prefix_cache: bool = True
    echo_prompt: bool = False
    arrival_seconds: float = 0.0
    key: bytes = b""
    on_trial: bool = False
    lora: LoraRef | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token's logprob and rank, and the most likely alternatives."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class FirstOutput(msgspec.Struct, frozen=True, array_like=True):
    """Facts of a request that are known when its first token exists.

    `num_prompt_tokens` counts the expanded prompt; `num_cached_tokens` those found in the prefix
    cache; `num_mm_items`, `num_mm_hits`, `num_encoder_hits` and `num_encoded` count items (one that
    the prefix cache covers is neither a hit nor encoded); times are seconds inside the engine.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_mm_items: int
    num_mm_hits: int
    num_encoder_hits: int
    queue_seconds: float
    prefill_seconds: float
    prompt_token_ids: bytes = b""
    prompt_wide: bool = False
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    prompt_logprob_ids: tuple[int, ...] = ()
    num_encoded: int = 0


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step produced for one request.

    Attributes:
        rid: (request id, attempt).
        token_ids: new output tokens, in order.
        finish: "", "stop", "length", "abort" or "error".
        stop_token: the stop token id that ended it, kept out of the text (None: EOS or limit).
        error: (code of plan.errors, message) when finish is "error".
        embedding: see `engine.types.step.Pooled`; b"" unless `sampling.pooling` asks.
    """

    rid: tuple[str, int]
    token_ids: tuple[int, ...] = ()
    finish: str = ""
    stop_token: int | None = None
    first: FirstOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: tuple[str, str] | None = None
    embedding: bytes = b""


class LoraReport(msgspec.Struct, frozen=True, array_like=True):
    """The LoRA adapters of an engine, and how the last orders to load or unload one ended: (the
    order's number, a reason in one line or "")."""

    refs: tuple[LoraRef, ...]
    outcomes: tuple[tuple[int, str], ...] = ()


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """Piggybacked with outputs so that routers know; `stamp` grows by one each time.

    `draining`: finishes what it has and wants nothing new. `loras`: None where they are as told.
    """

    stamp: int
    num_running: int
    num_waiting: int
    kv_usage: float
    draining: bool = False
    loras: LoraReport | None = None


class Outputs(msgspec.Struct, frozen=True, array_like=True):
    """The `outputs` part of a downward message."""

    outputs: tuple[EngineOutput, ...]
    load: EngineLoad | None = None


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """The `info` part of WELCOME: what a frontend must know of the engine it talks to.

    `grammars`: see ModelTraits; a request with a grammar goes to engines of the same version only.
    `pools`: it knows `SamplingParams.pooling` and `logprob_token_ids`, which came with it.
    `loras`: when the session began; changes come with `EngineLoad`. None: it knows no adapters.
    """

    engine_id: str
    model: str
    revision: str
    max_model_len: int
    max_num_seqs: int
    draining: bool = False
    grammars: str = ""
    pools: bool = False
    loras: tuple[LoraRef, ...] | None = None

    def serves(self, sampling: SamplingParams) -> bool:
        """Whether the engine does what is asked: an older one would leave it out."""
        is_bound = not sampling.grammar or self.grammars == grammar_version()
        return is_bound and (self.pools or not (sampling.pooling or sampling.logprob_token_ids))
