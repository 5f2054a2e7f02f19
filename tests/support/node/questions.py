"""Questions about the examples' pictures, asked once or all the time, and whether answers stay."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.node import commands

QUESTIONS = [
    (item["question"], tuple(item["images"]), item["answer"])
    for item in json.loads((commands.PICTURES / "questions.json").read_text(encoding="utf-8"))
]
PAUSE_SECONDS = 0.1
"""Between two questions of one client: without it two cores do nothing else but answer, and what a
test waits for (a process that starts) takes twice as long."""
ANSWERS: dict[str, str] = {}
"""What the model said first, when nothing was cached. The small model errs now and then; a second
answer that differs from the first is ours."""


def wrong_answers(url: str) -> list[str]:
    """Asks every question of the examples."""
    wrong = []
    for question, images, _ in QUESTIONS:
        found = commands.ask(url, question, *images)
        if found != ANSWERS.setdefault(question, found):
            wrong.append(f"{question} {images}: {found!r}, not {ANSWERS[question]!r}")
    return wrong


class Asker(threading.Thread):
    """Asks all the time through the Service; a lost connection counts as a failure."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.answered, self.failures = url, 0, list[str]()
        self.stopping = threading.Event()

    def run(self) -> None:
        while not self.stopping.wait(PAUSE_SECONDS):
            question, images, _ = QUESTIONS[self.answered % len(QUESTIONS)]
            try:
                found = commands.ask(self.url, question, *images)
            except OSError as error:
                self.failures.append(f"{type(error).__name__}: {error}")
                continue
            self.answered += 1
            if found != ANSWERS.setdefault(question, found):
                self.failures.append(f"{question}: {found!r}, not {ANSWERS[question]!r}")


@contextmanager
def asking(url: str) -> Iterator[Asker]:
    asker = Asker(url)
    asker.start()
    try:
        yield asker
    finally:
        asker.stopping.set()
        asker.join(120)
