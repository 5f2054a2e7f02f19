"""A process that asks servers for /livez without a pause; the longest waits, by phase.

    python -m tests.support.processes.livez_probe URL ...

Reads the name of each phase from standard input; at its end writes JSON: {"longest": {phase:
seconds}, "failures": [...]}. A process of its own, since a probe beside threads that attack would
measure how long those hold the interpreter. `Probe` starts it.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import Any
from urllib.parse import urlsplit

PAUSE_SECONDS = 0.002


class Probe:
    """The process; `phase` may be set at any time, the rest is known after the end."""

    def __init__(self, urls: list[str], *prefix: str) -> None:
        self.longest: Counter[str] = Counter()
        self.failures: list[str] = []
        command = [*prefix, sys.executable, "-m", "tests.support.processes.livez_probe", *urls]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._phase = "idle"

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *exc: object) -> None:
        written, _ = self._process.communicate(timeout=300)
        found: dict[str, Any] = json.loads(written)
        self.longest.update(found["longest"])
        self.failures += found["failures"]


class _Asker(threading.Thread):
    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.address = urlsplit(url).netloc
        self.phase, self.ends = "idle", False
        self.longest: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        server = http.client.HTTPConnection(self.address, timeout=120)
        while not self.ends:
            began, phase = time.monotonic(), self.phase
            try:
                server.request("GET", "/livez")
                answer = server.getresponse()
                answer.read()
                if answer.status != 200:
                    self.failures.append(f"{phase}: {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{phase}: {error!r}")
                server.close()
            self.longest[phase] = max(self.longest[phase], time.monotonic() - began)
            time.sleep(PAUSE_SECONDS)


def main() -> None:
    askers = [_Asker(url) for url in sys.argv[1:]]
    for asker in askers:
        asker.start()
    for line in sys.stdin:
        for asker in askers:
            asker.phase = line.strip()
    longest: Counter[str] = Counter()
    for asker in askers:
        asker.ends = True
        asker.join()
        longest |= asker.longest
    failures = [one for asker in askers for one in asker.failures]
    print(json.dumps({"longest": longest, "failures": failures}))


if __name__ == "__main__":
    main()
