"""A media worker without a model: real decoding and limits, a trivial processor, faults on request.

For tests of what stands on media workers: `WorkerSettings(module=...fake_worker)`. Starts in a
fraction of a second because it loads neither torch nor transformers. Media that begin with `!` are
commands: `!kill` (dies), `!kill-once:PATH` (dies unless PATH exists, and makes it), `!hang`,
`!bug` (an unexpected exception), `!refuse:FIELD`, `!slow:PATH` (waits until PATH exists).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from foveal_runtime.frontend.media import protocol, worker_main
from foveal_runtime.frontend.media.decode import decode_image, decode_page, page_digests
from foveal_runtime.frontend.media.hashing import short_digest
from foveal_runtime.frontend.media.workers import Processed
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import InvalidRequest, StartupError
from foveal_runtime.wire.item import pack_item

IMAGE_TOKEN = 4
NUM_TOKENS = 6
EMBED_WIDTH = 8
_PIXELS = 16


class FakeProcessor:
    """An image becomes 16x16 RGB and stands for six tokens, the middle four of them embeddings.
    Sound and video are decoded, and become a black image."""

    def __init__(self, load: protocol.Load) -> None:
        if load.model_path.endswith("/broken"):
            raise StartupError(f"cannot load the processor of {load.model_path}")
        self._limits = load.limits

    def examine(self, namespace: bytes) -> protocol.ProcessorInfo:
        placeholder = protocol.PlaceholderInfo(
            0, "<image>", IMAGE_TOKEN, IMAGE_TOKEN, "<image>", "rule"
        )
        return protocol.ProcessorInfo(
            short_digest(namespace, b"fake"), (placeholder,),
            embeds=protocol.EmbedsLayout(width=EMBED_WIDTH, head=(5,), tail=(6,)),
        )  # fmt: skip

    def page_digests(self, data: memoryview) -> list[bytes]:
        if bytes(data[:1]) == b"!":
            _obey(bytes(data[1:]).decode())
        return page_digests(data, self._limits.image)

    def decode(
        self, modality: int, data: memoryview, options: Mapping[str, Any], page: int = -1
    ) -> Any:
        if page >= 0:
            image = decode_page(data, page, self._limits.image)
            return np.asarray(image.resize((_PIXELS, _PIXELS)))
        if bytes(data[:1]) == b"!":
            _obey(bytes(data[1:]).decode())
            return np.zeros((_PIXELS, _PIXELS, 3), np.uint8)
        if modality:
            from foveal_runtime.frontend.media import timed

            if modality == 2:
                timed.decode_audio(data, self._limits.audio, 16_000)
            else:
                limits = self._limits.video
                timed.decode_video(data, limits, lambda total, *_: list(range(min(total, 8))))
            return np.zeros((_PIXELS, _PIXELS, 3), np.uint8)
        image = decode_image(data, self._limits.image)
        return np.asarray(image.resize((_PIXELS, _PIXELS)))

    def process(self, modality: int, media: Any, options: Mapping[str, Any]) -> bytes:
        scale = float(options.get("scale", 1.0))
        pixels = (media.astype(np.float32) * scale).transpose(2, 0, 1)[None]
        ids = (5, *([IMAGE_TOKEN] * (NUM_TOKENS - 2)), 6)
        return pack_item(0, ids, ((1, NUM_TOKENS - 2),), {"pixel_values": ("float32", pixels)})


class InlineWorkers:
    """The same processor in threads of this process: for tests that need no processes."""

    def __init__(self, limits: ModalitiesConfig) -> None:
        load = protocol.Load("/tiny", b"n" * 16, limits)
        self.num_ready = 1
        self.num_busy = self.queue_length = 0
        self.restarts = 0
        self._processor = FakeProcessor(load)
        self.info = self._processor.examine(load.namespace)

    async def page_digests(self, data: bytes | memoryview, client: str = "") -> Processed:
        digests = await asyncio.to_thread(self._processor.page_digests, memoryview(data))
        return Processed(b"".join(digests), 0.0, 0.0)

    async def process(
        self,
        modality: int,
        options: bytes,
        data: bytes | memoryview,
        client: str = "",
        page: int = -1,
    ) -> Processed:
        def work() -> bytes:
            chosen = json.loads(options)
            media = self._processor.decode(modality, memoryview(data), chosen, page)
            return self._processor.process(modality, media, chosen)

        return Processed(await asyncio.to_thread(work), 0.0, 0.0)

    async def close(self) -> None:
        self.num_ready = 0


def _obey(command: str) -> None:
    name, _, path = command.partition(":")
    if name == "kill" or (name == "kill-once" and not Path(path).exists()):
        if path:
            Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hang":
        time.sleep(3600)
    if name == "refuse":
        raise InvalidRequest(f"{path} is refused", param=path)
    if name == "bug":
        raise LookupError("a bug")
    while name == "slow" and not Path(path).exists():
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(worker_main.main(sys.argv[1:], FakeProcessor))
