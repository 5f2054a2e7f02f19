"""Time to the first token of a repeated picture against text of the same length, through HTTP.

    python -m e2e.bench.gpu.ttft [--model llava-small] [--out FILE.json]

A picture's prompt and a text's prompt with exactly as many tokens, each asked again and again in
turns by one client: both find all but the last block in the prefix cache, so that what is left is
what a repeated picture costs beyond its tokens.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import statistics
import tempfile
import time
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from e2e.bench.checkpoints import checkpoint
from e2e.bench.gpu.common import Results, parser
from e2e.bench.servers import MAKERS, Options, Server

QUESTION = "What is this ?"


def ask(server: Server, content: Any) -> tuple[float, int]:
    """Seconds until the first streamed token, and the prompt's tokens."""
    address = urllib.parse.urlsplit(server.spec.target.urls[0])
    link = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 2,
            "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    data = json.dumps(body)
    begin = time.perf_counter()
    link.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
    answer = link.getresponse()
    assert answer.status == 200, answer.read()[:500]
    first, num_tokens = 0.0, 0
    for raw in answer:
        line = raw.decode().strip()
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        choices = event.get("choices") or []
        if choices and choices[0]["delta"].get("content") and not first:
            first = time.perf_counter() - begin
        if event.get("usage"):
            num_tokens = int(event["usage"]["prompt_tokens"])
    link.close()
    return first, num_tokens


def picture() -> dict[str, Any]:
    noise = np.random.default_rng(1).integers(0, 255, (336, 336, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text_of(server: Server, num_tokens: int) -> str:
    """A question that makes a prompt of exactly so many tokens."""
    low, high = 1, num_tokens
    while low < high:
        middle = (low + high) // 2
        if ask(server, " a" * middle)[1] < num_tokens:
            low = middle + 1
        else:
            high = middle
    for words in range(low, low - 4, -1):  # a word may be two tokens: an ending fills up
        for ending in ("", ".", "?", "..", " .", " ?", "?!", " of", " of?", " of it?"):
            if ask(server, " a" * words + ending)[1] == num_tokens:
                return " a" * words + ending
    raise SystemExit(f"no text of exactly {num_tokens} tokens was found")


def measure(options: argparse.Namespace) -> None:
    results = Results(options)
    model = "llava-tiny" if options.tiny else options.model
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    started = Options(checkpoint(model), dtype, options.device)
    with (
        tempfile.TemporaryDirectory() as folder,
        Server(MAKERS["foveal"]("foveal", started), Path(folder)) as server,
    ):
        results.row(case="start", seconds=server.start_seconds)
        shown = [picture(), {"type": "text", "text": QUESTION}]
        new, num_tokens = ask(server, shown)
        said = text_of(server, num_tokens)
        times: dict[str, list[float]] = {"picture": [], "text": []}
        for _ in range(5 if options.tiny else 60):
            times["picture"].append(ask(server, shown)[0])
            times["text"].append(ask(server, said)[0])
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    results.row(case="first token", prompt_tokens=num_tokens, new_picture_ms=new * 1e3,
                repeated_picture_ms=medians["picture"], text_ms=medians["text"],
                difference_ms=medians["picture"] - medians["text"])  # fmt: skip


if __name__ == "__main__":
    made = parser(__doc__ or "")
    made.add_argument("--model", default="llava-small")
    measure(made.parse_args())
