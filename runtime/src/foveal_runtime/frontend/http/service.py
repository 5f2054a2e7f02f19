"""The request service: what all handlers share, and the path from a checked request to deltas.

Built once by app.py; chat.py and completions.py turn an HTTP request into Jobs and read deltas
from `open_run`. Everything a run holds is given back when its context ends, however it ends.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from foveal_runtime.frontend.engines.sequence import (
    Delta,
    fan_out,
    merge,
    release_media,
    run_sequence,
)
from foveal_runtime.frontend.grammars.compiler import Compiler
from foveal_runtime.frontend.grammars.reader import TurnFormat
from foveal_runtime.frontend.http.access.admission import Gate, Hold, Ticket, charge_answer
from foveal_runtime.frontend.http.answers import Answer
from foveal_runtime.frontend.http.asgi.replies import until_disconnect
from foveal_runtime.frontend.http.monitoring.request_stats import RequestStats
from foveal_runtime.frontend.items.interfaces import Generator, InputProcessor
from foveal_runtime.frontend.items.prepared import (
    MediaPart,
    PreparedItem,
    PreparedRequest,
    PrepareOptions,
)
from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.frontend.protocol.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from foveal_runtime.frontend.protocol.rules import (
    SamplingDefaults,
    check_truncates,
    lora_of,
    max_tokens_of,
    sampling_params,
    stop_strings,
    wanted_tokens,
)
from foveal_runtime.frontend.text.chat_template import ChatTemplate, Conversation
from foveal_runtime.frontend.text.detokenizer import Detokenizer
from foveal_runtime.frontend.text.parts import documents_of
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.config import FrontendConfig, Task
from foveal_runtime.plan.embedder import Embedder
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NoEngine,
    NotFound,
    Unsupported,
)
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.telemetry.tracing import Span, child_span, span_of_task

T = TypeVar("T")

NUM_CONTEXTS = 4
"""Contexts of the model that a text may have where not all of it must fit into one."""
TEXT_THREADS = 2
THREAD_SCORES = 2000
"""Answers with more are put together in a thread."""
THREAD_CHARS = 20_000
"""Longer texts are rendered and tokenised in a thread: they would stall other streams."""
_PREPARED_AT_ONCE = 64
"""Prompts of one request, before others have their turn on the event loop."""


@dataclass(slots=True)
class Service:
    """Attributes are the collaborators; `created` is the process's start in Unix seconds."""

    config: FrontendConfig
    tokenizer: TextTokenizer
    template: ChatTemplate
    processor: InputProcessor
    generator: Generator
    defaults: SamplingDefaults
    gate: Gate
    metrics: Metrics
    grammars: Compiler
    created: int
    embedder: Embedder
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, "text")
    )

    one_answer: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Long text work: beside the loop, and beside the threads that media need."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work)

    async def put_together(self, answers: Sequence[Answer], work: Callable[[], T]) -> T:
        """`work` on answers: in a thread when they have so many scores that others would wait. In
        one at a time: each that computes takes the interpreter's turns from the loop."""
        if sum(answer.num_scores for answer in answers) <= THREAD_SCORES:
            return work()
        async with self.one_answer:
            return await self.in_thread(work)

    @property
    def model_name(self) -> str:
        return self.config.model.served_name

    def find_lora(self, model: str | None) -> LoraRef | None:
        """See `rules.lora_of`. Raises NotFound for a model that is not served, NoEngine where only
        engines could tell and none is ready."""
        try:
            return lora_of(model, self.model_name, self.generator.loras())
        except NotFound:
            if self.generator.num_ready_engines():
                raise
            raise NoEngine(
                f"no engine is ready to tell whether {model!r} is served", retry_after_seconds=5
            ) from None

    def check_task(self, task: Task) -> None:
        """Raises Unsupported where this server was started for another one."""
        own = self.config.task
        if own not in (task, "both"):
            does, not_does = (
                ("answers with text", "embeddings") if own == "generate"
                else ("embeds: use /v1/embeddings", "text that the model generates")
            )  # fmt: skip
            raise Unsupported(
                f"this server {does}; for {not_does}, start one with --task {task}, or both"
            )

    def max_model_len(self) -> int:
        """Prompt + output tokens. Raises NoEngine while neither configuration nor engine says."""
        known = self.generator.max_model_len() or self.config.model.max_model_len
        if not known:
            raise NoEngine("no engine is ready yet", retry_after_seconds=2)
        return known

    def longest_text(self, truncates: bool = False) -> int:
        """Tokens that a text may have before anything else is checked. What is longer is refused
        while it is tokenised; what is to be truncated, or only counted, may be longer."""
        return self.max_model_len() * (NUM_CONTEXTS if truncates else 1)

    def tokenise(
        self,
        request: ChatCompletionRequest | EmbeddingRequest | TokenizeRequest,
        pages: Mapping[str, Sequence[Page]],
        limit: int,
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generates: bool = True,
    ) -> tuple[list[int], Conversation]:
        """A request's messages through the chat template, at most `limit` tokens. `generates`: the
        prompt for an answer follows where the request says nothing of it."""
        added = request.add_generation_prompt
        conversation = self.template.render(
            request.messages or [],
            add_generation_prompt=generates if added is None else added,
            continue_final_message=bool(request.continue_final_message),
            variables={**self.config.request_defaults.chat_template_kwargs, **(variables or {})},
            tools=tools,
            pages=pages,
        )
        special = bool(request.add_special_tokens)
        ids = self.template.encode(conversation, add_special_tokens=special, limit=limit)
        return ids, conversation

    def head(self, name: str, kind: str, model: str | None) -> dict[str, Any]:
        """What every object of OpenAI's begins with."""
        model = model or self.model_name
        return {"id": name, "object": kind, "created": int(time.time()), "model": model}


@dataclass(slots=True)
class Job:
    """One prompt with its options; `num_choices` sequences will answer it."""

    token_ids: list[int]
    parts: Sequence[MediaPart]
    options: PrepareOptions
    num_choices: int
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    continues_prompt: bool
    """The text continues the prompt's (completions, continue_final_message)."""
    hold: Hold
    turn: TurnFormat | None = None
    """How reasoning and tool calls are read."""
    is_truncated: bool = False
    """The prompt's beginning was cut off."""
    items: Sequence[PreparedItem] = ()
    """Known once `open_run` has prepared the job."""


@dataclass(slots=True)
class RequestScope:
    """What is known of an HTTP request on arrival.

    Attributes:
        request_id: the client's, or ours; for people and logs.
        receive: tells when the client is gone; the body must have been read.
        unique_id: never the same twice, whatever clients send: engines refuse duplicates.
    """

    request_id: str
    ticket: Ticket
    tenant: bytes = b""
    started: float = field(default_factory=time.monotonic)
    receive: Receive | None = None
    unique_id: str = ""

    def __post_init__(self) -> None:
        self.unique_id = f"{self.request_id}.{secrets.token_hex(6)}"

    def options(self, suffix: str = "", **more: Any) -> PrepareOptions:
        """Of a prompt of this request; `suffix` tells it from others."""
        return PrepareOptions(
            request_id=self.unique_id + suffix,
            tenant=self.tenant,
            charge_media_bytes=self.ticket.charge_media_bytes,
            client=self.tenant.decode("latin-1") or self.ticket.client,
            **more,
        )


def scope_of(service: Service, request: Request) -> RequestScope:
    tenant = b""
    if service.config.tenant_salt_header:
        tenant = request.headers.get(service.config.tenant_salt_header, "").encode()
    return RequestScope(
        request_id=request.scope["foveal.request_id"],
        ticket=request.scope["foveal.ticket"],
        tenant=tenant,
        started=request.scope["foveal.started"],
        receive=request.receive,
    )


async def pages_of(
    service: Service, messages: Sequence[Message], scope: RequestScope, cache_salt: str = ""
) -> dict[str, Sequence[Page]]:
    """The pages of the messages' documents, for `ChatTemplate.render`. Raises FovealError, or
    ClientGone."""
    documents = documents_of(messages)
    if not documents:
        return {}
    work = service.processor.pages(list(documents.values()), scope.options(cache_salt=cache_salt))
    pages = await (until_disconnect(scope.receive, work) if scope.receive else work)
    return dict(zip(documents, pages, strict=True))


def make_job(
    service: Service,
    request: ChatCompletionRequest | CompletionRequest,
    scope: RequestScope,
    token_ids: list[int],
    parts: Sequence[MediaPart],
    *,
    grammar: str = "",
    suffix: str = "",
    num_prompts: int = 1,
    continues_prompt: bool,
    echo_prompt: bool = False,
    turn: TurnFormat | None = None,
) -> Job:
    """Checks lengths and options. Raises InvalidRequest or RateLimited."""
    if not token_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    limit = service.max_model_len()
    num_given = len(token_ids)
    token_ids = _truncated(request, token_ids, parts, limit)
    room = limit - len(token_ids)
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt is too long: it has {len(token_ids)} tokens, this model's maximum context "
            f"length is {limit} tokens and must hold at least one more",
            param="messages" if isinstance(request, ChatCompletionRequest) else "prompt",
        )
    num_choices = request.n or 1
    scope.ticket.charge_tokens(len(token_ids), num_choices)
    sampling = sampling_params(
        request,
        service.defaults,
        max_tokens=max_tokens_of(request, service.defaults, room=room, limit=limit),
        vocab_size=service.tokenizer.vocab_size,
        encode=functools.partial(service.tokenizer.encode, add_special_tokens=False),
        drawn_seed=secrets.randbits(63),
        grammar=grammar,
    )
    sampling, hold = charge_answer(request, scope.ticket, sampling, len(token_ids), num_prompts)
    options = scope.options(
        suffix,
        sampling=sampling,
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        cache_salt=request.cache_salt or "",
        priority=request.priority or 0,
        read_prefix_cache=sampling.prompt_logprobs < 0,
        echo_prompt=echo_prompt,
        lora=service.find_lora(request.model),
    )
    return Job(
        token_ids=token_ids,
        parts=parts,
        options=options,
        num_choices=num_choices,
        stops=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        continues_prompt=continues_prompt,
        hold=hold,
        turn=turn,
        is_truncated=len(token_ids) < num_given,
    )


def _truncated(
    request: ChatCompletionRequest | CompletionRequest,
    token_ids: list[int],
    parts: Sequence[MediaPart],
    limit: int,
) -> list[int]:
    """The end of the prompt, or its beginning, where `truncate_prompt_tokens` asks for it. With -1
    a prompt with media stays whole, and is refused where it does not fit."""
    size = request.truncate_prompt_tokens
    if size is None or (size < 0 and parts):
        return token_ids
    check_truncates(parts)
    if size < 0:
        size = max(1, limit - (wanted_tokens(request) or 1))
    if request.truncation_side == "right" or len(token_ids) <= size:
        return token_ids[:size]
    return token_ids[len(token_ids) - size :]


@asynccontextmanager
async def open_run(
    service: Service,
    jobs: Sequence[Job],
    started: float,
    operation: str = "chat",
    most: int | None = None,
) -> AsyncIterator[AsyncGenerator[tuple[int, Delta], None]]:
    """Prepares all jobs and yields their interleaved deltas, of `most` sequences at a time; choice
    `job * n + i` is the index."""
    num_choices = jobs[0].num_choices
    parent = span_of_task.get()
    stats = RequestStats(
        service.metrics,
        started=started,
        num_sequences=len(jobs) * num_choices,
        num_choices=num_choices,
        max_tokens=[job.options.sampling.max_tokens for job in jobs],
        trace_id=parent.trace_id(),
        operation=operation,
    )
    requests: list[PreparedRequest] = []
    streams: list[AsyncGenerator[Delta, None]] = []
    error = ""
    stats.describe_request(parent, service.model_name, jobs[0].options.sampling)
    try:
        with child_span("prepare", num_items=sum(len(job.parts) for job in jobs)):
            for number, job in enumerate(jobs, 1):
                if number % _PREPARED_AT_ONCE == 0:
                    await asyncio.sleep(0)  # texts are prepared without waiting for anything
                prepared = await service.processor.prepare(job.token_ids, job.parts, job.options)
                job.items = prepared.items
                for request in fan_out(prepared, num_choices):
                    requests.append(request)
                    streams.append(_stream(service, job, request))
        stats.prepared()
        holds = [job.hold for job in jobs for _ in range(num_choices)]
        watched = _watched(merge(streams, most), stats, parent.child("generate"), holds)
        async with aclosing(watched) as merged:
            yield merged
    except Exception as raised:
        error = type(raised).__name__
        raise
    finally:
        release_media(requests)
        stats.end(error=error)
        stats.describe_answer(parent, error)


async def _watched(
    deltas: AsyncGenerator[tuple[int, Delta], None],
    stats: RequestStats,
    span: Span,
    holds: Sequence[Hold],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Counts and charges what passes. Owns the span of the generation."""
    num_tokens = 0
    error = "aborted"
    try:
        async with aclosing(deltas):
            async for index, delta in deltas:
                if num_tokens == 0 and delta.num_tokens:
                    span.event("first_token")
                num_tokens += delta.num_tokens
                stats.add(index, delta)
                num_scores = sum(1 + len(found.top_ids) for found in delta.logprobs)
                holds[index](delta.num_tokens, num_scores)
                yield index, delta
        error = ""
    except Exception as raised:
        error = type(raised).__name__
        raise
    finally:
        span.set("num_output_tokens", num_tokens)
        span.end(error)


def _stream(service: Service, job: Job, request: PreparedRequest) -> AsyncGenerator[Delta, None]:
    detokenizer = Detokenizer(
        service.tokenizer,
        stops=job.stops,
        include_stop=job.include_stop,
        min_tokens=job.options.sampling.min_tokens,
        skip_special_tokens=job.skip_special_tokens,
        context=job.token_ids if job.continues_prompt else (),
        turn=job.turn,
        request_id=request.request_id,
    )
    return run_sequence(service.generator, request, detokenizer, include_stop=job.include_stop)
