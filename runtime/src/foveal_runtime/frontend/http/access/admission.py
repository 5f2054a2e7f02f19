"""Admission: how many requests, prompt tokens and media bytes one HTTP process holds at a time.

intake.py opens a Ticket before the body is read; handlers add tokens to it once they know them,
input processing adds media that it fetches. Everything is given back when the ticket closes.
Decides before anything is decoded. No I/O, no clock.
"""

from __future__ import annotations

from typing import Literal

from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import Overloaded, RateLimited

Reason = Literal["requests", "tokens", "media_bytes", "draining"]


class Gate:
    """The counters of one process. Invariant: each is the sum over open tickets.

    Attributes:
        leaving: /readyz says no, requests are still served. draining: they are refused.
        rejections: by reason, since the start.
    """

    def __init__(self, limits: Admission) -> None:
        self.limits = limits
        self.leaving = False
        self.draining = False
        self.num_requests = 0
        self.num_tokens = 0
        self.media_bytes = 0
        self.rejections: dict[Reason, int] = {
            "requests": 0, "tokens": 0, "media_bytes": 0, "draining": 0,
        }  # fmt: skip
        self._tickets: set[Ticket] = set()

    def enter(self) -> Ticket:
        """Raises Overloaded while draining, RateLimited when the process is full."""
        if self.draining:
            self.rejections["draining"] += 1
            raise Overloaded("this server is shutting down; another one takes over")
        if self.num_requests >= self.limits.max_requests:
            self.rejections["requests"] += 1
            raise RateLimited(
                f"{self.num_requests} requests are being served, the limit of this process"
            )
        ticket = Ticket(self)
        self._tickets.add(ticket)
        self.num_requests += 1
        return ticket

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.remove(ticket)
            self.num_requests -= 1
            self.num_tokens -= ticket.num_tokens
            self.media_bytes -= ticket.media_bytes

    def _charge(self, reason: Reason, amount: int, used: int, limit: int) -> None:
        """A request that alone exceeds the limit is let in when nothing else is: a limit slows
        down, it never makes a valid request impossible."""
        if used > 0 and used + amount > limit:
            self.rejections[reason] += 1
            what = "prompt tokens" if reason == "tokens" else "bytes of request bodies and media"
            raise RateLimited(
                f"{used} {what} are in flight; {amount} more would exceed this process's limit "
                f"of {limit}"
            )

    def check_integrity(self) -> None:
        assert self.num_requests == len(self._tickets)
        assert self.num_tokens == sum(ticket.num_tokens for ticket in self._tickets)
        assert self.media_bytes == sum(ticket.media_bytes for ticket in self._tickets)


class Ticket:
    """One request's share of the process. `close()` may be called twice."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._open = True
        self.num_tokens = 0
        self.media_bytes = 0

    def charge_tokens(self, num_tokens: int) -> None:
        gate = self._gate
        others = gate.num_tokens - self.num_tokens
        gate._charge("tokens", self.num_tokens + num_tokens, others, gate.limits.max_tokens)
        if self._open:
            self.num_tokens += num_tokens
            gate.num_tokens += num_tokens

    def charge_media_bytes(self, num_bytes: int) -> None:
        gate = self._gate
        others = gate.media_bytes - self.media_bytes
        gate._charge(
            "media_bytes", self.media_bytes + num_bytes, others, gate.limits.max_media_bytes
        )
        if self._open:
            self.media_bytes += num_bytes
            gate.media_bytes += num_bytes

    def close(self) -> None:
        if self._open:
            self._open = False
            self._gate._leave(self)
