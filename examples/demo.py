"""`make demo`: one frontend and one engine on the bundled model, asked about images, twice.

Starts the same processes that pods run, asks over the OpenAI API about image files that the model
never saw in training, prints question, image, answer, time to first token and what each cache
saved, and stops. The small model itself errs now and then, and the demo says so; exit code 1 means
that a second answer differed from the first, which no cache may ever cause.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import time
import urllib.request
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from foveal_runtime.main.launcher import LocalDeployment
from foveal_runtime.main.local.serve import local_documents
from foveal_runtime.plan.local import free_port

HERE = Path(__file__).resolve().parent / "tiny-vlm"
MIB = 1024**2
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def drawn(path: Path, columns: int = 26) -> list[str]:
    """A small rendering in half blocks, two pixels a character, for terminals with colours."""
    image = Image.open(path).convert("RGB")
    rows = max(2, round(columns * image.height / image.width)) // 2 * 2
    image = image.resize((columns, rows))
    lines = []
    for y in range(0, rows, 2):
        cells = []
        for x in range(columns):
            top, low = image.getpixel((x, y)), image.getpixel((x, y + 1))
            cells.append(f"\x1b[38;2;{top[0]};{top[1]};{top[2]};48;2;{low[0]};{low[1]};{low[2]}m▀")
        lines.append("".join(cells) + "\x1b[0m")
    return lines


def ask(url: str, model: str, images: list[Path], question: str) -> tuple[str, float]:
    """Streams one chat completion. Returns the answer and the seconds to its first token."""
    content: list[dict[str, object]] = []
    for path in images:
        data = base64.b64encode(path.read_bytes()).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}})
    content.append({"type": "text", "text": question})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    started, first, text = time.perf_counter(), 0.0, []
    with _opener.open(request, timeout=120) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            for choice in json.loads(line[6:])["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.perf_counter() - started
                    text.append(piece)
    return "".join(text).strip(), first


def metrics(url: str) -> dict[str, float]:
    """Sums of every series by family and cache label, from the frontend's /metrics."""
    totals: dict[str, float] = defaultdict(float)
    with _opener.open(url + "/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            match = re.match(r"([\w:]+)(\{.*\})? (\S+)$", line)
            if match:
                cache = re.search(r'cache="(\w+)"', match.group(2) or "")
                key = match.group(1) + (f"[{cache.group(1)}]" if cache else "")
                totals[key] += float(match.group(3))
    return totals


def saved(before: dict[str, float], after: dict[str, float]) -> str:
    """What the caches did between two readings of /metrics, in one line."""

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    return (
        f"processor cache {grown('foveal_cache_hits_total[processor]'):.0f} of "
        f"{grown('foveal_cache_queries_total[processor]'):.0f} items · "
        f"IPC {grown('foveal_mirror_value_bytes_avoided_total') / 1024:.0f} KiB not sent, "
        f"{grown('foveal_mirror_value_bytes_sent_total') / 1024:.0f} KiB sent · "
        f"encoder {grown('foveal_cache_hits_total[encoder]'):.0f} of "
        f"{grown('foveal_cache_queries_total[encoder]'):.0f} · "
        f"prefix {grown('vllm:prefix_cache_hits_total'):.0f} of "
        f"{grown('vllm:prefix_cache_queries_total'):.0f} tokens"
    )


def is_right(answer: str, verdict: str) -> bool:
    """Whether the answer ends in the verdict, whatever its case and punctuation."""
    got, want = (re.sub(r"[^a-z0-9]+", " ", text.lower()).strip() for text in (answer, verdict))
    return got == want or got.endswith(" " + want)


class Asked(NamedTuple):
    answer: str
    right: bool
    seconds: float


def ask_one(url: str, entry: dict[str, Any], *, draw: bool) -> Asked:
    """Asks, prints question, image, answer and savings."""
    paths = [HERE / "images" / name for name in entry["images"]]
    before = metrics(url)
    answer, first = ask(url, "tiny-vlm", paths, entry["question"])
    right = is_right(answer, entry["verdict"])
    if draw:
        rows = zip_longest(*(drawn(path) for path in paths), fillvalue="")
        print("\n".join("  " + "  ".join(row) for row in rows))
    print("  " + ", ".join(str(path.relative_to(HERE.parents[1])) for path in paths))
    print(f"  Q {entry['question']}")
    print(f"  A {answer}   " + ("✓" if right else f"✗ right is: {entry['answer']}"))
    print(f"    first token after {first * 1000:.0f} ms · {saved(before, metrics(url))}\n")
    return Asked(answer, right, first)


def main() -> int:
    questions = json.loads((HERE / "images" / "questions.json").read_text())
    engines, frontends = local_documents(
        free_port, model=str(HERE / "model"), name="tiny-vlm", port=free_port(), kv_bytes=64 * MIB,
        ipc_bytes=64 * MIB, processor_bytes=64 * MIB, media_workers=1,
    )  # fmt: skip
    print("starting one engine and one frontend on the bundled model ...", flush=True)
    started = time.perf_counter()
    with LocalDeployment(engines, frontends, say=print) as deployment:
        deployment.wait_ready(180.0)
        url = deployment.frontends[0].url
        print(f"ready after {time.perf_counter() - started:.1f} s\n")
        rounds: list[list[Asked]] = []
        for title in ("First round: new images", "Second round: the same again"):
            print(f"{title}\n" + "─" * len(title))
            draw = sys.stdout.isatty() and not rounds
            rounds.append([ask_one(url, entry, draw=draw) for entry in questions])
    num_right = sum(asked.right for asked in rounds[0])
    means = [sum(asked.seconds for asked in one) / len(one) * 1000 for one in rounds]
    print(
        f"{num_right} of {len(questions)} answers right; first token after {means[0]:.0f} ms the "
        f"first time, {means[1]:.0f} ms the second"
    )
    same = [one.answer for one in rounds[0]] == [one.answer for one in rounds[1]]
    print("both rounds gave the same answers" if same else "THE ROUNDS DIFFER: a cache is wrong")
    print("stopped. `make serve` keeps it running; `make test` runs the tests.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
