"""Admission: how many requests, prompt tokens and media bytes one HTTP process holds at a time.

asgi/middleware.py opens a Ticket before the body is read and charges its bytes as they arrive; a
request takes one of the places once its body is complete, so that a client that declares a body and
sends none keeps nobody out. Handlers add tokens once they know them, input processing adds media
that it fetches. What of an answer may wait for a client that reads nothing is charged once the
prompt is known, what a whole answer gathers beyond that as it comes. Everything is given back when
the ticket closes. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import msgspec

from foveal_runtime.frontend.engines.run import MAX_UNREAD
from foveal_runtime.frontend.protocol.bounds import check_prompt_logprobs, tokens_with_scores
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest, CompletionRequest
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import InvalidRequest, Overloaded, RateLimited
from foveal_runtime.plan.sampling import SamplingParams

Reason = Literal["requests", "uploads", "tokens", "scores", "media_bytes", "draining"]
SEQUENCE_TOKENS = 256
"""What one more choice of a prompt costs besides its tokens, in tokens."""
PROMPT_TOKEN_BYTES = 48
"""What a token of a prompt takes here, as a number and in the message to an engine."""
SEQUENCE_BYTES = 8
"""What it takes in each message more."""
TOKEN_BYTES = 130
SCORE_BYTES = 100
"""What a token and a log probability of an answer take while they are held."""


class Gate:
    """The counters of one process. Invariant: each is the sum over open tickets.

    Attributes:
        media_bytes: of bodies, fetched media, prompts and answers.
        max_scores: log probabilities held.
        draining: /readyz says no and requests are refused.
        num_requests: whose body is complete; num_uploads: whose body is still arriving.
        rejections: by reason, since the start.
    """

    def __init__(self, limits: Admission) -> None:
        self.limits = limits
        room = max(limits.max_media_bytes, limits.max_body_bytes)  # what a plan keeps at least
        self.max_scores = min(limits.max_answer_scores, room // SCORE_BYTES)
        self.draining = False
        self.num_requests = 0
        self.num_uploads = 0
        self.num_tokens = 0
        self.num_scores = 0
        self.media_bytes = 0
        self.rejections: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)
        self._tickets: set[Ticket] = set()
        self._uploads: dict[str, set[Ticket]] = {}

    @property
    def is_choked(self) -> bool:
        """Uploads hold every place or every byte there is: the next request would be refused."""
        uploading = sum(t.media_bytes for group in self._uploads.values() for t in group)
        full = self.num_uploads >= self.limits.max_requests
        return full or uploading >= self.limits.max_media_bytes

    def enter(self, client: str = "", declared_bytes: int = 0) -> Ticket:
        """Begins the upload of a request from the address `client`.

        Raises Overloaded while draining, RateLimited when the process is full or the client's
        share of uploads is.
        """
        if self.draining:
            self.rejections["draining"] += 1
            raise Overloaded("this server is shutting down; another one takes over")
        self._check_requests()
        self._check(
            "media_bytes", self.media_bytes + declared_bytes, self.media_bytes,
            self.limits.max_media_bytes,
        )  # fmt: skip
        share = max(1, int(self.limits.max_requests * self.limits.client_share))
        mine = self._uploads.get(client, ())
        if len(mine) >= share or self.num_uploads >= self.limits.max_requests:
            self.rejections["uploads"] += 1
            raise RateLimited(
                f"{len(mine)} request bodies from this address are being received, of "
                f"{self.num_uploads} in all; the limits are {share} and {self.limits.max_requests}"
            )
        ticket = Ticket(self, client)
        self._tickets.add(ticket)
        self._uploads.setdefault(client, set()).add(ticket)
        self.num_uploads += 1
        return ticket

    def _admit(self, ticket: Ticket) -> None:
        self._check_requests()
        self._end_upload(ticket)
        self.num_requests += 1

    def _check_requests(self) -> None:
        if self.num_requests >= self.limits.max_requests:
            self.rejections["requests"] += 1
            raise RateLimited(
                f"{self.num_requests} requests are being served, the limit of this process"
            )

    def _end_upload(self, ticket: Ticket) -> None:
        group = self._uploads[ticket.client]
        group.remove(ticket)
        if not group:
            del self._uploads[ticket.client]
        self.num_uploads -= 1

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            if ticket.is_uploading:
                self._end_upload(ticket)
            else:
                self.num_requests -= 1
            self.num_tokens -= ticket.num_tokens
            self.num_scores -= ticket.num_scores
            self.media_bytes -= ticket.media_bytes

    def _check(self, reason: Reason, wanted: int, used: int, limit: int, whose: str = "") -> None:
        """A request that alone exceeds the limit is let in when nothing else is: a limit slows
        down, it never makes a valid request impossible."""
        if used > 0 and wanted > limit:
            self.rejections[reason] += 1
            what = (
                "prompt tokens"
                if reason == "tokens"
                else "bytes of bodies, media, prompts and answers"
            )
            raise RateLimited(
                f"{used} {what}{whose} are in flight; {wanted - used} more would exceed this "
                f"process's limit of {limit}"
            )

    def _check_share(self, ticket: Ticket, num_bytes: int) -> None:
        others = sum(t.media_bytes for t in self._uploads[ticket.client] if t is not ticket)
        limit = int(self.limits.max_media_bytes * self.limits.client_share)
        wanted = others + ticket.media_bytes + num_bytes
        self._check("uploads", wanted, others, limit, " from this address")

    def check_integrity(self) -> None:
        uploading = {ticket for ticket in self._tickets if ticket.is_uploading}
        assert self.num_uploads == len(uploading) == sum(map(len, self._uploads.values()))
        assert all(self._uploads.values()), "a client without uploads is remembered"
        assert self.num_requests == len(self._tickets) - len(uploading)
        assert self.num_tokens == sum(ticket.num_tokens for ticket in self._tickets)
        assert self.num_scores == sum(ticket.num_scores for ticket in self._tickets)
        assert self.media_bytes == sum(ticket.media_bytes for ticket in self._tickets)


class Ticket:
    """One request's share of the process. `close()` may be called twice.

    Attributes:
        client: the address the request comes from. is_uploading: its body is not complete yet.
    """

    def __init__(self, gate: Gate, client: str) -> None:
        self._gate = gate
        self._open = True
        self.client = client
        self.is_uploading = True
        self.num_tokens = 0
        self.num_scores = 0
        self.media_bytes = 0

    def admit(self) -> None:
        """The body is complete: takes one of the places. Raises RateLimited."""
        if self._open and self.is_uploading:
            self._gate._admit(self)
            self.is_uploading = False

    def charge_tokens(self, num_tokens: int, num_sequences: int = 1) -> None:
        """Each of the sequences has a copy of the prompt on its way and in the engine. What that
        takes here counts with the bytes of bodies, media and answers. Raises RateLimited."""
        gate = self._gate
        num_bytes = num_tokens * (PROMPT_TOKEN_BYTES + SEQUENCE_BYTES * (num_sequences - 1))
        num_tokens = num_tokens * num_sequences + SEQUENCE_TOKENS * (num_sequences - 1)
        others = gate.num_tokens - self.num_tokens
        gate._check("tokens", gate.num_tokens + num_tokens, others, gate.limits.max_tokens)
        self.charge_media_bytes(num_bytes)
        if self._open:
            self.num_tokens += num_tokens
            gate.num_tokens += num_tokens

    @property
    def max_scores(self) -> int:
        """Log probabilities that one answer may hold."""
        return self._gate.max_scores

    def charge_answer(self, num_tokens: int, num_scores: int, *, has_begun: bool = False) -> None:
        """Tokens and log probabilities that may be held until the request ends. Their bytes count
        with those of bodies and media, for which there is room in the plan. An answer that has
        begun is not ended for its bytes: they keep new requests out.

        Raises RateLimited where others hold the rest, InvalidRequest where it alone is too large.
        """
        gate = self._gate
        if num_scores > gate.max_scores:
            raise InvalidRequest(
                f"log probabilities: {num_scores} would be held, this server holds "
                f"{gate.max_scores} at most: ask for fewer tokens, choices or alternatives",
                param="logprobs",
            )
        others = gate.num_scores - self.num_scores
        if num_scores and others and gate.num_scores + num_scores > gate.max_scores:
            gate.rejections["scores"] += 1
            raise RateLimited(
                f"log probabilities: {gate.num_scores} are in flight; {num_scores} more would "
                f"exceed this process's limit of {gate.max_scores}"
            )
        num_bytes = num_tokens * TOKEN_BYTES + num_scores * SCORE_BYTES
        if has_begun:
            self._count_media_bytes(num_bytes)
        else:
            self.charge_media_bytes(num_bytes)
        if self._open:
            self.num_scores += num_scores
            gate.num_scores += num_scores

    def charge_media_bytes(self, num_bytes: int) -> None:
        gate = self._gate
        if self._open and self.is_uploading:
            gate._check_share(self, num_bytes)
        others = gate.media_bytes - self.media_bytes
        gate._check(
            "media_bytes", gate.media_bytes + num_bytes, others, gate.limits.max_media_bytes
        )
        self._count_media_bytes(num_bytes)

    def _count_media_bytes(self, num_bytes: int) -> None:
        if self._open:
            self.media_bytes += num_bytes
            self._gate.media_bytes += num_bytes

    def close(self) -> None:
        if self._open:
            self._open = False
            self._gate._leave(self)


Hold = Callable[[int, int], None]
"""Called with so many tokens and log probabilities of an answer that is held until its end. Raises
RateLimited for log probabilities alone."""


def hold_nothing(num_tokens: int, num_scores: int) -> None:
    """For answers that go out as they come."""


def charge_answer(
    request: ChatCompletionRequest | CompletionRequest,
    ticket: Ticket,
    sampling: SamplingParams,
    num_tokens: int,
    num_prompts: int,
) -> tuple[SamplingParams, Hold]:
    """Of one of `num_prompts` prompts, which has `num_tokens`. Raises InvalidRequest or
    RateLimited."""
    num_choices = request.n or 1
    num_scores = check_prompt_logprobs(num_tokens * num_choices, sampling.prompt_logprobs)
    if not request.stream:
        given = request.max_tokens or getattr(request, "max_completion_tokens", None)
        max_tokens = tokens_with_scores(
            sampling.max_tokens, sampling.logprobs, num_choices * num_prompts,
            ticket.max_scores, is_given=given is not None,
        )  # fmt: skip
        least = min(sampling.min_tokens, max_tokens)
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=least)
    unread = num_choices * min(sampling.max_tokens, MAX_UNREAD)
    num_scores += unread * (sampling.logprobs + 1)
    ticket.charge_answer(unread, num_scores)
    return sampling, hold_nothing if request.stream else _holder(ticket, unread, num_scores)


def _holder(ticket: Ticket, first_tokens: int, first_scores: int) -> Hold:
    """Charges as much again whenever what was charged is used up."""
    left_tokens, left_scores = first_tokens, first_scores

    def hold(num_tokens: int, num_scores: int) -> None:
        nonlocal left_tokens, left_scores
        left_tokens -= num_tokens
        left_scores -= num_scores
        if left_tokens < 0:
            ticket.charge_answer(first_tokens - left_tokens, 0, has_begun=True)
            left_tokens = first_tokens
        if left_scores < 0:
            ticket.charge_answer(0, first_scores - left_scores, has_begun=True)
            left_scores = first_scores

    return hold
