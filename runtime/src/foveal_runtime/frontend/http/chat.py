"""POST /v1/chat/completions: messages to a job, deltas to chat chunks or one chat completion.

Joins what the chat template says about the model with what the request asks for: which output the
model may write, and how it is read.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.compiler import Compiled
from foveal_runtime.frontend.grammars.formats import FORMATS
from foveal_runtime.frontend.grammars.reader import TurnFormat
from foveal_runtime.frontend.http.answers import (
    Answer,
    Tally,
    cache_usage,
    call_json,
    chat_logprobs,
    chunk_usage,
    expanded_prompt,
    joined_calls,
    prompt_logprobs,
)
from foveal_runtime.frontend.http.asgi.json_bodies import SSE_DONE, sse
from foveal_runtime.frontend.http.service import (
    THREAD_CHARS,
    Job,
    RequestScope,
    Service,
    make_job,
    open_run,
    pages_of,
)
from foveal_runtime.frontend.protocol.bounds import num_chars_in
from foveal_runtime.frontend.protocol.constraints import (
    Calls,
    Wanted,
    calls_of,
    schema_of,
    wanted_of,
)
from foveal_runtime.frontend.protocol.messages import RefusalPart
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.frontend.protocol.rules import check_fields, check_num_sequences
from foveal_runtime.frontend.text.chat_template import ChatTemplate, Conversation
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from foveal_runtime.wire.messages import FirstOutput, TokenLogprobs


@dataclass(slots=True)
class ChatRun:
    """A checked chat request."""

    service: Service
    request: ChatCompletionRequest
    job: Job
    head: dict[str, Any]
    started: float
    relaxed: tuple[str, ...]

    @property
    def num_choices(self) -> int:
        return self.job.num_choices


async def plan_chat(
    service: Service, request: ChatCompletionRequest, scope: RequestScope
) -> ChatRun:
    """Everything that can be refused before images, videos and audio are touched. Documents are
    read: the prompt depends on their pages."""
    service.check_task("generate")
    service.find_lora(request.model)
    wanted = wanted_of(request)
    check_fields(request, ignore_unknown=service.config.ignore_unknown_options)
    check_num_sequences(1, request.n or 1)
    calls = calls_of(request)
    variables = template_variables(request, service.template)
    compiled = await service.grammars.compile(wanted)

    limit = service.longest_text(truncates=request.truncate_prompt_tokens is not None)
    pages = await pages_of(service, request.messages, scope, request.cache_salt or "")

    def tokenise() -> tuple[list[int], Conversation]:
        tools = calls.shown_plain() if calls is not None else ()
        return service.tokenise(request, pages, limit, variables, tools)

    num_chars = num_chars_of(request)
    if num_chars > MAX_CHARS:
        raise ContextLengthExceeded(
            f"the messages have {num_chars} characters; at most {MAX_CHARS} are taken",
            param="messages",
        )
    if request.tools or _has_objects(request) or num_chars > THREAD_CHARS:
        token_ids, conversation = await service.in_thread(tokenise)
    else:
        token_ids, conversation = tokenise()
    turn, wanted = plan_turn(
        request, service.template, service.tokenizer, calls, conversation.text, compiled
    )
    relaxed = compiled.relaxed
    if wanted is not None:
        compiled = await service.grammars.compile(wanted)
    job = make_job(
        service,
        request,
        scope,
        token_ids,
        conversation.parts,
        grammar=compiled.grammar,
        continues_prompt=bool(request.continue_final_message),
        echo_prompt=bool(request.return_token_ids),
        turn=turn,
    )
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    head = service.head(f"chatcmpl-{scope.request_id}", kind, request.model)
    if wanted is not None:
        relaxed += compiled.relaxed
    return ChatRun(service, request, job, head, scope.started, relaxed)


MAX_CHARS = 16_000_000
"""As many as one text may have: what renders them copies them in one piece."""
_MESSAGE_CHARS = 100
"""What a message, a part or a call costs beside its text, in characters of text."""

_VALUE_CHARS = 8
"""What a value in the arguments of a call costs: a number has no text."""


def _has_objects(request: ChatCompletionRequest) -> bool:
    """Arguments of calls that a template writes out as JSON."""
    calls = (call for message in request.messages for call in message.tool_calls or ())
    return any(isinstance(call.function.arguments, dict) for call in calls)


def num_chars_of(request: ChatCompletionRequest) -> int:
    """Of all messages, with what each of their parts costs."""
    total = len(request.messages) * _MESSAGE_CHARS
    for message in request.messages:
        total += len(message.reasoning_content or message.reasoning or "")
        for call in message.tool_calls or ():
            total += _MESSAGE_CHARS + num_chars_in(call.function.arguments, _VALUE_CHARS)
        if isinstance(message.content, str):
            total += len(message.content)
        elif message.content is not None:
            for part in message.content:
                text = part.refusal if isinstance(part, RefusalPart) else getattr(part, "text", "")
                total += len(text) + _MESSAGE_CHARS
    return total


async def whole_answer(run: ChatRun) -> dict[str, Any]:
    answers = [Answer() for _ in range(run.num_choices)]
    tally = Tally(run.num_choices)
    async with open_run(run.service, [run.job], run.started) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
            tally.add(index, delta)
    return await run.service.put_together(answers, lambda: _whole(run, answers, tally))


def _whole(run: ChatRun, answers: Sequence[Answer], tally: Tally) -> dict[str, Any]:
    body = {
        **run.head,
        "choices": [_choice(run, i, answer) for i, answer in enumerate(answers)],
        "usage": tally.usage(),
        "prompt_logprobs": None,
    }
    first = answers[0].first
    if run.request.prompt_logprobs is not None and first is not None:
        body["prompt_logprobs"] = prompt_logprobs(run.service.tokenizer, first)
    if run.request.return_token_ids:
        body["prompt_token_ids"] = expanded_prompt(first, run.job.token_ids)
    return body


def logprobs_of(
    run: ChatRun, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], is_first: bool
) -> dict[str, Any]:
    as_ids = bool(run.request.return_tokens_as_token_ids)
    starts = is_first and not run.job.continues_prompt
    return chat_logprobs(run.service.tokenizer, token_ids, logprobs, as_ids=as_ids, starts=starts)


def _choice(run: ChatRun, index: int, answer: Answer) -> dict[str, Any]:
    calls = joined_calls(answer.pieces)
    content = answer.text or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    message |= _reasoning(run, answer.reasoning)
    if calls:
        message["tool_calls"] = [call_json(call, in_stream=False) for call in calls]
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if run.request.logprobs:
        choice["logprobs"] = logprobs_of(run, answer.token_ids, answer.logprobs, True)
    if run.request.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _reasoning(run: ChatRun, text: str) -> dict[str, str]:
    """By both names that clients look for."""
    shown = text and run.request.include_reasoning is not False
    return {"reasoning": text, "reasoning_content": text} if shown else {}


async def stream_answer(run: ChatRun) -> AsyncGenerator[bytes, None]:
    """Server-sent events: the role, then text as it comes, the finish reason, usage, [DONE]."""
    options = run.request.stream_options
    tally = Tally(run.num_choices)
    began: set[int] = set()
    first: FirstOutput | None = None
    async with open_run(run.service, [run.job], run.started) as deltas:
        async for index, delta in deltas:
            if index not in began:
                began.add(index)
                first = first or delta.first
                tally.add(index, Delta(first=delta.first))  # the prompt is known, no token is out
                usage = chunk_usage(options, tally)
                opening = {"role": "assistant", "content": ""}
                extra = {}
                if run.request.return_token_ids:
                    extra["prompt_token_ids"] = expanded_prompt(delta.first, run.job.token_ids)
                yield sse({**run.head, "choices": [_empty(index, opening)], **usage, **extra})
            tally.add(index, delta)
            usage = chunk_usage(options, tally)
            choice = _chunk_choice(run, index, delta)
            if choice is not None:
                yield sse({**run.head, "choices": [choice], **usage})
    if options is not None and options.include_usage:
        usage = tally.usage()
        if options.include_cache_usage:
            usage["cache"] = cache_usage(first, run.job.items)
        yield sse({**run.head, "choices": [], "usage": usage})
    yield SSE_DONE


def _empty(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chunk_choice(run: ChatRun, index: int, delta: Delta) -> dict[str, Any] | None:
    """None when the delta has nothing to say yet (held-back text)."""
    request = run.request
    says: dict[str, Any] = _reasoning(run, delta.reasoning)
    if delta.text:
        says["content"] = delta.text
    if delta.calls:
        says["tool_calls"] = [call_json(c, in_stream=True) for c in joined_calls(delta.calls)]
    says_more = says or delta.finish_reason
    if not says_more and not (request.logprobs and delta.logprobs) and not request.return_token_ids:
        return None
    choice = _empty(index, says)
    if request.logprobs and delta.logprobs:
        choice["logprobs"] = logprobs_of(
            run, delta.token_ids, delta.logprobs, delta.first is not None
        )
    if delta.finish_reason:
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
    if request.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
    return choice


_EFFORTS = re.compile(r"\b(enable_thinking|reasoning_effort)\b")


def template_variables(request: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    """Variables of the chat template. Raises Unsupported for an effort that it cannot take."""
    found: dict[str, Any] = {}
    effort, source = request.reasoning_effort, template.source or ""
    if effort is not None:
        if _EFFORTS.search(source):
            found = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        elif effort not in ("none", "medium"):
            raise Unsupported(
                f"reasoning_effort is {effort!r}; this model's chat template takes no effort",
                param="reasoning_effort",
            )
    budget = request.thinking_token_budget
    if budget is not None and "thinking_budget" in source:
        found["thinking_budget"] = budget
    return found | (request.chat_template_kwargs or {})


def _ends_in_thought(request: ChatCompletionRequest, think: tuple[str, str], prompt: str) -> bool:
    """Whether the template ends the prompt with the start of reasoning, or the message that the
    answer continues is within it."""
    start, end = think[0].rstrip(), think[1].rstrip()
    if prompt.rstrip().endswith(start):
        return True
    said = (request.messages[-1].content if request.continue_final_message else "") or ""
    if not isinstance(said, str):
        said = "".join(getattr(part, "text", "") for part in said)
    return said.rfind(start) > said.rfind(end)


def plan_turn(
    request: ChatCompletionRequest,
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    calls: Calls | None,
    prompt: str,
    answer: Compiled,
) -> tuple[TurnFormat | None, Wanted | None]:
    """(how outputs are read, what binds them; None where `answer` alone does). Raises
    InvalidRequest."""
    row, think = template.tool_format if calls is not None else None, template.thinking
    if calls is not None and row is None:
        raise InvalidRequest(
            "the model's chat template writes tool calls in a form that is not known; start the "
            f"server with --tool-format and one of {', '.join(FORMATS)}",
            param="tools",
        )
    budget = request.thinking_token_budget
    marks = tokenizer.marks((row.literals if row else "") + " ".join(think or ()))
    if budget is not None and (think is None or think[1] not in marks):
        raise Unsupported(
            "thinking_token_budget: this model does not reason, or has no token that ends it",
            param="thinking_token_budget",
        )
    if row is None and think is None:
        return None, None
    is_open = think is not None and _ends_in_thought(request, think, prompt)
    only_calls = calls is not None and calls.choice == "required"
    schemas = calls.schemas() if calls is not None else {}
    turn = TurnFormat(row, schemas, think, is_open, marks, only_calls)
    is_bound = bool(answer.grammar)
    if calls is None and not is_bound and budget is None:
        return turn, None
    source = {
        "format": row.name if row else "",
        "tools": [
            {"name": one.function.name, "parameters": schema_of(one),
             "strict": bool(one.function.strict)}
            for one in (calls.tools if calls else ())
        ],
        "choice": calls.choice if calls else "auto",
        "parallel": calls.parallel if calls else False,
        "think": think and {"start": think[0], "end": think[1], "is_open": is_open,
                            "budget": budget},
        "marks": marks,
        "is_bound": is_bound,
        "answer": answer.grammar,
    }  # fmt: skip
    return turn, Wanted("turn", source, True, "tools" if calls else "response_format")
