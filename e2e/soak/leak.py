"""Does a server that works for an hour grow? Memory by process, and the slope of its second half.

    python -m e2e.soak.leak --minutes 60 --rate 4

One frontend and one engine with the bundled model and small caches, so that all of them are full
after minutes and evict for the rest of the time; two requests of three show a new picture, every
tenth is aborted after its first token. Every 10 seconds the anonymous memory of each process is
read. Ends by itself; exit code 1 when a process grows by more than --limit MiB an hour, or a
request failed.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import signal
import statistics
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

from PIL import Image

from e2e.bench.processes import role_of, tree
from e2e.bench.servers import MAKERS, Options, Server, Spec

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-vlm" / "model"
CACHES = (
    "--kv-cache", "16Mi", "--ipc-cache", "4Mi", "--processor-cache", "4Mi",
    "--encoder-host-tier", "8Mi",
)  # fmt: skip
SAMPLE_SECONDS = 10.0


def ask(url: str, number: int) -> None:
    """One streamed question about picture `number`; every tenth leaves after the first piece."""
    rng = random.Random(number)
    image = Image.frombytes("RGB", (48, 48), rng.randbytes(48 * 48 * 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "text", "text": f"what colour is the circle? {'please ' * rng.randrange(40)}"},
    ]
    body = {
        "model": "m", "messages": [{"role": "user", "content": content}], "stream": True,
        "max_tokens": 16, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=120) as answer:
        for line in answer:
            if number % 10 == 0 and line.startswith(b"data:"):
                return


def anonymous_bytes(pid: int) -> dict[str, int]:
    """Anonymous memory by role; a role's processes added up."""
    found: dict[str, int] = defaultdict(int)
    for process in tree(pid):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            role = role_of(process.cmdline())
        except (OSError, ProcessLookupError):
            continue
        line = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
        found[role] += int(line.split()[1]) * 1024
    return dict(found)


def slope(samples: list[tuple[float, int]]) -> float:
    """MiB an hour of the second half, by Theil and Sen: steps and outliers do not bend it."""
    half = samples[len(samples) // 2 :]
    pairs = [
        (b[1] - a[1]) / (b[0] - a[0])
        for i, a in enumerate(half)
        for b in half[i + max(1, len(half) // 4) :]
    ]
    return statistics.median(pairs) * 3600 / (1 << 20)


class Load(threading.Thread):
    """Requests at a fixed rate until told to stop; a third shows a picture of the last minute."""

    def __init__(self, url: str, rate: float) -> None:
        super().__init__(daemon=True)
        self.url, self.rate = url, rate
        self.num, self.errors = 0, list[str]()
        self.stopped = threading.Event()

    def run(self) -> None:
        rng, due = random.Random(1), time.monotonic()
        while not self.stopped.wait(max(0.0, due - time.monotonic())):
            due = max(due + 1 / self.rate, time.monotonic() - 5)
            self.num += 1
            number = self.num if rng.random() < 2 / 3 else max(1, self.num - rng.randrange(200))
            try:
                ask(self.url, number)
            except OSError as error:
                self.errors.append(str(error))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--limit", type=float, default=8.0, help="MiB an hour of a process")
    parser.add_argument("--out", type=Path, default=Path("out/leak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended all the same
    spec: Spec = MAKERS["foveal"]("leak", Options(MODEL))
    command = [*spec.command, *CACHES]
    series: dict[str, list[tuple[float, int]]] = defaultdict(list)
    with Server(spec._replace(command=command), options.out) as server:
        load = Load(server.spec.target.urls[0], options.rate)
        load.start()
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < options.minutes * 60:
            for role, size in anonymous_bytes(server.pid).items():
                series[role].append((now, size))
            time.sleep(SAMPLE_SECONDS)
        load.stopped.set()
        load.join(timeout=130)
    slopes = {role: slope(samples) for role, samples in series.items()}
    (options.out / "leak.json").write_text(
        json.dumps({"requests": load.num, "errors": load.errors, "series": series}, indent=1)
    )
    print(f"{load.num} requests in {options.minutes:g} minutes, {len(load.errors)} failed")
    for role, samples in series.items():
        sizes = [size / (1 << 20) for _, size in samples]
        print(
            f"{role:13} {sizes[0]:7.1f} MiB at first, {max(sizes):7.1f} at most, "
            f"{sizes[-1]:7.1f} at last; second half {slopes[role]:+.2f} MiB an hour"
        )
    return 1 if load.errors or max(slopes.values()) > options.limit else 0


if __name__ == "__main__":
    sys.exit(main())
