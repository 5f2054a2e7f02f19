"""POST /v1/completions: one or several text prompts, streamed or whole, with echo and logprobs."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.http.answers import (
    Answer,
    Tally,
    cache_usage,
    chunk_usage,
    expanded_prompt,
    num_chars,
    prompt_logprobs,
    text_logprobs,
)
from foveal_runtime.frontend.http.asgi.json_bodies import SSE_DONE, sse
from foveal_runtime.frontend.http.service import (
    THREAD_CHARS,
    Job,
    RequestScope,
    Service,
    make_job,
    open_run,
)
from foveal_runtime.frontend.items.interfaces import PromptPlaceholders
from foveal_runtime.frontend.protocol.constraints import wanted_of
from foveal_runtime.frontend.protocol.requests import CompletionRequest, Prompt
from foveal_runtime.frontend.protocol.rules import check_fields, check_num_sequences
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire.messages import FirstOutput, TokenLogprobs


@dataclass(slots=True)
class CompletionRun:
    """A checked text completion: one job per prompt."""

    service: Service
    request: CompletionRequest
    jobs: list[Job]
    head: dict[str, Any]
    started: float
    relaxed: tuple[str, ...]

    @property
    def num_choices(self) -> int:
        return self.jobs[0].num_choices

    def job_of(self, index: int) -> Job:
        return self.jobs[index // self.num_choices]


async def plan_completion(
    service: Service, info: PromptPlaceholders, request: CompletionRequest, scope: RequestScope
) -> CompletionRun:
    service.check_task("generate")
    service.find_lora(request.model)
    wanted = wanted_of(request)
    check_fields(request, ignore_unknown=service.config.ignore_unknown_options)
    prompts = prompts_of(request.prompt)
    check_num_sequences(len(prompts), request.n or 1)
    compiled = await service.grammars.compile(wanted)
    is_long = sum(len(one) for one in prompts if isinstance(one, str)) > THREAD_CHARS
    jobs = []
    for index, prompt in enumerate(prompts):
        encode = functools.partial(
            prompt_ids,
            service,
            prompt,
            add_special_tokens=request.add_special_tokens is not False,
            truncates=request.truncate_prompt_tokens is not None,
        )
        token_ids = await service.in_thread(encode) if is_long else encode()
        refuse_placeholders(info, token_ids)
        jobs.append(
            make_job(
                service,
                request,
                scope,
                token_ids,
                (),
                grammar=compiled.grammar,
                num_prompts=len(prompts),
                suffix="" if len(prompts) == 1 else f"-p{index}",
                continues_prompt=True,
            )
        )
    head = service.head(f"cmpl-{scope.request_id}", "text_completion", request.model)
    return CompletionRun(service, request, jobs, head, scope.started, compiled.relaxed)


def prompts_of(prompt: Prompt) -> list[str | list[int]]:
    """Each prompt by itself. A list has entries of one kind: looking at each of a million ids would
    take 20 ms."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return cast("list[str | list[int]]", prompt)


def prompt_ids(
    service: Service,
    prompt: str | list[int],
    *,
    add_special_tokens: bool,
    truncates: bool,
    param: str = "prompt",
    most: int = 0,
) -> list[int]:
    """Of one prompt. Raises InvalidRequest for what is too long or no token. `truncates`: it will
    be cut to the model's context. `most`: see `TextTokenizer.encode`."""
    tokenizer, limit = service.tokenizer, service.longest_text(truncates=truncates)
    if isinstance(prompt, str):
        try:
            return tokenizer.encode(
                prompt, add_special_tokens=add_special_tokens, limit=limit, most=most
            )
        except ContextLengthExceeded as error:
            raise error.about(param, error.message) from None
    if len(prompt) > limit:
        raise ContextLengthExceeded(
            f"the prompt is too long: {param} has {len(prompt)} tokens, of which at most {limit} "
            "are taken: this model's maximum context length is exceeded",
            param=param,
        )
    largest = max(prompt, default=0)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"{param}: {largest} is not a token id below {tokenizer.vocab_size}", param=param
        )
    return prompt


def refuse_placeholders(
    info: PromptPlaceholders, token_ids: list[int], param: str = "prompt"
) -> None:
    for modality in MODALITIES:
        token_id = info.placeholder_token_id(modality)
        if token_id is not None and token_id in token_ids:
            raise InvalidRequest(
                f"the {param} contains the placeholder of {modality} input (token {token_id}); "
                "media are taken as parts of messages only",
                param=param,
            )


async def whole_answer(run: CompletionRun) -> dict[str, Any]:
    answers = [Answer() for _ in range(run.num_choices * len(run.jobs))]
    tally = Tally(run.num_choices)
    async with open_run(run.service, run.jobs, run.started, "text_completion") as deltas:
        async for index, delta in deltas:
            shown = _shown(run, delta)
            answers[index].add(shown)
            tally.add(index, shown)

    def whole() -> dict[str, Any]:
        choices = [_choice(run, i, answer) for i, answer in enumerate(answers)]
        return {**run.head, "choices": choices, "usage": tally.usage()}

    return await run.service.put_together(answers, whole)


def _shown(run: CompletionRun, delta: Delta) -> Delta:
    """Without the token that the engine makes where only the prompt is to be scored."""
    if run.request.max_tokens != 0:
        return delta
    return Delta(first=delta.first, finish_reason="length" if delta.finish_reason else "")


def _echo_text(run: CompletionRun, index: int) -> str:
    """The prompt as the user wrote it, or its tokens' text, of which some may be cut off."""
    prompt, job = prompts_of(run.request.prompt)[index // run.num_choices], run.job_of(index)
    if isinstance(prompt, str) and not job.is_truncated:
        return prompt
    return run.service.tokenizer.decode(job.token_ids)


def _offsets(
    run: CompletionRun, index: int, token_ids: Sequence[int], num_prompt: int, offset: int = 0
) -> list[int]:
    """Where each token stands in the choice's text, which goes on at `offset`, and where it ends.
    The first `num_prompt` are the prompt's. Tokens that the text leaves out have no width."""
    tokenizer, out = run.service.tokenizer, [offset]
    hides = run.request.skip_special_tokens is not False
    prompt = _echo_text(run, index) if num_prompt else ""
    starts = bool(num_prompt)
    for number, token_id in enumerate(token_ids):
        hidden = token_id in tokenizer.special_ids and (
            hides
            if number >= num_prompt
            else not prompt.startswith(tokenizer.token_text(token_id), out[-1])
        )
        out.append(out[-1] + (0 if hidden else num_chars(tokenizer, token_id, starts=starts)))
        starts = starts and hidden
    return out


def _choice(run: CompletionRun, index: int, answer: Answer) -> dict[str, Any]:
    request, tokenizer = run.request, run.service.tokenizer
    prefix = _echo_text(run, index) if request.echo else ""
    choice: dict[str, Any] = {
        "index": index,
        "text": prefix + answer.text,
        "logprobs": None,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "prompt_logprobs": None,
    }
    if request.logprobs is not None:
        token_ids = list(answer.token_ids)
        logprobs: list[TokenLogprobs | None] = list(answer.logprobs)
        if request.echo and answer.first is not None:
            token_ids = [*answer.first.prompt_logprob_ids, *token_ids]
            logprobs = [*answer.first.prompt_logprobs, *logprobs]
        choice["logprobs"] = text_logprobs(
            tokenizer,
            token_ids,
            logprobs,
            _offsets(run, index, token_ids, len(token_ids) - len(answer.token_ids)),
            as_ids=bool(request.return_tokens_as_token_ids),
        )
    if request.prompt_logprobs is not None and answer.first is not None:
        choice["prompt_logprobs"] = prompt_logprobs(tokenizer, answer.first)
    if request.return_token_ids:
        choice["token_ids"] = answer.token_ids
        choice["prompt_token_ids"] = expanded_prompt(answer.first, run.job_of(index).token_ids)
    return choice


async def stream_answer(run: CompletionRun) -> AsyncGenerator[bytes, None]:
    options = run.request.stream_options
    tally = Tally(run.num_choices)
    offsets: dict[int, int] = {}
    firsts: list[FirstOutput] = []
    async with open_run(run.service, run.jobs, run.started, "text_completion") as deltas:
        async for index, made in deltas:
            delta = _shown(run, made)
            tally.add(index, delta)
            if delta.first is not None:
                firsts.append(delta.first)
            choice = _chunk_choice(run, index, delta, offsets)
            if choice is not None:
                yield sse({**run.head, "choices": [choice], **chunk_usage(options, tally)})
    if options is not None and options.include_usage:
        usage = tally.usage()
        if options.include_cache_usage:
            usage["cache"] = cache_usage(max(firsts, key=_seconds, default=None), ())
        yield sse({**run.head, "choices": [], "usage": usage})
    yield SSE_DONE


def _seconds(first: FirstOutput) -> float:
    return first.queue_seconds + first.prefill_seconds


def _chunk_choice(
    run: CompletionRun, index: int, delta: Delta, offsets: dict[int, int]
) -> dict[str, Any] | None:
    """`offsets` holds the text position per choice, for logprobs."""
    request, tokenizer = run.request, run.service.tokenizer
    text = delta.text
    token_ids: list[int] = list(delta.token_ids)
    logprobs: list[TokenLogprobs | None] = list(delta.logprobs)
    starts = index not in offsets
    offset = offsets.setdefault(index, 0)
    if starts and request.echo:
        text = _echo_text(run, index) + text
        if delta.first is not None and request.logprobs is not None:
            token_ids = [*delta.first.prompt_logprob_ids, *token_ids]
            logprobs = [*delta.first.prompt_logprobs, *logprobs]
    says = text or delta.finish_reason
    has_logprobs = request.logprobs is not None and bool(logprobs)
    if not says and not has_logprobs and not request.return_token_ids:
        return None
    choice: dict[str, Any] = {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": delta.finish_reason or None,
        "stop_reason": delta.stop_reason,
    }
    if request.logprobs is not None and logprobs:
        num_prompt = len(token_ids) - len(delta.token_ids)
        places = _offsets(run, index, token_ids, num_prompt, offset)
        found = text_logprobs(
            tokenizer, token_ids, logprobs, places,
            as_ids=bool(request.return_tokens_as_token_ids),
        )  # fmt: skip
        offsets[index] = places[-1]
        choice["logprobs"] = found
    if request.return_token_ids:
        choice["token_ids"] = list(delta.token_ids)
        if starts:
            choice["prompt_token_ids"] = expanded_prompt(delta.first, run.job_of(index).token_ids)
    return choice
