"""Argo CD itself beside an API server: its application controller and repository server.

Made by `e2e/tools/build.sh argo-cd` from its own packages; helm is the third version, as in
its image.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from foveal_operator.kube.types import Obj
from foveal_runtime.plan.local import free_port
from tests.support.api_server.programs import ROOT, Program, start, wait_until

TOOLS = Path(os.environ.get("TOOLS", ROOT / "tools"))
EXAMPLES = Path(__file__).parents[2] / "examples/gitops/argocd"
NAMESPACE = "argocd"
PROGRAMS = ("argo-cd", "helm3", "crds/argo/appproject-crd.yaml")
SETTING = {"url": "https://argo-cd.example"}


def missing() -> list[str]:
    return [name for name in PROGRAMS if not (TOOLS / name).exists()]


def definitions() -> list[Path]:
    return sorted((TOOLS / "crds/argo").glob("*.yaml"))


def configuration() -> list[Obj]:
    """What Argo CD's own installation brings along, with a setting; health.lua is to be
    merged. The project is made by its API server, which nobody needs here."""
    part = {"app.kubernetes.io/part-of": "argocd"}
    made: list[Obj] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]
    for kind, name in (("ConfigMap", "argocd-cm"), ("Secret", "argocd-secret")):
        metadata = {"name": name, "namespace": NAMESPACE, "labels": part}
        made.append({"apiVersion": "v1", "kind": kind, "metadata": metadata})
    made[1]["data"] = SETTING
    made[2]["stringData"] = {"server.secretkey": "of-a-test"}
    every = {"group": "*", "kind": "*"}
    made.append(
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "AppProject",
            "metadata": {"name": "default", "namespace": NAMESPACE},
            "spec": {
                "sourceRepos": ["*"],
                "destinations": [{"server": "*", "namespace": "*"}],
                "clusterResourceWhitelist": [every],
            },
        }
    )
    return made


def make_repository(folder: Path, files: dict[str, str | Path]) -> str:
    """A git repository foveal.git in `folder` with these files (text, or what to copy) on branch
    main and as tag v0.1.0. Returns what the pages call GIT."""
    work = folder / "foveal.git"
    for name, content in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            shutil.copytree(content, path, dirs_exist_ok=True)
    identity = ["-c", "user.name=a test", "-c", "user.email=test@git.example"]
    for command in (
        ["init", "--quiet", "--initial-branch=main"],
        ["add", "--all"],
        [*identity, "commit", "--quiet", "--message=Deploy"],
        ["tag", "v0.1.0"],
    ):
        subprocess.run(["git", *command], cwd=work, check=True, timeout=60)
    return f"file://{folder}"


@contextlib.contextmanager
def running_argo_cd(kubeconfig: Path, folder: Path) -> Iterator[list[Program]]:
    """Its programs, working in namespace argocd of the kubeconfig's cluster."""
    path = folder / "bin"
    path.mkdir()
    (path / "helm").symlink_to(TOOLS / "helm3")
    env = {
        **os.environ,
        "PATH": f"{path}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "KUBECONFIG": str(kubeconfig),
        "ARGOCD_FAKE_IN_CLUSTER": "true",  # kubernetes.default.svc is the kubeconfig's cluster
        "ARGOCD_GPG_ENABLED": "false",
        "ARGOCD_TLS_DATA_PATH": str(folder / "tls"),
        "ARGOCD_SSH_DATA_PATH": str(folder / "ssh"),
        "ARGOCD_ASK_PASS_SOCK": str(folder / "ask-pass.sock"),
    }
    for name in ("tls", "ssh"):
        (folder / name).mkdir()
    program = str(TOOLS / "argo-cd")
    redis, repository = (f"127.0.0.1:{free_port()}" for _ in range(2))
    port = repository.partition(":")[2]
    commands = {
        "redis": ["redis", redis],
        "repo-server": [
            "argocd-repo-server", "--address=127.0.0.1", f"--port={port}", "--disable-tls",
            "--metrics-address=127.0.0.1", f"--metrics-port={free_port()}", f"--redis={redis}",
            "--logformat=text",
        ],
        "application-controller": [
            "argocd-application-controller", f"--kubeconfig={kubeconfig}",
            f"--namespace={NAMESPACE}", f"--repo-server={repository}", "--repo-server-plaintext",
            f"--redis={redis}", f"--metrics-port={free_port()}", "--app-resync=10",
            "--status-processors=2", "--operation-processors=2", "--logformat=text",
        ],
    }  # fmt: skip
    programs: list[Program] = []
    try:
        for name, command in commands.items():
            programs.append(start(f"argo-{name}", [program, *command], folder, env))
        yield programs
    finally:
        for one in reversed(programs):
            one.stop(patience_seconds=5.0)


def verdict(application: Obj) -> tuple[str, str]:
    """(sync, health) as Argo CD says them."""
    status = application.get("status", {})
    return status.get("sync", {}).get("status", ""), status.get("health", {}).get("status", "")


def wait_alive(programs: list[Program], what: str, condition: object, seconds: float) -> None:
    """Until the condition holds; says what ended, or what Argo CD said last."""
    assert callable(condition)

    def asked() -> object:
        for one in programs:
            assert one.is_alive, f"{one.name} ended:\n{one.tail()}"
        return condition()

    try:
        wait_until(what, asked, seconds)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{programs[-1].tail(30)}") from None
