"""`foveal up` on the bundled model: serves, answers, drains a stream on Ctrl-C."""

from __future__ import annotations

import base64
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

ROOT = Path(__file__).resolve().parents[2]
PICTURE = sorted((ROOT / "examples/tiny-vlm/images").glob("*.png"))[0]

pytestmark = pytest.mark.timeout(900)


def request(**more):
    image = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "How many shapes are there?"},
    ]
    message = {"role": "user", "content": content}
    return {"model": "tiny", "messages": [message], "temperature": 0, **more}


def test_up_answers_and_ctrl_c_lets_a_stream_finish(model_folder, tmp_path):
    command = [sys.executable, "-m", "foveal_operator.cli.main", "up",
               "-f", str(ROOT / "examples/mmi-cpu-laptop.yaml"), "--model", str(model_folder),
               "--profile", str(ROOT / "examples/profiles/tiny-vlm.json"), "--port", "0",
               "--folder", str(tmp_path)]  # fmt: skip
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    watchdog = threading.Timer(200, up.kill)
    watchdog.start()
    try:
        text = ""
        while not (found := re.search(r"serving tiny on (\S+)", text)):
            line = up.stdout.readline()
            assert line, text
            text += line
        with httpx.Client(base_url=found[1], timeout=100) as client:
            answers = [
                client.post("chat/completions", json=request(max_tokens=8)).raise_for_status()
                for _ in range(2)
            ]
            said = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
            assert said[0]
            assert said[0] == said[1]
            assert answers[1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            long = request(max_tokens=48, min_tokens=48, stream=True)
            num_tokens, done = 0, False
            with client.stream("POST", "chat/completions", json=long) as stream:
                assert stream.status_code == 200
                for line in stream.iter_lines():
                    done = done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        num_tokens += bool(json.loads(line[6:])["choices"])
                        if num_tokens == 3:
                            up.send_signal(signal.SIGINT)
            assert done, "the stream was cut off"
            assert num_tokens > 3
        rest = up.stdout.read()
        assert up.wait(60) == 0, text + rest
        assert "tiny-frontend-0 is draining" in rest
        assert rest.endswith("drained and ended\n")
        assert "Traceback" not in (tmp_path / "tiny-engine-0.log").read_text()
    finally:
        watchdog.cancel()
        up.kill()
        up.wait()
        up.stdout.close()
