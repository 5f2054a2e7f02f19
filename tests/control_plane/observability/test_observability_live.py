"""Every query of every dashboard and rule against a real Prometheus, on loopback, under load."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import regenerate
from tests.support.api_server.programs import missing_programs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_query_returns_data() -> None:
    """What only a cluster can answer is in local-allow.txt, with its reason."""
    local = pytest.importorskip("e2e.observability.local")
    if missing_programs("etcd", "kube-apiserver") or local.find_prometheus() is None:
        pytest.skip("etcd, kube-apiserver or prometheus is not built")
    command = [sys.executable, "-m", "e2e.observability.local", "--seconds=60"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=850, check=False, cwd=regenerate.ROOT
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
