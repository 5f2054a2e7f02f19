"""A Prometheus of this machine: where it is, and one that runs for a while, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from foveal_runtime.plan.local import free_port


def find_prometheus() -> str | None:
    """The one that e2e/tools/build.sh made, or one on PATH."""
    tools = os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")
    return shutil.which("prometheus", path=tools) or shutil.which("prometheus")


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
