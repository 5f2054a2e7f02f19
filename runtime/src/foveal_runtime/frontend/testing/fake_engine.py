"""An engine without a model, for tests of what talks to engines: the real mirror, scripted tokens.

Shipped beside the seam it stands in for. Runs as a task of the caller's event loop over any
`wire.transport.EngineTransport`; tests decide when it emits, drains, forgets or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from dataclasses import dataclass, field

import msgspec

from foveal_runtime.mirror.messages import Bye, Death, DownMessage, EngineHeartbeat, RequestId
from foveal_runtime.mirror.receiver import ReadyRequest, Receiver, ReceiverLimits
from foveal_runtime.plan.errors import RequestQuarantined
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import (
    EngineInfo,
    EngineLoad,
    EngineOutput,
    FirstOutput,
    Outputs,
    RequestBody,
)
from foveal_runtime.wire.transport import EngineTransport, LinkDown

_TICK_SECONDS = 0.002


def token_at(prompt: list[int], index: int) -> int:
    """The output token at `index` of a prompt: the same on every engine and every attempt."""
    return (sum(prompt) * 31 + index * 7) % 997


@dataclass
class Served:
    """A request the engine took."""

    rid: RequestId
    fid: str
    body: RequestBody
    prompt: list[int]
    emitted: int
    items: dict[MMHash, int]
    num_hits: int
    outputs: int = field(default=0)


class ScriptedEngine:
    """An engine that answers by a script.

    Attributes:
        allowance: output tokens it may still emit, None = no limit; a test sets it to stop an
            engine in the middle of a sentence.
        finish_with: (code, message): every request ends with this error.
        poison: a token that no prompt may hold: the engine dies of it at the first step, and its
            next process `tells` which requests were new in that step, if it does.
        served: every request taken, in order.
    """

    def __init__(
        self,
        transport: EngineTransport,
        *,
        namespace: bytes = b"",
        engine_id: str = "engine-0",
        limits: ReceiverLimits | None = None,
        max_model_len: int = 2048,
        boot: int = 1,
        node: str = "",
        open_shared: codec.SharedOpener | None = None,
    ) -> None:
        self.transport = transport
        self.limits = limits or ReceiverLimits(capacity_bytes=64 << 20)
        self.namespace = namespace
        self.info = EngineInfo(engine_id, "tiny", "", max_model_len, 8, pools=True)
        self.allowance: int | None = None
        self.finish_with: tuple[str, str] | None = None
        self.served: list[Served] = []
        self.aborted: list[RequestId] = []
        self.is_silent = False
        self.poison: int | None = None
        self.tells = True
        self._death: Death | None = None
        self.load: EngineLoad | None = None
        self._running: list[Served] = []
        self._boot = boot
        self._node = node
        self._open_shared = open_shared
        self.receiver = self._new_receiver()
        self._task: asyncio.Task[None] | None = None

    def _new_receiver(self) -> Receiver:
        return Receiver(
            self.limits,
            namespace=self.namespace,
            boot=self._boot,
            node=self._node,
            info=codec.encode_info(self.info),
            death=self._death,
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Dies: no word to anybody, the transport closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.transport.close()

    def restart(self) -> None:
        """Forgets everything, as a new process at the same address would."""
        self._boot += 1
        self._running.clear()
        self.receiver = self._new_receiver()

    def drain(self) -> None:
        """Says good-bye to every session; requests are to go on elsewhere."""
        self.info = msgspec.structs.replace(self.info, draining=True)
        sessions = [(fid, s.sid) for fid, s in self.receiver.sessions.items()]
        for fid, sid in sessions:
            self._send(fid, Bye(sid, "draining"))
            self.receiver.on_session_lost(fid, "draining")
        self._running.clear()
        self.receiver.info = codec.encode_info(self.info)

    async def _run(self) -> None:
        beat = 0
        while True:
            if not self.is_silent:
                self._step(beat)
            beat += 1
            await asyncio.sleep(_TICK_SECONDS)

    def _step(self, beat: int) -> None:
        for fid, frames in self.transport.poll(0):
            message = codec.decode_up(frames)
            values = codec.open_values(message, frames, self._open_shared)
            for answer in self.receiver.on_message(fid, message, values):
                self._send(fid, answer)
        for key in self.receiver.take_aborted():
            self.aborted.append(key[1])
            self._running = [s for s in self._running if (s.fid, s.rid) != key]
            self.receiver.finish(*key)
        for ready in self.receiver.take_ready():
            self._take(ready)
        if any(self.poison in served.prompt for served in self._running):
            new = [served.body for served in self._running if served.outputs < 2]
            keys = {body.key for body in new if body.on_trial} or {body.key for body in new}
            death = Death(self._boot, time.time(), tuple(keys), is_own=True)
            self._death = death if self.tells else None
            self.restart()
            return
        for served in list(self._running):
            self._emit(served)
        for fid, session in list(self.receiver.sessions.items()):
            self._down(fid, None)
            if beat % 100 == 0:
                self._send(fid, EngineHeartbeat(session.sid, beat, bool(self._running)))

    def _take(self, ready: ReadyRequest) -> None:
        body = codec.decode_body(ready.body, len(ready.items))
        try:
            self.receiver.refusals.check(body.key, time.time())
        except RequestQuarantined as error:
            refusal = EngineOutput(ready.rid, finish="error", error=(error.code, error.message))
            self._outputs(ready.fid, refusal)
            self.receiver.finish(ready.fid, ready.rid)
            return
        served = Served(
            ready.rid,
            ready.fid,
            body,
            codec.unpack_tokens(body.token_ids, body.wide),
            len(codec.unpack_tokens(body.emitted, body.wide)),
            {key: len(value.data) for key, value in ready.items.items()},
            ready.num_hits,
        )
        self.served.append(served)
        self._running.append(served)

    def _emit(self, served: Served) -> None:
        """One token, or the error the script wants."""
        if self.finish_with is not None:
            self._finish(served, EngineOutput(served.rid, finish="error", error=self.finish_with))
            return
        if self.allowance is not None:
            if self.allowance <= 0:
                return
            self.allowance -= 1
        index = served.emitted + served.outputs
        first = None
        if served.outputs == 0:
            first = FirstOutput(
                len(served.prompt), 0, len(served.items), served.num_hits, 0, 0.0, 0.0
            )
        served.outputs += 1
        if served.body.sampling.pooling:
            values = array("f", [token_at(served.prompt, 0), 1.0]).tobytes()
            output = EngineOutput(served.rid, finish="stop", first=first, embedding=values)
            self._finish(served, output)
            return
        done = index + 1 >= served.body.sampling.max_tokens
        output = EngineOutput(
            served.rid, (token_at(served.prompt, index),), "length" if done else "", first=first
        )
        if done:
            self._finish(served, output)
        else:
            self._outputs(served.fid, output)

    def _finish(self, served: Served, output: EngineOutput) -> None:
        self._running.remove(served)
        self._outputs(served.fid, output)
        self.receiver.finish(served.fid, served.rid)

    def _outputs(self, fid: str, output: EngineOutput) -> None:
        self._down(fid, Outputs((output,), self.load))

    def _down(self, fid: str, outputs: Outputs | None) -> None:
        raw = None if outputs is None else codec.encode_outputs(outputs)
        down = self.receiver.down(fid, raw)
        if down is not None:
            self._send(fid, down)

    def _send(self, fid: str, message: DownMessage) -> None:
        with contextlib.suppress(LinkDown):
            self.transport.send(fid, codec.encode_down(message))
