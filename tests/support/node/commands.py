"""What the cluster tests do to a cluster: kubectl, helm, waiting, and asking about images.

The cluster is up already (e2e/cluster/run.sh); FOVEAL_E2E says where its binaries and keys lie.
Services and pods are reached from here by two routes, so clients need no port-forward.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from foveal_operator.kube.types import Obj
from tests.support.node.reads import PATHS, Reader

REPOSITORY = Path(__file__).parents[3]
PICTURES = REPOSITORY / "examples/tiny-vlm/images"
ROOT = Path(os.environ.get("FOVEAL_E2E", "/var/tmp/foveal-e2e"))
TOOLS = Path(os.environ.get("TOOLS", ROOT / "tools"))
KUBECONFIG = ROOT / "run/pki/admin.kubeconfig"
HOST_IP = "10.200.0.1"
"""This machine, as pods reach it; e2e/cluster/env.sh has the same."""
REGISTRY = "localhost"
"""The node's own; it has the images that images.sh built."""
OPERATOR_IMAGE = f"{REGISTRY}/foveal/operator:0.1.0"
T = TypeVar("T")


def environment() -> dict[str, str]:
    """kubectl, helm and kubeconfig as a user would have them."""
    path = f"{ROOT / 'cp/bin'}:{ROOT / 'helm'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KUBECONFIG": str(KUBECONFIG)}


def run(*command: str, stdin: str = "", seconds: float = 120.0) -> str:
    """Output of a command; its errors are the failure's text."""
    done = subprocess.run(
        command, input=stdin, env=environment(), capture_output=True, text=True,
        timeout=seconds, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


def kubectl(*arguments: str, stdin: str = "", seconds: float = 120.0) -> str:
    return run("kubectl", *arguments, stdin=stdin, seconds=seconds)


def of_notes(namespace: str) -> list[str]:
    """The commands of the chart's notes, which are indented, with their here-documents."""
    text = run("helm", "get", "notes", "foveal", "-n", namespace)
    steps = re.split(r"^\d\. .*$", text, flags=re.MULTILINE)[1:]
    return [
        "\n".join(line[3:] for line in step.splitlines() if line.startswith("   "))
        for step in steps
    ]


def get(kind: str, name: str = "", namespace: str = "default", selector: str = "") -> Obj:
    """One object, or a list when only a selector or nothing is given."""
    if kind in PATHS:
        return reader().get(kind, name, namespace, selector)
    command = ["get", kind, "-n", namespace, "-o", "json"]
    command += [name] if name else []
    command += ["-l", selector] if selector else []
    found: Obj = json.loads(kubectl(*command))
    return found


@cache
def reader() -> Reader:
    return Reader(KUBECONFIG)


def pods(role: str, resource: str = "tiny", namespace: str = "default") -> dict[str, Obj]:
    """Name to pod of one role; those on their way out too."""
    selector = f"app.kubernetes.io/instance={resource},app.kubernetes.io/component={role}"
    return {
        item["metadata"]["name"]: item for item in get("pods", "", namespace, selector)["items"]
    }


def uids(found: dict[str, Obj]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in found.values()}


def apply(*objects: Obj, namespace: str = "default") -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(items))


def patch(name: str, spec: Obj, namespace: str = "default") -> None:
    """A merge patch of a MultiModalInference's spec."""
    body = json.dumps({"spec": spec})
    kubectl("patch", "mmi", name, "-n", namespace, "--type=merge", "-p", body)


def until(what: str, check: Callable[[], T], seconds: float = 60.0) -> T:
    """The first true answer of `check`, asked twice a second; else what was seen last."""
    end = time.monotonic() + seconds
    seen: object = None
    while time.monotonic() < end:
        try:
            found = check()
        except (AssertionError, OSError, urllib.error.URLError) as error:
            seen = error
        else:
            if found:
                return found
            seen = found
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}; last seen: {seen}")


def condition(name: str, kind: str, namespace: str = "default") -> Obj:
    """A condition of a MultiModalInference; {} when it has none."""
    return _condition(get("mmi", name, namespace), kind)


def _condition(resource: Obj, kind: str) -> Obj:
    found = resource.get("status", {}).get("conditions", [])
    return next((item for item in found if item["type"] == kind), {})


def is_current(name: str, namespace: str = "default") -> bool:
    """Ready, and about the spec as it is now."""
    found = get("mmi", name, namespace)
    ready = _condition(found, "Ready")
    return (
        ready.get("status") == "True"
        and ready.get("observedGeneration") == found["metadata"]["generation"]
    )


def service_url(name: str = "tiny", namespace: str = "default") -> str:
    return f"http://{get('service', name, namespace)['spec']['clusterIP']}:8000"


def ask(
    url: str, question: str, *images: str | bytes, model: str = "tiny-vlm", seconds: float = 60.0
) -> str:
    """The answer to a question about pictures (names in the examples, or PNG bytes)."""
    content: list[Obj] = []
    for image in images:
        data = image if isinstance(image, bytes) else (PICTURES / image).read_bytes()
        text = "data:image/png;base64," + base64.b64encode(data).decode()
        content.append({"type": "image_url", "image_url": {"url": text}})
    content.append({"type": "text", "text": question})
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 48,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=seconds) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"]).strip()


def metrics(url: str) -> dict[str, float]:
    """Sum of every family's series, and of each cache's under FAMILY{cache}."""
    totals: dict[str, float] = {}
    with urllib.request.urlopen(url + "/metrics", timeout=20) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("#"):
                continue
            series, value = line.rsplit(" ", 1)
            family, _, labels = series.partition("{")
            names = [family]
            for label in labels.rstrip("}").split(","):
                if label.startswith("cache="):
                    names.append(f"{family}{{{label[7:-1]}}}")
            for name in names:
                totals[name] = totals.get(name, 0.0) + float(value)
    return totals
