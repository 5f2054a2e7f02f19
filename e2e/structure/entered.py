"""Modules of ours that one streamed image request and one reconcile enter, by tracing real ones.

`python e2e/structure/entered.py` starts `foveal-runtime serve` on the bundled model with a profile
function in every thread of every process, sends one request to warm it, switches the tracing on for
a second one with another image, and counts the source files in which a function was called. The
reconcile is what follows on the profile and the first pods of examples/mmi-cpu-laptop.yaml.
Packages' __init__ files and test doubles do not count.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tiny-vlm"
SITE = """
import atexit, os, sys, threading, time
folder = os.environ["FOVEAL_TRACED"]
found, is_on = set(), [False]
def note(frame, event, argument):
    if is_on[0] and event == "call":
        found.add(frame.f_code.co_filename)
def watch():
    while True:
        on = os.path.exists(folder + "/on")
        if is_on[0] and not on:
            with open(f"{folder}/{os.getpid()}.txt", "w") as file:
                file.write("\\n".join(set(found)))
        is_on[0] = on
        time.sleep(0.02)
sys.setprofile(note); threading.setprofile(note)
threading.Thread(target=watch, daemon=True).start()
"""


def modules(paths: set[str]) -> set[str]:
    """Source files of ours among code objects' file names, without test doubles."""
    found = set()
    for text in paths:
        path = Path(text)
        parts = path.parts
        if "src" in parts and path.stem != "__init__" and "testing" not in parts:
            at = len(parts) - 1 - parts[::-1].index("src")
            if parts[at + 1] in ("foveal_operator", "foveal_runtime") and "fake" not in path.stem:
                found.add("/".join(parts[at + 1 :]))
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(port: int, image: Path) -> None:
    """One streamed chat completion about an image. Raises AssertionError."""
    data = base64.b64encode(image.read_bytes()).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    content = [url, {"type": "text", "text": "What is shown?"}]
    body = {"model": "traced", "messages": [{"role": "user", "content": content}],
            "stream": True, "max_tokens": 8}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", "/v1/chat/completions", json.dumps(body),
                       {"Content-Type": "application/json"})  # fmt: skip
    answer = connection.getresponse()
    text = answer.read()
    assert answer.status == 200, text
    assert b"[DONE]" in text


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def of_request(images: list[Path]) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(SITE)
        paths = [folder, str(ROOT / "runtime/src"), str(ROOT / "operator/src")]
        environment = {**os.environ, "FOVEAL_TRACED": folder, "PYTHONPATH": os.pathsep.join(paths)}
        port = free_port()
        server = subprocess.Popen(
            [sys.executable, "-c", "from foveal_runtime.main.cli import main; main()", "serve",
             str(EXAMPLE / "model"), "--name", "traced", "--port", str(port)],
            env=environment, stdout=sys.stderr,
        )  # fmt: skip
        try:
            until = time.monotonic() + 400
            while not is_ready(port):
                assert server.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server did not become ready"
                time.sleep(0.5)
            ask(port, images[0])
            on = Path(folder, "on")
            on.touch()
            time.sleep(0.2)
            ask(port, images[1])
            on.unlink()
            time.sleep(1.0)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
        return {
            line for file in Path(folder).glob("*.txt") for line in file.read_text().split("\n")
        }


async def of_reconcile() -> set[str]:
    sys.path[:0] = [str(ROOT), str(ROOT / "operator/src"), str(ROOT / "runtime/src")]
    from foveal_operator.kube.kinds import INFERENCE
    from tests.support.operator_rig import Kit, resource
    from tests.support.served_resource import add_pod, finish_profile

    kit = Kit()
    await kit.start()
    kit.cluster.add(resource())
    assert kit.cluster.body(INFERENCE.name, "tiny")
    await kit.settle()
    found: set[str] = set()
    sys.setprofile(lambda frame, event, _: found.add(frame.f_code.co_filename))
    finish_profile(kit.cluster)
    await kit.settle()
    add_pod(kit.cluster, "engine")
    add_pod(kit.cluster, "frontend")
    await kit.settle()
    sys.setprofile(None)
    return found


def main() -> None:
    images = sorted((EXAMPLE).rglob("*.png"))[:2]
    wanted = sys.argv[1:] or ["request", "reconcile"]
    for name in wanted:
        found = of_request(images) if name == "request" else asyncio.run(of_reconcile())
        names = modules(found)
        print(f"| modules that one {name} enters | {len(names)} |")
        for one in sorted(names):
            print(f"    {one}", file=sys.stderr)


if __name__ == "__main__":
    main()
