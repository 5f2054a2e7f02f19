"""What the product contacts: every way out of the sources stands in docs/how-to/air-gapped.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "operator" / "src", ROOT / "runtime" / "src")
PAGE = (ROOT / "docs" / "how-to" / "air-gapped.md").read_text(encoding="utf-8")
CLIENTS = {
    "urllib.request", "http.client", "aiohttp", "httpx", "requests", "urllib3", "boto3",
    "huggingface_hub", "kubernetes", "opentelemetry.exporter", "grpc", "smtplib", "ftplib",
    "websockets", "telnetlib", "xmlrpc.client",
}  # fmt: skip
# Each file that imports one, and the words of the table's row about it.
WAYS_OUT = {
    "foveal_operator/cli/dashboard/sources.py": "`--prometheus`, `--metrics`",
    "foveal_operator/kube/cluster.py": "the Kubernetes API server",
    "foveal_operator/kube/http.py": "the Kubernetes API server",
    "foveal_operator/kube/kopf_watch.py": "the Kubernetes API server",
    "foveal_operator/kube/reader.py": "the API server of the kubeconfig",
    "foveal_operator/pods/probes.py": "probes and `/metrics` of its own frontends and engines",
    "foveal_operator/process/main.py": "probes and `/metrics` of its own frontends and engines",
    "foveal_operator/process/server.py": "",  # only serves
    "foveal_runtime/bench/client.py": "the server of `foveal bench`",
    "foveal_runtime/bench/runs.py": "the server of `foveal bench`",
    "foveal_runtime/main/local/bench.py": "the server of `foveal bench`",
    "foveal_runtime/frontend/http/monitoring/metrics.py": "their engines",
    "foveal_runtime/frontend/http/monitoring/siblings.py": "",  # Unix sockets of its own frontend
    "foveal_runtime/frontend/media/fetch.py": "`security.mediaSources.allowedDomains`",
    "foveal_runtime/main/fetch.py": "`S3_ENDPOINT_URL`",
    "foveal_runtime/main/launcher.py": "",  # the processes that it started itself
    "foveal_runtime/main/local/model.py": "the hub or store of the model",
    "foveal_runtime/main/registry.py": "the registry of an `oci://` model",
    "foveal_runtime/telemetry/tracing.py": "`OTEL_EXPORTER_OTLP_ENDPOINT`",
}
# In messages, help and comparisons, and names that mean nothing outside: no address to contact.
NO_HOST = re.compile(r"^(127\.0\.0\.1|localhost|HOST|HOST:PORT|fake|no-color\.org|git-lfs.*)$")


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(file.relative_to(source)): ast.parse(file.read_text(encoding="utf-8"))
        for source in SOURCES
        for file in sorted(source.rglob("*.py"))
    }


def imported(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if any(f"{name}.".startswith(f"{c}.") for c in CLIENTS)}


def strings(tree: ast.Module) -> list[str]:
    """Every constant text that is no docstring."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    ]


def test_every_module_that_can_open_a_connection_has_its_row() -> None:
    found = {name for name, tree in modules().items() if imported(tree)}
    assert found == WAYS_OUT.keys()
    for words in WAYS_OUT.values():
        assert words in PAGE, words


def test_every_address_in_the_sources_is_in_the_table() -> None:
    hosts = {
        host
        for tree in modules().values()
        for text in strings(tree)
        for host in re.findall(r"https?://([A-Za-z0-9_.-]+)", text)
        if not NO_HOST.match(host) and not host.endswith((".example", "example.org"))
    }
    told = set(re.findall(r"`https://([a-z0-9.-]+)", PAGE))
    assert hosts == told


def test_every_variable_that_names_an_address_is_in_the_table() -> None:
    found = {
        name
        for tree in modules().values()
        for text in strings(tree)
        for name in re.findall(r"^[A-Z0-9_]*ENDPOINT[A-Z0-9_]*$", text)
    }
    assert {"HF_ENDPOINT", "S3_ENDPOINT_URL", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= found
    for name in found:
        assert f"`{name}`" in PAGE, name


def test_pages_that_frontends_serve_load_nothing_from_elsewhere() -> None:
    pages = list((ROOT / "runtime" / "src").rglob("*.html"))
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loads = re.findall(r"""(?:src|href|action|url)\s*[=(]\s*["']?(https?:)?//""", text)
        assert not loads, page


def test_the_charts_images_and_dependencies_are_those_of_the_page() -> None:
    chart = (ROOT / "charts" / "foveal" / "Chart.yaml").read_text(encoding="utf-8")
    assert "dependencies:" not in chart
    values = (ROOT / "charts" / "foveal" / "values.yaml").read_text(encoding="utf-8")
    images = re.findall(r"^  repository: (\S+)$", values, re.MULTILINE)
    assert sorted(images) == ["foveal/operator", "foveal/runtime"]
    for image in images:
        assert f"{image}:" in PAGE
