"""What the planner says a frontend and an engine take, beside what they do, without a cluster.

The planner's own figures become the documents, the profile's bases are measured here, and new
images fill every cache. The same on a node, with limits: tests/cluster/test_budgets.py.
"""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.budget.types import BudgetInputs, EngineInputs, FrontendInputs
from foveal_runtime.plan.config import MIB, Admission, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.profile import decode
from foveal_runtime.telemetry.memory import taken_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIDE, NUM_CLIENTS, NUM_REQUESTS = 1024, 8, 800
INPUTS = BudgetInputs(
    frontend=FrontendInputs(
        media_workers=1, processor_bytes=16 * MIB, max_media_bytes=36 * MIB, max_body_bytes=5 * MIB
    ),
    engine=EngineInputs(
        device="cpu", max_num_batched_tokens=512, ipc_bytes=16 * MIB, encoder_host_bytes=16 * MIB,
        kv_bytes=96 * MIB,
    ),
    modalities=ModalitiesConfig(
        image=ModalityLimits(max_per_prompt=4, max_pixels=SIDE * SIDE),
        video=ModalityLimits(max_per_prompt=0),
        audio=ModalityLimits(max_per_prompt=0),
    ),
)  # fmt: skip


class Watch(threading.Thread):
    """The most that groups of processes took at a time."""

    def __init__(self, roots: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.roots, self.peaks, self.over = roots, dict.fromkeys(roots, 0), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for name, pid in self.roots.items():
                taken = sum(taken_bytes(one) for one in (pid, *children(pid)))
                self.peaks[name] = max(self.peaks[name], taken)


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def question(random_: random.Random, side: int) -> bytes:
    file = io.BytesIO()
    image = Image.frombytes("RGB", (side, side), random_.randbytes(3 * side * side))
    image.save(file, "PNG", compress_level=0)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}},
             {"type": "text", "text": "what is in the picture?"}]  # fmt: skip
    message = {"role": "user", "content": parts}
    return json.dumps({"model": "tiny-vlm", "messages": [message], "max_tokens": 24}).encode()


def test_the_plan_is_no_less_than_the_peak_and_at_most_a_tenth_more(
    deploy: Any, model_folder: Path, tmp_path: Path, start_seconds: float
) -> None:
    note = tmp_path / "profile.json"
    options = ["--max-pixels", str(SIDE * SIDE), "--max-num-batched-tokens", "512"]
    command = [sys.executable, "-m", "foveal_runtime.main.cli", "profile", str(model_folder)]
    subprocess.run(
        [*command, *options, "--dtype", "float32", "--output", str(note)], check=True, timeout=300
    )
    profile = decode(note.read_bytes())
    print(profile.processes)
    result = plan(INPUTS, profile)
    assert result.fits, result.problems
    deployment = deploy(
        change=lambda engines, frontends: (
            [with_figures(engines[0], result)],
            [
                msgspec.structs.replace(
                    frontends[0],
                    processor_bytes=result.processor_bytes,
                    modalities=INPUTS.modalities,
                    admission=Admission(max_media_bytes=36 * MIB, max_body_bytes=5 * MIB),
                )
            ],
        )
    )
    with deployment:
        deployment.wait_ready(start_seconds)
        watch = Watch(
            {"frontend": deployment.frontends[0].pid, "engine": deployment.engines[0].pid}
        )
        watch.start()
        with httpx.Client(base_url=deployment.frontends[0].url, timeout=300) as http:

            def client(number: int) -> None:
                random_ = random.Random(number)
                for turn in range(NUM_REQUESTS // NUM_CLIENTS):
                    side = SIDE if turn < 8 else random_.choice((SIDE // 4, SIDE // 2))
                    http.post(
                        "/v1/chat/completions",
                        content=question(random_, side),
                        headers={"content-type": "application/json"},
                    ).raise_for_status()

            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                list(pool.map(client, range(NUM_CLIENTS)))
        watch.over.set()
        watch.join()
    for name, place in (("frontend", result.frontend), ("engine", result.engine)):
        terms = {line.name: round(line.bytes / MIB, 1) for line in place.lines}
        print(f"{name}: planned {place.used_bytes / MIB:.0f} MiB, peak "
              f"{watch.peaks[name] / MIB:.0f} MiB, {terms}")  # fmt: skip
    for name, place in (("frontend", result.frontend), ("engine", result.engine)):
        assert watch.peaks[name] <= place.used_bytes <= watch.peaks[name] * 1.1, name


def with_figures(engine: Any, result: Any) -> Any:
    """The engine's document with what was planned, as the operator writes it."""
    caches = msgspec.structs.replace(
        engine.caches,
        ipc_bytes=result.ipc_bytes,
        ipc_staging_bytes=result.ipc_staging_bytes,
        encoder_embeds=result.encoder_embeds,
        encoder_host_bytes=result.encoder_host_bytes,
        kv_bytes=result.kv_bytes,
    )
    scheduler = msgspec.structs.replace(engine.scheduler, max_num_batched_tokens=512)
    return msgspec.structs.replace(
        engine,
        caches=caches,
        scheduler=scheduler,
        modalities=INPUTS.modalities,
        idle_check_seconds=0.0,
    )
