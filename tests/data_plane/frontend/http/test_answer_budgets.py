"""Answers have budgets: what n, max_tokens and log probabilities may hold of a process's memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from foveal_runtime.frontend.engines.run import (
    MAX_UNREAD,
    MAX_UNREAD_PLAIN,
    Lost,
    Rejected,
    Stream,
)
from foveal_runtime.frontend.http.access.admission import (
    SCORE_BYTES,
    SEQUENCE_TOKENS,
    TOKEN_BYTES,
    Gate,
)
from foveal_runtime.frontend.http.service import Service
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.plan.config import Admission
from foveal_runtime.plan.errors import InvalidRequest, RateLimited
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.messages import EngineOutput

SCORES = {"logprobs": True, "top_logprobs": 20}


def assert_refused(response: Any, status: int, *words: str) -> None:
    assert response.status_code == status, response.text[:300]
    for word in words:
        assert word in response.json()["error"]["message"]


async def test_every_choice_is_charged_for_its_prompt() -> None:
    """A prompt of 30,000 tokens with n = 64 counted as 30,000."""
    gate = Gate(Admission(max_tokens=1000))
    ticket = gate.enter()
    ticket.charge_tokens(100, 3)
    assert gate.num_tokens == 300 + 2 * SEQUENCE_TOKENS
    with pytest.raises(RateLimited, match="limit of 1000"):
        gate.enter().charge_tokens(100, 2)
    ticket.close()
    gate.check_integrity()
    assert gate.num_tokens == 0


async def test_whole_answers_with_too_many_scores_are_refused(start: Any) -> None:
    """64 choices of 4,000 tokens with 21 log probabilities each were gathered, 2 GB of them."""
    async with start(admission=Admission(max_answer_scores=100_000)) as harness:
        refused = await harness.chat(n=64, max_tokens=1000, **SCORES)
        assert_refused(refused, 400, "64 sequences of 1000 tokens", "at most 100000", "stream")
        assert refused.json()["error"]["param"] == "logprobs"
        answer = await harness.chat(n=4, max_tokens=1000, **SCORES)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 4
        assert harness.app.gate.num_scores == 0


async def test_prompts_share_the_scores_of_one_answer(start: Any) -> None:
    async with start(admission=Admission(max_answer_scores=100_000)) as harness:
        body = {"prompt": ["a"] * 64, "max_tokens": 1000, "logprobs": 20}
        assert_refused(await harness.http.post("/v1/completions", json=body), 400, "at most 100000")


async def test_an_open_end_is_cut_to_what_may_be_held(start: Any) -> None:
    async with start(admission=Admission(max_answer_scores=2100)) as harness:
        harness.say[0] = "x" * 500
        choice = (await harness.chat(**SCORES)).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"]["content"]) == 100
        whole = (await harness.chat()).json()["choices"][0]
        assert len(whole["message"]["content"]) == 500


@pytest.mark.parametrize("stream", [False, True])
async def test_scores_of_many_clients_are_refused_by_name(start: Any, stream: bool) -> None:
    """Each client's answer fits; all of them together filled the memory of the process."""
    async with start(admission=Admission(max_answer_scores=30_000)) as harness:
        harness.generator.hold = asyncio.Event()
        asked = {"n": 8, "max_tokens": 100, "stream": stream, **SCORES}
        first = asyncio.create_task(harness.chat(**asked))
        await harness.until(lambda: len(harness.generator.running) == 8)
        assert harness.app.gate.num_scores == 8 * 100 * 21
        assert_refused(await harness.chat(**asked), 429, "log probabilities", "limit of 30000")
        assert harness.app.gate.rejections["scores"] == 1
        assert (await harness.chat(max_tokens=1)).status_code == 200
        harness.generator.hold.set()
        assert (await first).status_code == 200
        assert harness.app.gate.num_scores == 0


async def test_scores_of_prompts_are_charged(start: Any) -> None:
    async with start(admission=Admission(max_answer_scores=3000)) as harness:
        body = {"prompt": "x" * 400, "prompt_logprobs": 20, "max_tokens": 1}
        assert_refused(await harness.http.post("/v1/completions", json=body), 400, "holds 3000")


async def test_what_a_long_answer_gathers_is_charged_as_it_comes(start: Any) -> None:
    """Tokens beyond the first thousand are not charged before they exist."""
    asked = {"logprobs": True, "top_logprobs": 2}
    async with start(admission=Admission(max_answer_scores=10_000)) as harness:
        harness.say[0] = "x" * 3000
        assert (await harness.chat(**asked)).status_code == 200
        ticket = harness.app.gate.enter()
        ticket.charge_answer(0, 3000)
        harness.say[0] = "x" * 500
        assert (await harness.chat(**asked)).status_code == 200
        harness.say[0] = "x" * 3000
        assert_refused(await harness.chat(**asked), 429, "limit of 10000")
        ticket.close()


def unread(logprobs: int) -> list[Any]:
    request = PreparedRequest("r", [1], [], [], SamplingParams(max_tokens=9000, logprobs=logprobs))
    stream = Stream(("r", 0), request)
    for token in range(MAX_UNREAD_PLAIN + 500):
        stream.push(EngineOutput(("r", 0), (token,)))
    return list(stream._events)


@pytest.mark.parametrize(("logprobs", "most"), [(5, MAX_UNREAD), (-1, MAX_UNREAD_PLAIN)])
def test_outputs_that_nobody_reads_are_bounded(logprobs: int, most: int) -> None:
    """A client that read nothing had all that its request could give kept for it."""
    kept = unread(logprobs)
    assert len(kept) == most + 1
    assert kept[-1].finish == "error"
    assert kept[-1].error[0] == RateLimited.code
    assert "slow" in kept[-1].error[1]


@pytest.mark.parametrize(
    "end", [EngineOutput(("r", 0), (1,), finish="stop"), Lost("gone"), Rejected("x", None)]
)
def test_an_end_is_told_at_the_bound(end: Any) -> None:
    """An answer that had ended was replaced by the error about a slow client."""
    stream = Stream(("r", 0), PreparedRequest("r", [1], [], [], SamplingParams(max_tokens=9000)))
    for token in range(MAX_UNREAD_PLAIN):
        stream.push(EngineOutput(("r", 0), (token,)))
    stream.push(end)
    assert list(stream._events)[-1] is end


async def test_tokens_that_may_be_held_are_charged_at_admission(start: Any) -> None:
    """Answers without log probabilities were held and not counted."""
    async with start(admission=Admission(max_media_bytes=300_000)) as harness:
        harness.generator.hold = asyncio.Event()
        asked = {"n": 4, "max_tokens": 500}
        first = asyncio.create_task(harness.chat(**asked))
        await harness.until(lambda: len(harness.generator.running) == 4)
        assert harness.app.gate.media_bytes >= 4 * 500 * TOKEN_BYTES
        assert_refused(await harness.chat(**asked), 429, "answers", "limit of 300000")
        harness.generator.hold.set()
        assert (await first).status_code == 200
        assert harness.app.gate.media_bytes == 0


async def test_an_answer_that_has_begun_is_not_ended_for_its_bytes(start: Any) -> None:
    """Media of others that came later ended answers in their middle."""
    async with start(admission=Admission(max_media_bytes=500_000)) as harness:
        harness.say[0] = "x" * 3500
        ticket = harness.app.gate.enter()
        ticket.charge_media_bytes(150_000)
        answer = await harness.chat()
        assert answer.status_code == 200, answer.text[:300]
        ticket.close()
        harness.app.gate.check_integrity()
        assert harness.app.gate.media_bytes == 0


def test_what_an_answer_gathers_keeps_new_requests_out() -> None:
    gate = Gate(Admission(max_media_bytes=500_000))
    whole, other = gate.enter(), gate.enter()
    whole.admit()
    other.admit()
    other.charge_media_bytes(300_000)
    whole.charge_answer(1000, 0)
    whole.charge_answer(2000, 0, has_begun=True)
    assert gate.media_bytes == 300_000 + 3000 * TOKEN_BYTES
    gate.check_integrity()
    with pytest.raises(RateLimited, match="answers"):
        gate.enter().charge_answer(1, 0)


def test_an_answer_holds_no_more_scores_than_there_is_room_for() -> None:
    """200 MB of log probabilities were let into a process that was planned for 36."""
    gate = Gate(Admission(max_media_bytes=1 << 20, max_body_bytes=1 << 20))
    ticket = gate.enter()
    assert ticket.max_scores == (1 << 20) // SCORE_BYTES
    with pytest.raises(InvalidRequest, match="holds 10485 at most"):
        ticket.charge_answer(0, ticket.max_scores + 1)
    ticket.charge_answer(0, ticket.max_scores)
    assert gate.media_bytes <= 1 << 20


async def test_scores_of_one_client_are_let_in_alone(start: Any) -> None:
    """With little room for media they were refused for ever, on a server that did nothing."""
    limits = Admission(max_media_bytes=1 << 20)
    async with start(admission=limits) as harness:
        asked = {"n": 8, "max_tokens": 100, "stream": True, **SCORES}
        assert (await harness.chat(**asked)).status_code == 200
        await harness.until(lambda: harness.app.gate.num_requests == 0)
        ticket = harness.app.gate.enter()
        ticket.admit()
        ticket.charge_answer(0, 1)
        assert_refused(await harness.chat(**asked), 429, "limit of 1048576")
        ticket.close()
        assert (await harness.chat(**asked)).status_code == 200


def test_an_answer_that_has_begun_ends_for_no_scores_of_its_own() -> None:
    gate = Gate(Admission(max_answer_scores=100))
    ticket = gate.enter()
    ticket.charge_answer(0, 90)
    ticket.charge_answer(0, 90, has_begun=True)
    gate.check_integrity()


async def test_one_large_answer_at_a_time_is_put_together(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each thread that computes takes the interpreter's turns from the event loop: several at a
    time held it for 50 ms."""
    running = most = 0
    in_thread = Service.in_thread

    async def counted(self: Service, work: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await in_thread(self, work)
        finally:
            running -= 1

    monkeypatch.setattr(Service, "in_thread", counted)
    monkeypatch.setattr("foveal_runtime.frontend.http.service.THREAD_SCORES", 10)
    async with start() as harness:
        asked = [harness.chat(n=16, max_tokens=64, **SCORES) for _ in range(4)]
        answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert most == 1
