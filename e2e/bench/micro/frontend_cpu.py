"""Frontend CPU per image: whole requests with caches off and on, then stage by stage.

The real HTTP app (called as ASGI, so without a socket to the client), input processor, media worker
processes, engine client and ZMQ link of one frontend process, against an engine without a model in
a process of its own (`testing.fake_engine`), with the event loop, the allocator's settings and the
frozen heap that `main.frontend` gives such a process. The model is a LLaVA: CLIP at 336 pixels, a
byte tokenizer. *off*: processor cache, value cache and the map of data-URL texts have no room,
which is a frontend without Foveal's caches; *on*: as configured by default.

    PYTHONPATH=runtime/src OMP_NUM_THREADS=1 python e2e/bench/micro/frontend_cpu.py [--rounds 20]

CPU seconds, not wall time: a busy machine changes caches and clock, not who pays. A stage's limit
is the least that its input costs on this machine: copying it, hashing it, decoding it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import io
import json
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import uvloop
from blake3 import blake3
from PIL import Image

from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.http.app import HttpApp, build_app
from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.processors import ItemProcessor
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.frontend.testing.fake_engine import ScriptedEngine
from foveal_runtime.frontend.testing.fake_tokenizer import byte_tokenizer
from foveal_runtime.mirror.messages import Req
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModalitiesConfig, ModelConfig
from foveal_runtime.telemetry.memory import give_back_large_blocks, keep_collections_short
from foveal_runtime.wire import codec
from foveal_runtime.wire.namespace import model_namespace
from foveal_runtime.wire.transport import ZmqRouter

SIDE = 1024


class Picture(NamedTuple):
    """`make(index)`: an encoded file like the others, with other content."""

    name: str
    kind: str
    make: Callable[[int], bytes]


def noisy(index: int, side: int, cell: int) -> Image.Image:
    """Smooth noise: compresses like a photograph."""
    coarse = np.random.default_rng(index).integers(0, 256, (side // cell,) * 2 + (3,), np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


PICTURES = (
    Picture("JPEG, 1 megapixel", "jpeg", lambda i: encoded(noisy(i, SIDE, 4), "JPEG", quality=88)),
    Picture("PNG, about 300 kB", "png", lambda i: encoded(noisy(i, 360, 2), "PNG")),
)


def save_model(folder: str) -> None:
    import transformers as hf

    clip = hf.CLIPImageProcessor(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    processor = hf.LlavaProcessor(
        clip, byte_tokenizer(), patch_size=14, vision_feature_select_strategy="full"
    )
    processor.save_pretrained(folder)
    (Path(folder) / "config.json").write_text(json.dumps({"model_type": "llava"}))


# ---- the engine's process -----------------------------------------------------------------------
def run_engine(pipe: Connection, namespace: bytes, capacity_bytes: int) -> None:
    async def serve() -> None:
        router = ZmqRouter("tcp://127.0.0.1:0")
        limits = ReceiverLimits(capacity_bytes=capacity_bytes)
        engine = ScriptedEngine(router, namespace=namespace, limits=limits)
        engine.start()
        pipe.send(router.endpoint)
        while not pipe.poll():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await engine.stop()

    asyncio.run(serve())


@contextmanager
def engine_process(namespace: bytes, capacity_bytes: int) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=run_engine, args=(theirs, namespace, capacity_bytes)
    )
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join(10)
        process.kill()


# ---- whole requests -----------------------------------------------------------------------------
def worker_seconds(pids: list[int]) -> float:
    files = [file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def body_of(data: bytes | None, kind: str) -> bytes:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is in this picture? " * 4}]
    if data is not None:
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return msgspec.json.encode(
        {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}
    )


async def post(app: HttpApp, body: bytes) -> None:
    """One chat request through the app, its body in pieces as a server hands them over."""
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    status = 0

    async def receive() -> dict[str, Any]:
        if not pieces:
            await asyncio.sleep(60)  # the client stays
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)

    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
    ]  # fmt: skip
    scope = {
        "type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers,
        "raw_path": b"/v1/chat/completions", "query_string": b"", "http_version": "1.1",
        "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    await app.asgi(scope, receive, send)  # type: ignore[arg-type]
    assert status == 200, status


@asynccontextmanager
async def frontend(folder: str, *, caches: bool) -> AsyncIterator[tuple[HttpApp, MediaWorkers]]:
    """App and media worker, once the engine without a model is ready."""
    namespace = model_namespace(folder, "")
    with engine_process(namespace, 1 << 30 if caches else 0) as endpoint:
        config = FrontendConfig(
            model=ModelConfig(path=folder, name="tiny"),
            engines=(EngineAddress(endpoint=endpoint),),
            processor_bytes=1 << 30 if caches else 0,
            max_bindings=65536 if caches else 0,
        )
        workers = MediaWorkers(
            WorkerSettings(
                model_path=folder, namespace=namespace, limits=config.modalities, num_workers=1
            )
        )
        info = await workers.start()
        client = EngineClient(config, namespace)
        processor = MediaInput(config, workers, info, knowledge=client)
        app = build_app(config, processor=processor, info=info, generator=client)
        await client.start()
        keep_collections_short()
        while not client.num_ready_engines():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        yield app, workers
        await client.close()
        await processor.close()


async def whole_requests(
    folder: str, *, caches: bool, rounds: int
) -> list[tuple[str, float, float]]:
    """(what, CPU ms of the HTTP process, of the media worker) per request."""
    rows = []
    async with frontend(folder, caches=caches) as (app, workers):

        async def measure(what: str, bodies: list[bytes]) -> None:
            pids = workers.pids()
            worked, began = worker_seconds(pids), time.process_time()
            for body in bodies:
                await post(app, body)
            took = time.process_time() - began
            rows.append((
                what, took / len(bodies) * 1e3,
                (worker_seconds(pids) - worked) / len(bodies) * 1e3,
            ))  # fmt: skip

        text = [body_of(None, "")] * rounds
        await measure("", text)
        await measure("text only", text)
        for picture in PICTURES:
            new = [body_of(picture.make(i), picture.kind) for i in range(rounds + 1)]
            await post(app, new.pop())
            await measure(f"{picture.name}, new", new)
            await measure(f"{picture.name}, repeated", [new[0]] * rounds)
    return rows[1:]


# ---- stages -------------------------------------------------------------------------------------
def cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Median CPU milliseconds of one call, all threads."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append((time.process_time() - began) * 1e3)
    return statistics.median(times)


class Stage(NamedTuple):
    name: str
    when: str
    work: Callable[[], object]
    limit: str
    least: Callable[[], object] | None


def stages(processor: ItemProcessor, picture: Picture) -> list[Stage]:
    data = picture.make(0)
    body = body_of(data, picture.kind)
    parsed = msgspec.json.decode(body)
    url = parsed["messages"][0]["content"][0]["image_url"]["url"]
    payload = url.partition(",")[2]
    text = url.encode()
    decoded = processor.decode(0, data, {})
    value = processor.process(0, decoded, {})
    token = processor.placeholders[0].token
    digest = hashing.content_digest(data)
    pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
    call = processor._call  # what the library alone costs

    def load() -> None:
        with Image.open(io.BytesIO(data)) as image:
            image.load()

    def identify() -> bytes:
        return hashing.mm_hash(digest, modality=0, identity=b"i" * 16, options={})

    key = identify()
    return [
        Stage("join the body", "always", lambda: b"".join(pieces), "copy", lambda: bytearray(body)),
        Stage("parse JSON", "always", lambda: msgspec.json.decode(body), "copy",
              lambda: bytearray(body)),
        Stage("check the request", "always",
              lambda: ChatCompletionRequest.model_validate(parsed), "", None),
        Stage("hash the URL's text", "always", lambda: hashing.UrlTextMap.key(url), "BLAKE3",
              lambda: blake3(text).digest()),
        Stage("decode base64", "new",
              lambda: hashing.decode_data_url(url, max_bytes=1 << 30), "binascii",
              lambda: binascii.a2b_base64(payload)),
        Stage("hash the file", "new", lambda: hashing.content_digest(data), "BLAKE3",
              lambda: blake3(data).digest()),
        Stage("key of the item", "always", identify, "", None),
        Stage("decode the picture", "new", lambda: processor.decode(0, data, {}), "codec alone",
              load),
        Stage("process, splice, pack", "new", lambda: processor.process(0, decoded, {}),
              "library alone", lambda: call(0, [decoded], token, {})),
        Stage("digest of the value", "new", lambda: codec.digest(value), "BLAKE3",
              lambda: blake3(value).digest()),
        Stage("mirror and encode, hash only", "repeated", mirror_round(key, value, known=True), "",
              None),
        Stage("mirror and encode, with value", "new", mirror_round(key, value, known=False), "",
              None),
    ]  # fmt: skip


def mirror_round(key: bytes, value: bytes, *, known: bool) -> Callable[[], object]:
    """What the sender and the wire's encoding cost for one request."""
    sender = Sender("f", frontend_boot=1)
    receiver = Receiver(ReceiverLimits(capacity_bytes=1 << 30))
    for answer in receiver.on_message("f", sender.hello().message, {}):
        sender.on_down(answer)
    items, values = [SendItem(key, len(value))], {key: SendValue(value, codec.digest(value))}
    sender.confirmed.update({key: (len(value), None)} if known else {})
    numbers = iter(range(10**9))

    def work() -> object:
        if not known:
            sender.reset()
            sender.inflight_bytes = 0
        rid = (f"r{next(numbers)}", 0)
        sending = sender.request(rid, items, msgspec.Raw(b"\xc0"), values)
        frames = codec.encode_up(sending)
        assert isinstance(sending.message, Req)
        assert (len(frames) > 1) != known
        sender.finished(rid)
        return frames

    return work


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    give_back_large_blocks()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        print("| request | caches | HTTP process, CPU ms | media worker, CPU ms |")
        print("|---|---|---:|---:|")
        for caches in (False, True):
            for what, http, worker in uvloop.run(
                whole_requests(folder, caches=caches, rounds=rounds)
            ):
                print(f"| {what} | {'on' if caches else 'off'} | {http:.2f} | {worker:.1f} |")
        processor = ItemProcessor(folder, ModalitiesConfig())
        processor.examine(b"n" * 16)
        for picture in PICTURES:
            print(f"\n{picture.name} ({len(picture.make(0)):,} bytes):\n")
            print("| stage | when | CPU ms | limit | CPU ms of the limit |")
            print("|---|---|---:|---|---:|")
            for stage in stages(processor, picture):
                least = "" if stage.least is None else f"{cpu_ms(stage.least, rounds):.3f}"
                print(f"| {stage.name} | {stage.when} | {cpu_ms(stage.work, rounds):.3f} | "
                      f"{stage.limit} | {least} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
