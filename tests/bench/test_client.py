"""The replaying client against a scripted server: what it sends, what it times, what it calls an
error."""

import json
import time

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from foveal_runtime.bench.client import Replay, Target
from foveal_runtime.bench.traces import Question, Trace


class Script:
    """Streams three words; remembers requests. Some texts make it answer oddly."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.num_open = 0
        self.most_open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        text = body["messages"][-1]["content"][-1]["text"]
        if text == "latin":
            return web.Response(status=502, body="Zeitüberschreitung".encode("latin-1"))
        if text == "refuse":
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        if text == "think":
            await send(response, {"choices": [{"delta": {"reasoning_content": "hm"}}]})
        for word in () if text == "think" else ("a ", "b ", "c"):
            await send(response, {"choices": [{"delta": {"content": word}}]})
        if text == "parts":
            await send(response, {"choices": [{"delta": {"content": [{"text": "a"}]}}]})
        self.num_open -= 1
        if text == "cut":
            return response
        if text == "fail":
            await send(response, {"error": {"message": "out of memory"}})
            return response
        await send(response, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage: dict = {"prompt_tokens": 9, "completion_tokens": 3}
        usage["prompt_tokens_details"] = {"cached_tokens": 4}
        await send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def send(response: web.StreamResponse, event: dict) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def script():
    found = Script()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", found.answer)
    server = TestServer(app)
    await server.start_server()
    found.url = str(server.make_url("")).rstrip("/")
    yield found
    await server.close()


def replay(script: Script, *conversations: tuple[Question, ...]) -> Replay:
    trace = Trace("test", conversations, 3)
    return Replay(Target((script.url,), "m"), trace, {1: "data:image/png;base64,AAAA"})


async def test_a_reply_is_timed_and_counted(script):
    (reply,), seconds = await replay(script, (Question((1,), "what?"),)).run()
    assert reply.error == ""
    assert reply.text == "a b c"
    assert len(reply.chunks) == 3, "an empty first piece is no token"
    assert reply.sent <= reply.chunks[0] <= reply.chunks[-1] <= reply.done
    assert seconds > 0
    assert (reply.num_prompt_tokens, reply.num_cached_tokens, reply.num_output_tokens) == (9, 4, 3)
    (body,) = script.bodies
    assert body["stream"]
    assert body["temperature"] == 0
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]


async def test_turns_carry_their_history(script):
    replies, _ = await replay(script, (Question((1,), "one"), Question((), "two"))).run()
    assert [reply.turn for reply in replies] == [0, 1]
    roles = [message["role"] for message in script.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert script.bodies[1]["messages"][1]["content"] == "a b c"


async def test_no_more_conversations_at_a_time_than_allowed(script):
    conversations = [(Question((), f"question {i}"),) for i in range(12)]
    replies, _ = await replay(script, *conversations).run(concurrency=2)
    assert [reply.conversation for reply in replies] == list(range(12))
    assert script.most_open <= 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("refuse", "429"),
        ("cut", "cut"),
        ("fail", "memory"),
        ("latin", "502: Zeit"),
        ("parts", "TypeError"),
    ],
)
async def test_what_went_wrong_is_an_error(script, text, wanted):
    """A conversation ends with it; others go on."""
    bad, good = (Question((), text), Question((), "never asked")), (Question((), "fine"),)
    replies, _ = await replay(script, bad, good).run()
    assert len(replies) == 2
    assert wanted in replies[0].error
    assert replies[1].error == ""


async def test_reasoning_is_output_but_no_text(script):
    (reply,), _ = await replay(script, (Question((), "think"),)).run()
    assert (reply.error, reply.text, len(reply.chunks)) == ("", "", 1)


async def test_waiting_for_the_first_arrival_is_no_time_of_the_server(script):
    (reply,), seconds = await replay(script, (Question((), "late"),)).run(starts=[0.5])
    assert reply.error == ""
    assert reply.done - reply.sent <= seconds <= time.perf_counter() - reply.sent


async def test_no_server_is_an_error():
    trace = Trace("test", ((Question((), "hello"),),), 3)
    (reply,), _ = await Replay(Target(("http://127.0.0.1:9",), "m"), trace, {}).run()
    assert reply.error


async def test_conversations_start_at_their_times(script):
    conversations = [(Question((), str(i)),) for i in range(3)]
    replies, seconds = await replay(script, *conversations).run(starts=[0.0, 0.1, 0.2])
    assert seconds >= 0.2
    assert replies[0].sent < replies[1].sent < replies[2].sent
