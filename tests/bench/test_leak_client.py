"""What the soak's client counts as an error: with nothing asked, nothing leaks."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterator

import pytest

from e2e.soak import leak
from tests.support.loopback_server import LoopbackHandler, LoopbackServer

WHOLE, LEAVES, REFUSED = 1, 10, 3
"""Numbers of requests: one that reads its answer, one that leaves, one that is to be refused."""


@pytest.fixture
def served() -> Iterator[Callable[..., str]]:
    """served(body, status) → a URL that answers so."""

    class Handler(LoopbackHandler):
        status, body = 200, b""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send(self.status, self.body)

    def answer(body: bytes, status: int = 200) -> str:
        Handler.body, Handler.status = body, status
        return server.url

    with LoopbackServer(Handler).running() as server:
        yield answer


def test_whole_answers_refusals_and_hang_ups_are_no_errors(served: Callable[..., str]) -> None:
    whole = served(b'data: {"choices": []}\n\ndata: [DONE]\n\n')
    leak.ask(whole, WHOLE)
    leak.ask(whole, LEAVES)
    leak.ask(served(b"{}", 400), REFUSED)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (b"", WHOLE),
        (b'data: {"choices": []}\n\n', WHOLE),
        (b'data: {"error": {}}\n\ndata: [DONE]\n\n', WHOLE),
        (b'data: {"error": {}}\n\n', LEAVES),
        (b"", LEAVES),
        (b"data: [DONE]\n\n", REFUSED),
    ],
)
def test_other_answers_are_errors(served: Callable[..., str], body: bytes, number: int) -> None:
    with pytest.raises(ConnectionError):
        leak.ask(served(body), number)


def ended(monkeypatch: pytest.MonkeyPatch, *errors: Exception, least: int = 1) -> leak.Load:
    """A client whose requests fail with `errors` one after the other; it stops after the last."""
    load, left = leak.Load("", 1e6), list(errors)

    def ask(*_: object) -> None:
        if left:
            raise left.pop(0)
        load.stopped.set()

    monkeypatch.setattr(leak, "ask", ask)
    load.start()
    load.stopped.wait(60)
    load.end(least)
    return load


@pytest.mark.parametrize("error", [http.client.BadStatusLine("x"), OSError("refused")])
def test_a_client_goes_on_after_errors(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    load = ended(monkeypatch, error, error)
    assert load.num == 3
    assert load.errors == [str(error)] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_client_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leak, "ask", lambda *_: 1 / 0)
    load = leak.Load("", 1e6)
    load.start()
    load.join(60)
    load.end()
    assert load.errors == ["the client died: request 1"]


def test_too_few_requests_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended(monkeypatch, least=1).errors == []
    assert ended(monkeypatch, least=2).errors == ["1 requests, less than 2"]
