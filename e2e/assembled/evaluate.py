"""Held-out accuracy of the assembled model, through a running OpenAI-compatible API.

    python -m e2e.assembled.evaluate http://127.0.0.1:8000

Prints a table and nothing but what was found: no share must be reached.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from e2e.assembled import speech, wordings
from e2e.assembled.speech import Clip


def ask(http: httpx.Client, model: str, clip: Clip, wording: tuple[str, bool]) -> str:
    """The reply's text."""
    body = {
        "model": model, "messages": wordings.messages(wording, clip.part()), "temperature": 0,
        "max_tokens": 16,
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body).raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def clips(each: int) -> dict[str, list[tuple[Clip, tuple[str, bool]]]]:
    """What is asked, by the line of the table: voices and wordings, trained on or not."""
    seed, first, unseen = "evaluate", wordings.TRAINED[0], wordings.HELD_OUT[0]
    kinds = {
        "held-out voices": (speech.HELD_OUT, first),
        "held-out voices and words": (speech.HELD_OUT, unseen),
        "trained voices, new clips": (speech.TRAINED, first),
    }
    found = {}
    for name, (voices, wording) in kinds.items():
        rng = random.Random(f"{seed}/{name}")
        found[name] = [(speech.draw(rng, voices), wording) for _ in range(each)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--model", default="", help="default: the first one the server lists")
    parser.add_argument("--each", type=int, default=300, help="clips of each line")
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    http = httpx.Client(base_url=options.url, timeout=600)
    model = options.model or http.get("/v1/models").json()["data"][0]["id"]
    begin = time.monotonic()
    print("| what | right | asked | share |\n|---|---|---|---|")
    for name, asked in clips(options.each).items():
        with ThreadPoolExecutor(options.concurrency) as pool:
            replies = list(pool.map(lambda pair: ask(http, model, *pair), asked))
        right = sum(r.strip() == clip.digits for r, (clip, _) in zip(replies, asked, strict=True))
        print(f"| {name} | {right} | {len(asked)} | {right / len(asked):.1%} |", flush=True)
    print(f"{time.monotonic() - begin:.0f} s, model {model}")


if __name__ == "__main__":
    main()
