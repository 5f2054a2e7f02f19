"""Does a server that works for hours grow? What each process holds, and what its books explain.

    python -m e2e.soak.leak --minutes 120 --rate 4

One frontend and one engine with the bundled model and small caches. A warm-up shows new pictures
as fast as they are answered until every book that such clients fill (`foveal_book_entries`; their
bounds are the plan's) is full or grows no more; caches of a few MiB are full long before. Then the
load is mixed, at --rate: two requests of three show a new picture, others a known one or none; some
ask for scores or several choices, every tenth leaves after its first token, every twentieth is
refused. As a Prometheus would, it scrapes every process every 10 seconds, and reads what each
holds: anonymous memory, PSS, descriptors, sockets, threads, files in shared memory, and the entries
of each book. Ends by itself; exit code 1 when, in the second half after the warm-up, the memory of
a process grew by more than --limit MiB an hour beyond what the books took in, when anything else
grew by more than 4, when a book exceeded its bound, when a request failed, or when there were less
than half of the requests.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import random
import re
import signal
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
from e2e.soak import growth
from foveal_runtime.plan.budget.types import ENGINE_BOOKS, FRONTEND_BOOKS, MIRROR_UUIDS_BYTES

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny-vlm" / "model"
CACHES = (
    "--kv-cache", "17Mi", "--ipc-cache", "4Mi", "--processor-cache", "4Mi",
    "--encoder-host-tier", "8Mi",
)  # fmt: skip
SAMPLE_SECONDS = 10.0
WARM_IMAGES = 8
WARM_THREADS = 3
UUIDS = 16_384
BOOKS: dict[str, growth.Books] = {
    "frontend": FRONTEND_BOOKS | {"engine_uuids": (UUIDS, MIRROR_UUIDS_BYTES // UUIDS)},
    "engine": ENGINE_BOOKS,
}
_BOOK = re.compile(r"^foveal_book_entries\{(.*)\} (\S+)$", re.MULTILINE)


def picture(number: int) -> dict[str, object]:
    """The same number, the same picture; three of four have a uuid."""
    rng = random.Random(number)
    image = Image.frombytes("RGB", (48, 48), rng.randbytes(48 * 48 * 3))
    file = io.BytesIO()
    image.save(file, "PNG")
    data = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": data}}
    return part | ({"uuid": f"picture {number}"} if number % 4 else {})


def ask(url: str, number: int, num_images: int = 1) -> None:
    """One streamed question about picture `number`, or about as many from there on as none of the
    others shows; what else it is follows from the number."""
    rng = random.Random(number)
    media = [picture(number * num_images + i) for i in range(num_images)] if number % 7 else []
    text = f"what colour is the circle? {'please ' * rng.randrange(40)}"
    body = {
        "model": "m", "stream": True, "max_tokens": 16, "ignore_eos": True, "temperature": 0,
        "messages": [{"role": "user", "content": [*media, {"type": "text", "text": text}]}],
    }  # fmt: skip
    if num_images > 1:
        body["max_tokens"] = 4
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
            if number % 20 == 3:
                raise ConnectionError("temperature -1 was not refused")
            for line in answer:
                if line.startswith(b'data: {"error"'):
                    raise ConnectionError(line.decode(errors="replace"))
                if line.startswith(b"data:" if number % 10 == 0 else b"data: [DONE]"):
                    return
        raise ConnectionError("the answer ended before [DONE]")
    except urllib.error.HTTPError as error:
        if error.code != 400 or number % 20 != 3:
            raise


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """Reads /metrics of frontend and engine, as a Prometheus does; entries by (role, book)."""
    urls = {"frontend": server.spec.target.urls[0]}
    for process in tree(server.pid):
        try:
            command = process.cmdline()
        except psutil.Error:  # it has just ended
            continue
        if role_of(command) == "engine":
            config = json.loads(Path(command[command.index("--config") + 1]).read_text())
            urls["engine"] = f"http://{config['http_host']}:{config['http_port']}"
    found = {}
    for role, url in urls.items():
        with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
            page = answer.read().decode()
        for labels, value in _BOOK.findall(page):
            if f'process="{role}-0"' in labels:
                found[role, labels.split('book="')[1].split('"')[0]] = float(value)
    assert found.keys() == {(role, book) for role, books in BOOKS.items() for book in books}
    return found


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


class Load(threading.Thread):
    """Requests at a fixed rate until told to stop; a third shows a picture of the last minute.
    `first` is the number before the first request's."""

    def __init__(self, url: str, rate: float, *, first: int = 0, num_images: int = 1) -> None:
        super().__init__(daemon=True)
        self.url, self.rate = url, rate
        self.num_images = num_images
        self.num, self.first, self.errors = first, first, list[str]()
        self.stopped, self.is_done = threading.Event(), False

    def run(self) -> None:
        rng, due = random.Random(1), time.monotonic()
        while not self.stopped.wait(max(0.0, due - time.monotonic())):
            due = max(due + 1 / self.rate, time.monotonic() - 5)
            self.num += 1
            number = (
                self.num
                if rng.random() < 2 / 3
                else max(self.first + 1, self.num - rng.randrange(200))
            )
            try:
                ask(self.url, number, self.num_images)
            except (OSError, http.client.HTTPException) as error:
                self.errors.append(str(error) or repr(error))
        self.is_done = True

    def end(self, least: int = 1) -> None:
        """Fewer requests than `least`, and a client that died or hangs, are errors, too."""
        self.stopped.set()
        self.join(timeout=130)
        num = self.num - self.first
        if not self.is_done:
            self.errors.append(
                f"the client {'hangs' if self.is_alive() else 'died'}: request {num}"
            )
        if num < least:
            self.errors.append(f"{num} requests, less than {least}")


class Watch:
    """Samples of a server. `series`: by (role, kind); `entries`: by role and book."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.begin = time.monotonic()
        self.series: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self.entries: dict[str, dict[str, list[tuple[float, float]]]] = {
            role: {book: [] for book in books} for role, books in BOOKS.items()
        }

    def sample(self) -> float:
        """Takes one and waits until the next is due; seconds since the begin."""
        now = time.monotonic() - self.begin
        for (role, book), entries in scrape(self.server).items():
            self.entries[role][book].append((now, entries))
        for key, held in holdings(self.server.pid).items():
            self.series[key].append((now, held))
        time.sleep(max(0.0, self.begin + now + SAMPLE_SECONDS - time.monotonic()))
        return now

    def filling(self) -> list[str]:
        return [
            f"{role}: {book}"
            for role, books in BOOKS.items()
            for book in growth.still_filling(self.entries[role], books, 60.0)
        ]

    def report(self, steady: float, limit: float) -> list[str]:
        """Prints what each process held; what grew in the second half after `steady`."""
        grown = []
        end = max(samples[-1][0] for samples in self.series.values())
        half = (steady + end) / 2
        print(
            "kind | at first | warm | most after | at last | an hour, after warm-up | second half"
        )
        for (role, kind), samples in sorted(self.series.items()):
            after = growth.since(samples, steady)
            later = growth.since(samples, half)
            if not after or not later:
                continue  # a process that has ended
            print(
                f"| {role} | {kind} | {samples[0][1]:.0f} | {after[0][1]:.1f} | "
                f"{max(value for _, value in after):.1f} | {samples[-1][1]:.1f} | "
                f"{growth.slope(after):+.2f} | {growth.slope(later):+.2f} |"
            )
            if kind == "Anonymous MiB":
                books, entries = BOOKS.get(role, {}), self.entries.get(role, {})
                found = growth.growth(samples, entries, books, half)
                print(f"  of that books {found.books:+.2f}, unexplained {found.unexplained:+.2f}")
                if found.unexplained > limit:
                    grown.append(f"{role}: {kind}, {found.unexplained:+.2f} an hour unexplained")
            elif "MiB" not in kind and later[-1][1] - later[0][1] > 4:
                grown.append(f"{role}: {kind}")
        for role, books in BOOKS.items():
            for book, samples in self.entries[role].items():
                warm = growth.since(samples, steady)[0][1]
                most, each = books[book]
                print(
                    f"  {role}: {book}: {warm:.0f} when warm, {samples[-1][1]:.0f} at last, of "
                    f"{most}, {most * each / growth.MIB:.1f} MiB at most"
                )
            over = growth.over_bound(self.entries[role], books)
            grown += [f"{role}: {book}, more entries than the plan has" for book in over]
        return grown


def warm_up(watch: Watch, url: str, minutes: float) -> tuple[float, list[str]]:
    """New pictures as fast as they are answered until no book fills any more, or for `minutes`.
    Seconds it took and what failed."""
    loads = [
        Load(url, 1000.0, first=(n + 1) * 10**7, num_images=WARM_IMAGES)
        for n in range(WARM_THREADS)
    ]  # fmt: skip
    for load in loads:
        load.start()
    while watch.sample() < minutes * 60 and watch.filling():
        pass
    for load in loads:
        load.end()
    took = time.monotonic() - watch.begin
    num = sum(load.num - load.first for load in loads)
    print(f"warm after {took / 60:.1f} minutes and {num} requests", flush=True)
    print(*(f"still fills: {book}" for book in watch.filling()), sep="\n", flush=True)
    return took, [error for load in loads for error in load.errors]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="after the warm-up")
    parser.add_argument("--warm-minutes", type=float, default=20.0, help="at most; 0 = none")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--limit", type=float, default=1.0, help="MiB an hour of a process")
    parser.add_argument("--out", type=Path, default=Path("out/leak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server is ended all the same
    spec: Spec = MAKERS["foveal"]("leak", Options(MODEL))
    command = [*spec.command, *CACHES]
    with Server(spec._replace(command=command), options.out) as server:
        watch = Watch(server)
        url = server.spec.target.urls[0]
        steady, errors = warm_up(watch, url, options.warm_minutes)
        load = Load(url, options.rate)
        load.start()
        while watch.sample() < steady + options.minutes * 60:
            pass
        load.end(int(options.rate * options.minutes * 60 / 2))
    errors += load.errors
    found = {
        "requests": load.num,
        "errors": errors,
        "warm_seconds": steady,
        "series": {" ".join(key): samples for key, samples in watch.series.items()},
        "books": watch.entries,
    }
    (options.out / "leak.json").write_text(json.dumps(found, indent=1))
    print(f"{load.num} requests in {options.minutes:g} minutes, {len(errors)} failed")
    grown = watch.report(steady, options.limit)
    print(*(f"grows: {what}" for what in grown), sep="\n")
    return 1 if errors or grown else 0


if __name__ == "__main__":
    sys.exit(main())
