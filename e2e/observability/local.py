"""The check without a cluster: real processes, a real operator and a real Prometheus on loopback.

    python -m e2e.observability.local [--seconds 90] [--keep]

Two frontends and two engines of the bundled model, with caches so small that they evict, under a
mixed load; etcd, an API server and an operator with one resource; a Prometheus that scrapes them
all. Labels that a PodMonitor adds from pods are given by hand here. Queries that only a cluster can
answer are in local-allow.txt, each with its reason. Takes two to four minutes.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from e2e.bench.pictures import PictureKind, draw
from tests.control_plane.api_server.api import Api
from tests.control_plane.api_server.foreign import FOREIGN, definition
from tests.control_plane.api_server.operator_process import OperatorProcess
from tests.control_plane.api_server.programs import missing_programs, running_cluster
from tests.control_plane.api_server.world import claim_in, profile_of
from tests.control_plane.regenerate import CRD_FILE
from tests.control_plane.samples import LEGAL, put

from foveal_runtime.main.documents import LocalOptions, local_documents
from foveal_runtime.main.launcher import LocalDeployment, free_port

ROOT = Path(__file__).resolve().parents[2]
ALLOW = Path(__file__).with_name("local-allow.txt")
NAMESPACE, RESOURCE = "models", "qwen"
MIB = 1 << 20
_RANDOM = 20261121


def find_prometheus() -> str | None:
    """The one that e2e/tools/build.sh made, or one on PATH."""
    tools = os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")
    return shutil.which("prometheus", path=tools) or shutil.which("prometheus")


def options() -> LocalOptions:
    """Caches that a minute's load fills."""
    return LocalOptions(
        model=os.environ.get("FOVEAL_TEST_MODEL", str(ROOT / "examples/tiny-vlm/model")),
        name="tiny-vlm", num_frontends=2, num_engines=2, num_threads=1, media_workers=1,
        kv_bytes=4 * MIB, ipc_bytes=1 * MIB, ipc_type="shm", processor_bytes=MIB // 2,
        encoder_embeds=256, encoder_host_bytes=MIB // 4, max_num_seqs=8,
    )  # fmt: skip


class Load:
    """Threads that ask until told to stop: text, pictures seen before, new ones, and a bad one."""

    def __init__(self, urls: list[str], num_threads: int = 3) -> None:
        self.num_answers = self.num_refusals = 0
        self._urls, self._stop = urls, threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(num_threads)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        rng = random.Random(_RANDOM + number)
        for turn in itertools.count():
            if self._stop.is_set():
                return
            with contextlib.suppress(OSError, urllib.error.URLError):
                self._ask(self._urls[(turn + number) % len(self._urls)], rng, turn)

    def _ask(self, url: str, rng: random.Random, turn: int) -> None:
        content: list[dict[str, Any]] = [{"type": "text", "text": "What is in the picture? " * 8}]
        if turn % 7:
            # Every third picture is one of four, the others are new.
            which = rng.randrange(4) if rng.random() < 0.4 else 10 + rng.randrange(1 << 20)
            data = base64.b64encode(draw(which, PictureKind(64, 64))).decode()
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            content.insert(0, image)
        if turn % 29 == 11:
            content[0] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {
            "model": "tiny-vlm",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 8,
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read()
                self.num_answers += 1
        except urllib.error.HTTPError:
            self.num_refusals += 1


def scrape_config(deployment: LocalDeployment, operator_url: str) -> dict[str, Any]:
    """Static targets with the labels that the PodMonitors' relabelings would give."""

    def target(url: str, **labels: str) -> dict[str, Any]:
        return {"targets": [url.removeprefix("http://")], "labels": labels}

    about = {"namespace": NAMESPACE, "resource": RESOURCE, "revision": "5d9f"}
    pods = [
        target(child.url, **about, role=role, pod=f"{RESOURCE}-{role}-{number}")
        for role, children in (
            ("frontend", deployment.frontends),
            ("engine", deployment.engines),
        )
        for number, child in enumerate(children)
    ]
    operator = target(operator_url, namespace="foveal-system", pod="foveal-operator-0")
    return {
        "global": {"scrape_interval": "2s", "evaluation_interval": "5s"},
        "scrape_configs": [
            {"job_name": "resource", "static_configs": pods},
            {"job_name": "operator", "honor_labels": True, "static_configs": [operator]},
        ],
    }


@contextlib.contextmanager
def prometheus(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """A running Prometheus's address."""
    program = find_prometheus()
    assert program is not None
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{url}/-/ready", timeout=2):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((folder / "prometheus.log").read_text()[-2000:]) from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def operator(folder: Path) -> Iterator[str]:
    """The address of an operator that has a resource to work on."""
    with running_cluster(folder) as cluster, Api(cluster) as api:
        api.install(yaml.safe_load(CRD_FILE.read_text(encoding="utf-8")))
        for kind in FOREIGN:
            api.install(definition(kind))
        api.namespace(NAMESPACE)
        stored = api.create(put(LEGAL["cpu"], "metadata.namespace", NAMESPACE)).must()
        for body in (claim_in(NAMESPACE), profile_of(stored)):
            api.create(body).must()
        process = OperatorProcess("a", cluster.kubeconfig("operator"), NAMESPACE)
        process.start()
        try:
            process.wait_ready(300.0)
            yield process.url
        finally:
            process.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="e2e.observability.local", description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="of load before the check")
    args = parser.parse_args()
    missing = missing_programs("etcd", "kube-apiserver")
    if missing or find_prometheus() is None:
        print(f"not built: {', '.join([*missing, 'prometheus'][:3])}; see e2e/tools/build.sh")
        return 3
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines, frontends = local_documents(options(), free_port)
        deployment = stack.enter_context(LocalDeployment(engines, frontends))
        deployment.wait_ready(400.0)
        operator_url = stack.enter_context(operator(folder))
        config = scrape_config(deployment, operator_url)
        url = stack.enter_context(prometheus(config, folder))
        load = stack.enter_context(Load([child.url for child in deployment.frontends]))
        time.sleep(args.seconds)  # the load is what the check looks back on
        print(f"{load.num_answers} answers and {load.num_refusals} refusals; asking {url}")
        command = [sys.executable, "-m", "e2e.observability", f"--prometheus={url}"]
        command += [f"--namespace={NAMESPACE}", f"--resource={RESOURCE}", f"--allow={ALLOW}"]
        command += [f"--seconds={args.seconds:g}", "--window=30s"]
        return subprocess.run(command, check=False, timeout=300, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
