"""`foveal-runtime serve` of two engines: a request outlives its engine, which comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


def pid_of(name: str, launcher: int) -> int:
    """The launcher's child that runs the document of this name."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = [
        int(child)
        for child in children
        if f"/{name}.json" in Path(f"/proc/{child}/cmdline").read_text(errors="replace")
    ]
    assert len(found) == 1, (name, children)
    return found[0]


def engine_of(metrics: str) -> str:
    """The engine that runs a request now."""
    running = re.findall(
        r'vllm:num_requests_running\{[^}]*engine="([^"]+)"[^}]*\} ([0-9.]+)', metrics
    )
    (found,) = [name for name, count in running if float(count)]
    return found


def test_a_stream_outlives_its_engine_and_the_engine_comes_back(model_folder, tmp_path):
    """Local serving used to end every process when one of two engines died."""
    command = [sys.executable, "-m", "foveal_runtime.main.cli", "serve", str(model_folder),
               "--name", "tiny", "--port", "0", "--engines", "2", "--threads", "1",
               "--media-workers", "1", "--device", "cpu", "--kv-cache", "32Mi",
               "--ipc-cache", "32Mi", "--processor-cache", "32Mi"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    serve = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             env=environment)  # fmt: skip
    watchdog = threading.Timer(360, serve.kill)
    watchdog.start()
    text = ""

    def read_until(pattern: str) -> re.Match[str]:
        nonlocal text
        while not (found := re.search(pattern, text)):
            line = serve.stdout.readline()
            assert line, text
            text += line
        return found

    try:
        url = read_until(r"serving tiny on (\S+)/v1")[1]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "How many shapes?"}],
                "temperature": 0, "max_tokens": 3000, "min_tokens": 3000,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        num_events, done, victim, said, event = 0, False, "", "", {}
        with (
            httpx.Client(base_url=url, timeout=200) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as stream,
        ):
            assert stream.status_code == 200
            for line in stream.iter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                num_events += bool(event["choices"])
                said += "".join(c["delta"].get("content") or "" for c in event["choices"])
                if num_events >= 3 and not victim:
                    victim = engine_of(httpx.get(f"{url}/metrics", timeout=100).text)
                    os.kill(pid_of(victim, serve.pid), signal.SIGKILL)
        assert done, "the stream was cut off"
        assert event["usage"]["completion_tokens"] == 3000
        read_until(rf"{victim} was ended by SIGKILL.*it is started again in 0.5 s")
        text = text[text.index("it is started again") :]
        read_until(r"serving tiny on ")
        body |= {"stream": False, "stream_options": None}
        again = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=200).json()
        assert said == again["choices"][0]["message"]["content"], "undisturbed, it says another"
        serve.send_signal(signal.SIGINT)
        text += serve.stdout.read()
        assert serve.wait(60) == 0, text
        assert not list(tmp_path.glob("foveal-*")), "a good end leaves nothing behind"
    finally:
        watchdog.cancel()
        serve.kill()
        serve.wait()
        serve.stdout.close()
