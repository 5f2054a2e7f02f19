"""A cluster as the command line reads it, from answers that a test gives."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping

from foveal_operator.kube.types import Obj


class FakeReader:
    """Answers by path; an exception as answer is raised. Keeps every call."""

    def __init__(self, answers: Mapping[str, Obj | Exception], namespace: str = "default") -> None:
        self.answers = dict(answers)
        self.namespace = namespace
        self.server = "https://fake"
        self.calls: list[str] = []
        self.denied: set[tuple[str, str]] = set()
        """(verb, resource) that reviews deny."""
        self.skew: float | None = 0.0

    def get(self, path: str, **query: str) -> Obj | None:
        self.calls.append(f"GET {path}" + (f"?{urllib.parse.urlencode(query)}" if query else ""))
        answer = self.answers.get(path)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def review(self, path: str, body: Obj) -> Obj:
        self.calls.append(f"POST {path}")
        asked = body["spec"]["resourceAttributes"]
        allowed = (asked["verb"], asked["resource"]) not in self.denied
        return {**body, "status": {"allowed": allowed}}

    def skew_seconds(self) -> float | None:
        return self.skew
