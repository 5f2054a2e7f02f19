"""A frontend without HTTP: the other end of a session, for tests and simulation.

Speaks the real protocol through mirror.sender; keeps the values it may be asked for. Synchronous:
`take` is handed each message of the engine and returns what to send back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from foveal_runtime.engine.process.splice import splice
from foveal_runtime.engine.testing.fake_runner import reference_finish, reference_tokens
from foveal_runtime.engine.types.step import MMInput
from foveal_runtime.mirror.messages import Bye, DownMessage, RequestId
from foveal_runtime.mirror.sender import Sender, Sending, SendItem, SendValue
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item, read_header
from foveal_runtime.wire.messages import EngineLoad, EngineOutput, FirstOutput, RequestBody

PLACEHOLDER = 7


class FakeItem:
    """A media item of `num_tokens` prompt tokens, all of them embeddings, with `num_bytes` of
    pixels made from its name."""

    def __init__(self, name: str, num_tokens: int, num_bytes: int = 64) -> None:
        pixels = np.frombuffer(hashlib.shake_128(name.encode()).digest(num_bytes), dtype=np.uint8)
        runs = ((0, num_tokens),)
        replacement = (PLACEHOLDER,) * num_tokens
        self.value = pack_item(0, replacement, runs, {"pixels": ("uint8", pixels)})
        self.mm_hash = hashlib.sha256(name.encode()).digest()

    @property
    def send_item(self) -> SendItem:
        return SendItem(self.mm_hash, len(self.value))

    @property
    def send_value(self) -> SendValue:
        return SendValue(self.value, codec.digest(self.value))


class FakeFrontend:
    """One frontend's link to one engine.

    Attributes:
        tokens, finish, first, errors: by request id (name, attempt).
        lost: requests whose session ended before they did.
    """

    def __init__(self, frontend_id: str, *, boot: int = 1, namespace: bytes = b"") -> None:
        self.sender = Sender(frontend_id, frontend_boot=boot, namespace=namespace)
        self.items: dict[bytes, FakeItem] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.finish: dict[RequestId, str] = {}
        self.first: dict[RequestId, FirstOutput] = {}
        self.errors: dict[RequestId, tuple[str, str]] = {}
        self.lost: list[RequestId] = []
        self.load: EngineLoad | None = None
        self.over = ""
        self.num_needs = 0
        self.num_heartbeats = 0
        self.answers = True
        self.bodies: dict[RequestId, tuple[list[int], list[FakeItem], SamplingParams]] = {}

    def hello(self) -> Sending:
        self.over = ""
        return self.sender.hello()

    def request(
        self,
        rid: RequestId,
        prompt: Sequence[int | FakeItem],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int = 4,
        emitted: Sequence[int] = (),
        with_values: bool = True,
        body: RequestBody | None = None,
    ) -> Sending:
        """A prompt is token ids and items in order."""
        sampling = sampling or SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        distinct = list(dict.fromkeys(part for part in prompt if isinstance(part, FakeItem)))
        ids = [PLACEHOLDER if isinstance(part, FakeItem) else part for part in prompt]
        places = tuple(
            (index, distinct.index(part))
            for index, part in enumerate(prompt)
            if isinstance(part, FakeItem)
        )
        self.items.update({item.mm_hash: item for item in distinct})
        packed, wide = codec.pack_tokens([*ids, *emitted])
        body = body or RequestBody(
            token_ids=codec.pack_tokens(ids, wide=wide)[0],
            wide=wide,
            placements=places,
            sampling=sampling,
            emitted=codec.pack_tokens(emitted, wide=wide)[0],
        )
        assert len(packed) == len(body.token_ids) + len(body.emitted)
        self.tokens[rid] = list(emitted)
        self.bodies[rid] = (ids, [distinct[item] for _, item in places], sampling)
        values = {item.mm_hash: item.send_value for item in distinct} if with_values else {}
        return self.sender.request(
            rid, [item.send_item for item in distinct], codec.encode_body(body), values
        )

    def expanded(self, rid: RequestId) -> tuple[list[int], tuple[MMInput, ...], list[bytes]]:
        """What the engine must make of a request's prompt."""
        ids, items, _ = self.bodies[rid]
        at = [index for index, token in enumerate(ids) if token == PLACEHOLDER]
        pairs = [(item.mm_hash, read_header(item.value)) for item in items]
        places = list(zip(at, range(len(items)), strict=True))
        tokens, inputs = splice(ids, places, pairs, max_tokens=1 << 20)
        return tokens, inputs, [item.value for item in items]

    def expected(self, rid: RequestId, max_model_len: int) -> tuple[list[int], str]:
        """All tokens of a request without any cache, over all attempts, and how it ends."""
        tokens, inputs, values = self.expanded(rid)
        sampling = self.bodies[rid][2]
        most = min(sampling.max_tokens, max_model_len - len(tokens))
        return reference_finish(reference_tokens(tokens, inputs, values, sampling, most), sampling)

    def take(self, message: DownMessage) -> list[Sending]:
        """Takes in one message of the engine; returns answers to send in this order."""
        event = self.sender.on_down(message)
        if isinstance(message, Bye) and event.session_over:
            self.over = message.reason
        elif event.session_over:
            self.over = event.session_over
        self.lost.extend(event.lost)
        self.num_heartbeats += event.heartbeat is not None
        answers: list[Sending] = []
        for mm_hash in event.needs:
            self.num_needs += 1
            if not self.answers:
                continue
            item = self.items.get(mm_hash)
            sending = (
                self.sender.nofill(mm_hash)
                if item is None
                else self.sender.fill(mm_hash, item.send_value)
            )
            if sending is not None:
                answers.append(sending)
        for rid, code in event.rejected:
            self.finish[rid] = "rejected"
            self.errors[rid] = (code, "")
        if event.outputs is not None:
            outputs = codec.decode_outputs(event.outputs)
            self.load = outputs.load or self.load
            for output in outputs.outputs:
                self._on_output(output)
        return answers

    def _on_output(self, output: EngineOutput) -> None:
        rid = output.rid
        self.tokens[rid].extend(output.token_ids)
        if output.first is not None:
            self.first[rid] = output.first
        if output.error is not None:
            self.errors[rid] = output.error
        if output.finish:
            self.finish[rid] = output.finish
            self.sender.finished(rid)
