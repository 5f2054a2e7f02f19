"""`foveal-runtime serve oci://…` of the bundled model, from the registry that nodes of e2e use."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from foveal_runtime.plan.local import free_port
from tests.support.registry import Registry, layer, write_layout

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "examples/tiny-vlm/images/digit-7.png"
REFERENCE = "foveal/tiny-vlm"

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]


def is_listening(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def test_an_image_of_a_registry_answers_right(model_folder: Path, tmp_path: Path) -> None:
    files = [(one.name, one.read_bytes()) for one in sorted(model_folder.iterdir())]
    weights = [one for one in files if one[0].endswith(".safetensors")]
    image = Registry()
    image.server_close()  # another one serves it
    digest = image.push([layer(*[one for one in files if one not in weights]), layer(*weights)])
    write_layout(image, tmp_path / "layouts/tiny", f"localhost/{REFERENCE}")
    port = free_port()
    registry = subprocess.Popen(
        [sys.executable, ROOT / "e2e/cluster/registry.py", tmp_path / "layouts", "127.0.0.1",
         str(port)], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not is_listening(port):
        assert registry.poll() is None
        time.sleep(0.05)
    command = [sys.executable, "-m", "foveal_runtime.main.cli", "serve",
               f"oci://127.0.0.1:{port}/{REFERENCE}:1", "--port", "0", "--threads", "1",
               "--media-workers", "1", "--device", "cpu", "--kv-cache", "32Mi"]  # fmt: skip
    serve = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    watchdog = threading.Timer(360, serve.kill)
    watchdog.start()
    text = ""
    try:
        assert serve.stdout is not None
        while not (found := re.search(r"serving tiny-vlm on (\S+)/v1", text)):
            line = serve.stdout.readline()
            assert line, text
            text += line
        picture = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
        content = [{"type": "image_url", "image_url": {"url": picture}},
                   {"type": "text", "text": "What digit is this?"}]  # fmt: skip
        body = {"model": "tiny-vlm", "messages": [{"role": "user", "content": content}],
                "temperature": 0, "max_tokens": 16}  # fmt: skip
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=200)
        assert answer.json()["choices"][0]["message"]["content"] == "7"
        folders = list((tmp_path / ".cache/foveal/models").glob("*/"))
        assert [one.name.endswith(digest.replace(":", "--")) for one in folders] == [True]
        serve.send_signal(signal.SIGINT)
        text += serve.stdout.read()
        assert serve.wait(60) == 0, text
    finally:
        watchdog.cancel()
        for process in (serve, registry):
            process.kill()
            process.wait()
        if serve.stdout is not None:
            serve.stdout.close()
