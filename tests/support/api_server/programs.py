"""Starts a real etcd, kube-apiserver and kube-controller-manager on loopback, and ends them.

Called by conftest.py (once per test session). Ports are free ones, all files lie in one temporary
folder, every process is ended by the pid recorded at its start. Never builds anything:
`make control-plane` does that first.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from foveal_runtime.plan.local import free_port
from tests.support.api_server.fork_server import Forked

ROOT = Path(os.environ.get("FOVEAL_E2E", "/var/tmp/foveal-e2e"))
ADMIN, CONTROLLERS = "admin-token", "controllers-token"
_TOKENS = f"""{ADMIN},admin,1,"system:masters"
{CONTROLLERS},controllers,2,"system:masters"
"""
_CONTROLLERS_RUN = (
    "deployment-controller,replicaset-controller,statefulset-controller,job-controller,"
    "garbage-collector-controller,namespace-controller,serviceaccount-controller,"
    "pod-garbage-collector-controller,resourceclaim-controller,ttl-after-finished-controller,"
    "disruption-controller"
)
START_SECONDS = 240.0


def program(name: str) -> Path:
    own_folder = name in ("etcd", "helm")
    return ROOT / name / name if own_folder else ROOT / "cp" / "bin" / name


def missing_programs(*names: str) -> list[str]:
    return [name for name in names if not program(name).exists()]


def wait_until(what: str, condition: object, timeout_seconds: float = 180.0) -> object:
    """The first truthy value of condition(); says what did not happen when none comes in time."""
    assert callable(condition)
    end = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"after {timeout_seconds:.0f} s still not: {what}")
        time.sleep(0.05)


@dataclass
class Program:
    """A child process with its log."""

    name: str
    process: subprocess.Popen[bytes] | Forked
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, num_lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])

    def stop(self, patience_seconds: float = 2.0) -> None:
        """SIGTERM, then SIGKILL: an API server outlives a polite request by a minute."""
        if self.is_alive:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_seconds)
        if self.is_alive:
            self.process.kill()
        self.process.wait(60)


def start(
    name: str, command: list[str], folder: Path, env: dict[str, str] | None = None
) -> Program:
    log = folder / f"{name}.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder, env=env
        )
    return Program(name=name, process=process, log=log)


@dataclass
class Cluster:
    """A running API server: where it is and how to log in."""

    url: str
    ca_file: Path
    folder: Path
    programs: list[Program] = field(default_factory=list)

    def kubeconfig(self, name: str, token: str = ADMIN, url: str = "") -> Path:
        """A kubeconfig for `token`; `url` is a proxy's, or the server itself."""
        server: dict[str, str] = {"server": url or self.url}
        if server["server"].startswith("https"):
            server["certificate-authority"] = str(self.ca_file)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(config))
        path.chmod(0o600)
        return path

    def is_ready(self) -> bool:
        if not self.ca_file.exists():
            return False
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {ADMIN}"}
        )
        context = ssl.create_default_context(cafile=str(self.ca_file))
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as reply:
                return int(reply.status) == 200
        except (urllib.error.URLError, OSError):
            return False


def _etcd(folder: Path) -> tuple[Program, str]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    data = folder / "etcd-data"
    data.mkdir(mode=0o700)
    command = [str(program("etcd")), "--name=test", f"--data-dir={data}", "--unsafe-no-fsync"]
    command += [f"--listen-client-urls={client}", f"--advertise-client-urls={client}"]
    command += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    command += [f"--initial-cluster=test={peer}", "--log-level=warn"]
    return start("etcd", command, folder), client


def _service_account_key(folder: Path) -> Path:
    key = folder / "service-accounts.key"
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return key


def _api_server(folder: Path, etcd_url: str, port: int, key: Path) -> Program:
    tokens = folder / "tokens.csv"
    tokens.write_text(_TOKENS)
    command = [str(program("kube-apiserver")), f"--etcd-servers={etcd_url}"]
    command += ["--bind-address=127.0.0.1", f"--secure-port={port}"]
    # Loopback is refused as an endpoint; without a reconciler nobody asks for one.
    command += ["--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"]
    command += [f"--cert-dir={folder / 'certs'}", f"--token-auth-file={tokens}"]
    command += ["--authorization-mode=Node,RBAC", "--service-cluster-ip-range=10.96.0.0/16"]
    command += ["--service-account-issuer=https://kubernetes.default.svc"]
    command += [f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"]
    # As some distributions do: owners that block a deletion need a right of their own.
    command += ["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"]
    command += ["--allow-privileged=true", "--profiling=false"]
    return start("kube-apiserver", command, folder)


def start_controllers(cluster: Cluster) -> Program:
    """The real controllers of Deployments, StatefulSets, Jobs, budgets, owners and namespaces."""
    config = cluster.kubeconfig("controllers", CONTROLLERS)
    command = [str(program("kube-controller-manager")), f"--kubeconfig={config}"]
    command += [f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"]
    command += ["--authentication-skip-lookup=true", "--bind-address=127.0.0.1"]
    command += [f"--secure-port={free_port()}", f"--cert-dir={cluster.folder / 'kcm-certs'}"]
    command += [f"--controllers={_CONTROLLERS_RUN}", "--leader-elect=false"]
    command += ["--use-service-account-credentials=false", "--profiling=false"]
    command += [f"--flex-volume-plugin-dir={cluster.folder / 'flexvolume'}"]
    command += ["--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-gc-syncs=4"]
    running = start("kube-controller-manager", command, cluster.folder)
    cluster.programs.append(running)
    return running


def start_scheduler(cluster: Cluster) -> Program:
    """The real scheduler; the caller ends it, since other tests bind pods themselves."""
    config = cluster.kubeconfig("scheduler", CONTROLLERS)
    command = [str(program("kube-scheduler")), f"--kubeconfig={config}", "--leader-elect=false"]
    command += [f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}"]
    command += ["--authentication-skip-lookup=true", "--bind-address=127.0.0.1"]
    command += [f"--secure-port={free_port()}", f"--cert-dir={cluster.folder / 'scheduler-certs'}"]
    return start("kube-scheduler", command, cluster.folder)


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """etcd and an API server that answers; both are gone afterwards."""
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    cluster = Cluster(url=url, ca_file=folder / "certs" / "apiserver.crt", folder=folder)
    try:
        etcd, etcd_url = _etcd(folder)
        cluster.programs.append(etcd)
        server = _api_server(folder, etcd_url, port, _service_account_key(folder))
        cluster.programs.append(server)

        def ready_or_dead() -> bool:
            for one in cluster.programs:
                assert one.is_alive, f"{one.name} ended at its start:\n{one.tail()}"
            return cluster.is_ready()

        wait_until("the API server is ready", ready_or_dead, START_SECONDS)
        yield cluster
    finally:
        for one in reversed(cluster.programs):
            one.stop()
