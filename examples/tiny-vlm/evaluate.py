"""Measures held-out accuracy through a running OpenAI-compatible API, and nothing else.

    python evaluate.py http://127.0.0.1:8000 --model tiny-vlm

Prints accuracy by question family and exits with 1 if a family is below 95 %. Knows neither torch
nor transformers: what it measures is the served model, images and all, as a client sees it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from questions import Sample, is_right
from scenes import to_data_url
from structured import ALL_FAMILIES, StructuredAsker, written

REQUIRED = 0.95
LONGEST_REPLY = 160


def to_request(sample: Sample, model: str) -> dict[str, Any]:
    """The chat request that asks the sample's last question, images as PNG `data:` URLs."""
    urls = iter([to_data_url(picture.image) for picture in sample.pictures])
    messages = []
    for message in sample.messages:
        content = message["content"]
        if not isinstance(content, str):
            content = [
                {"type": "image_url", "image_url": {"url": next(urls)}}
                if part["type"] == "image"
                else part
                for part in content
            ]
        messages.append({**message, "content": content})
    asked = {"model": model, "messages": messages, "temperature": 0, "max_tokens": LONGEST_REPLY}
    return asked | sample.options


def reply_of(message: dict[str, Any]) -> str:
    """What an assistant's message says, calls as the model writes them."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [written(call["name"], json.loads(call["arguments"])) for call in calls]
    return "\n".join([message["content"]] * bool(message["content"]) + texts)


class Client:
    """Asks one question per call; safe to call from many threads."""

    def __init__(self, base_url: str, model: str | None, key: str | None, timeout: float):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.base = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self.http = httpx.Client(headers=headers, timeout=timeout)
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        answer = self.http.get(f"{self.base}/models").raise_for_status()
        return str(answer.json()["data"][0]["id"])

    def ask(self, sample: Sample) -> str:
        """The reply's text; an error becomes a reply that is never right."""
        try:
            answer = self.http.post(
                f"{self.base}/chat/completions", json=to_request(sample, self.model)
            ).raise_for_status()
            return reply_of(answer.json()["choices"][0]["message"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            return f"<{type(error).__name__}: {error}>"


def draw_samples(families: list[str], each: int, seed: str, unseen: bool) -> list[Sample]:
    """The same questions for the same seed, shuffled so that families mix as in real traffic."""
    samples = []
    for family in families:
        asker = StructuredAsker(
            random.Random(f"held out/{seed}/{family}"), held_out=True, unseen=unseen
        )
        samples += [asker.sample(family) for _ in range(each)]
    random.Random(seed).shuffle(samples)
    return samples


def print_table(families: list[str], samples: list[Sample], rights: list[bool]) -> bool:
    """One line per family; True when every family reaches the required share."""
    print(f"| {'family':<12} | right | asked | accuracy |\n|{'-' * 14}|------:|------:|---------:|")
    good = True
    for family in families:
        marks = [
            right for sample, right in zip(samples, rights, strict=True) if sample.family == family
        ]
        share = sum(marks) / max(1, len(marks))
        good = good and share >= REQUIRED
        print(f"| {family:<12} | {sum(marks):5} | {len(marks):5} | {share:7.1%}  |")
    return good


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url", help="the server, with or without /v1")
    parser.add_argument("--model", help="default: the first one the server lists")
    parser.add_argument("--key", help="bearer token, if the server wants one")
    parser.add_argument("--each", type=int, default=600, help="questions per family")
    parser.add_argument("--seed", default="api")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--families", nargs="*", default=list(ALL_FAMILIES), choices=ALL_FAMILIES)
    parser.add_argument("--unseen", action="store_true", help="wordings never trained on")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print")
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    client = Client(options.base_url, options.model, options.key, options.timeout)
    samples = draw_samples(options.families, options.each, options.seed, options.unseen)
    start = time.monotonic()
    with ThreadPoolExecutor(options.concurrency) as pool:
        replies = list(pool.map(client.ask, samples))
    spent = time.monotonic() - start
    rights = [
        is_right(reply, sample.verdict) for reply, sample in zip(replies, samples, strict=True)
    ]
    wrong = [
        pair
        for pair, right in zip(zip(samples, replies, strict=True), rights, strict=True)
        if not right
    ]
    for sample, reply in wrong[: options.show]:
        print(
            f"{sample.family}: {sample.messages[-1]['content']!r}\n"
            f"  said {reply!r}, right is {sample.answer!r}"
        )
    good = print_table(options.families, samples, rights)
    print(f"{len(samples)} questions in {spent:.1f} s through {client.base}, model {client.model}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
