"""Does a server that works for an hour grow? What each process holds, and the slope of it.

    python -m e2e.soak.leak --minutes 60 --rate 4

One frontend and one engine with the bundled model and small caches, so that all of them are full
after minutes and evict for the rest of the time. The load is mixed: two requests of three show a
new picture, others a known one or none; some ask for scores or several choices, every tenth leaves
after its first token, every twentieth is refused. As a Prometheus would, it scrapes every process
every 10 seconds, and reads what each holds: anonymous memory, PSS, descriptors, sockets, threads,
files in shared memory. Ends by itself; exit code 1 when the memory of a process grows by more than
--limit MiB an hour or anything else by more than 4 in the second half, or a request failed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import psutil
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


def picture(rng: random.Random) -> dict[str, object]:
    image = Image.frombytes("RGB", (48, 48), rng.randbytes(48 * 48 * 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": data}}


def ask(url: str, number: int) -> None:
    """One streamed question about picture `number`; what else it is follows from the number."""
    rng = random.Random(number)
    media = [picture(rng)] if number % 7 else []
    text = f"what colour is the circle? {'please ' * rng.randrange(40)}"
    body = {
        "model": "m", "stream": True, "max_tokens": 16, "ignore_eos": True, "temperature": 0,
        "messages": [{"role": "user", "content": [*media, {"type": "text", "text": text}]}],
    }  # fmt: skip
    if number % 5 == 0:
        body |= {"logprobs": True, "top_logprobs": 5, "n": 2}
    if number % 20 == 3:
        body["temperature"] = -1
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(),
        {"content-type": "application/json"},
    )  # fmt: skip
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if number % 10 == 0 and line.startswith(b"data:"):
                    return
    except urllib.error.HTTPError as error:
        if error.code != 400 or number % 20 != 3:
            raise


def scrape(server: Server) -> int:
    """Reads /metrics of frontend and engine, as a Prometheus does; bytes of both."""
    urls = [server.spec.target.urls[0]]
    for process in tree(server.pid):
        try:
            command = process.cmdline()
        except psutil.Error:  # it has just ended
            continue
        if role_of(command) == "engine":
            config = json.loads(Path(command[command.index("--config") + 1]).read_text())
            urls.append(f"http://{config['http_host']}:{config['http_port']}")
    assert len(urls) == 2, "one frontend and one engine are scraped"
    total = 0
    for url in urls:
        with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
            total += len(answer.read())
    return total


def holdings(pid: int) -> dict[tuple[str, str], float]:
    """What the processes hold by (role, kind), equal roles added up; memory in MiB."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for process in tree(pid):
        with contextlib.suppress(OSError, psutil.Error):
            role, folder = role_of(process.cmdline()), Path(f"/proc/{process.pid}")
            for line in (folder / "smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Anonymous", "Pss", "Rss"):
                    found[role, f"{name} MiB"] += int(rest.split()[0]) / 1024
            targets = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
            found[role, "descriptors"] += len(targets)
            found[role, "sockets"] += sum(target.startswith("socket:") for target in targets)
            found[role, "threads"] += process.num_threads()
    found["machine", "files in /dev/shm"] = len(list(Path("/dev/shm").iterdir()))
    return dict(found)


def slope(samples: list[tuple[float, float]]) -> float:
    """Units an hour of the second half, by Theil and Sen: steps and outliers do not bend it."""
    half = samples[len(samples) // 2 :]
    pairs = [
        (b[1] - a[1]) / (b[0] - a[0])
        for i, a in enumerate(half)
        for b in half[i + max(1, len(half) // 4) :]
    ]
    return statistics.median(pairs) * 3600 if pairs else 0.0


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
    series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with Server(spec._replace(command=command), options.out) as server:
        load = Load(server.spec.target.urls[0], options.rate)
        load.start()
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < options.minutes * 60:
            scrape(server)
            for key, held in holdings(server.pid).items():
                series[key].append((now, held))
            time.sleep(SAMPLE_SECONDS)
        load.stopped.set()
        load.join(timeout=130)
    rows = {" ".join(key): samples for key, samples in series.items()}
    (options.out / "leak.json").write_text(
        json.dumps({"requests": load.num, "errors": load.errors, "series": rows}, indent=1)
    )
    print(f"{load.num} requests in {options.minutes:g} minutes, {len(load.errors)} failed")
    grown = []
    for (role, kind), samples in sorted(series.items()):
        values = [value for _, value in samples]
        hourly = slope(samples)
        print(
            f"| {role} | {kind} | {values[0]:.0f} | {values[len(values) // 2]:.1f} | "
            f"{max(values):.1f} | {values[-1]:.1f} | {hourly:+.2f} |"
        )
        later = values[-1] - values[len(values) // 2]
        is_memory = kind == "Anonymous MiB"
        if hourly > options.limit if is_memory else "MiB" not in kind and later > 4:
            grown.append(f"{role}: {kind}")
    print(*(f"grows: {what}" for what in grown), sep="\n")
    return 1 if load.errors or grown else 0


if __name__ == "__main__":
    sys.exit(main())
