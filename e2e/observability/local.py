"""The check without a cluster: real processes, a real operator and a real Prometheus on loopback.

    python -m e2e.observability.local [--seconds 90] [--keep]

Two frontends and two engines of the bundled model, with caches so small that they evict, under a
mixed load; etcd, an API server and an operator with one resource; a Prometheus that scrapes them
all. Labels that a PodMonitor adds from pods are given by hand here. Queries that only a cluster can
answer are in local-allow.txt, each with its reason. Takes two to four minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from e2e.observability.load import Load
from e2e.observability.server import find_prometheus, prometheus
from foveal_runtime.main.launcher import LocalDeployment
from foveal_runtime.main.local.serve import local_documents
from foveal_runtime.plan.local import free_port
from tests.support.api_server.api import Api
from tests.support.api_server.foreign import FOREIGN, definition
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import missing_programs, running_cluster
from tests.support.api_server.sandbox import claim_in, profile_of
from tests.support.regenerate import CRD_FILE
from tests.support.samples import LEGAL, put

ROOT = Path(__file__).resolve().parents[2]
ALLOW = Path(__file__).with_name("local-allow.txt")
NAMESPACE, RESOURCE = "models", "qwen"
MIB = 1 << 20


def small_deployment() -> LocalDeployment:
    """Caches that a minute's load fills."""
    engines, frontends = local_documents(
        free_port,
        model=os.environ.get("FOVEAL_TEST_MODEL", str(ROOT / "examples/tiny-vlm/model")),
        name="tiny-vlm", num_frontends=2, num_engines=2, num_threads=1, media_workers=1,
        kv_bytes=4 * MIB, ipc_bytes=1 * MIB, ipc_type="shm", processor_bytes=MIB // 2,
        encoder_embeds=256, encoder_host_bytes=MIB // 4, max_num_seqs=8,
    )  # fmt: skip
    return LocalDeployment(engines, frontends)


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
        deployment = stack.enter_context(small_deployment())
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
