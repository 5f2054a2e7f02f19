"""A fetch that a store refuses: what the runtime's command says, as the operator reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from foveal_operator.model.job_state import fetch_reason, read_job


def reason_of(uri: str, folder: Path, environment: dict[str, str]) -> tuple[str, str]:
    """(reason in the status, its text) of `fetch URI --to FOLDER`, which must fail."""
    done = subprocess.run(
        [sys.executable, "-m", "foveal_runtime.main.cli", "fetch", uri, "--to", str(folder)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 2
    status = {"exitCode": 2, "message": done.stderr[-2048:]}
    pod = {
        "metadata": {"name": "f", "labels": {"job-name": "fetch"}},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"terminated": status}}]},
    }
    state = read_job({"metadata": {"name": "fetch"}, "status": {}}, "fetch", [pod])
    assert "Traceback" not in done.stderr
    return fetch_reason(state.text).name, state.text
