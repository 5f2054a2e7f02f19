"""Stop signals that arrive at any instruction of the main thread, also inside a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from foveal_runtime.main.supervise import StopSignals

# The alarm comes while the main thread enters, sits in and leaves its waits.
HAMMERED = """
import signal, sys
from foveal_runtime.main.supervise import StopSignals
stop = StopSignals()
signal.signal(signal.SIGALRM, stop._on_signal)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1.37e-4)
while stop.count < 10_000:
    stop.wait(1e-5)
signal.setitimer(signal.ITIMER_REAL, 0)
print("counted", stop.count)
"""


def test_signals_inside_waits_never_block() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HAMMERED], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout.split()[1]) >= 10_000


INTERRUPTED = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
IGNORED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
AT_A_TERMINAL = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


@pytest.mark.parametrize(
    ("before", "imported", "code", "said"),
    [
        (AT_A_TERMINAL, INTERRUPTED, -signal.SIGINT, ""),
        (AT_A_TERMINAL, "", 7, "interrupted"),
        (IGNORED, INTERRUPTED, 7, ""),
    ],
    ids=["imports", "main", "nohup"],
)
def test_an_interrupt_of_the_imports_prints_no_traceback(
    tmp_path: Path, before: str, imported: str, code: int, said: str
) -> None:
    """Ctrl-C within the first second of `foveal serve` showed which module was being imported."""
    (tmp_path / "slow.py").write_text(
        f"{imported}\ndef main():\n    try:\n        {INTERRUPTED}\n"
        "    except KeyboardInterrupt:\n        print('interrupted')\n    return 7\n"
    )
    started = f"{before}\nimport sys\nfrom foveal_runtime.plan.program import run\n"
    started += "sys.exit(run('slow'))"
    done = subprocess.run(
        [sys.executable, "-c", started], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (code, said, "")


@pytest.mark.parametrize("package", ["runtime", "operator"])
def test_the_commands_begin_so(package: str) -> None:
    root = Path(__file__).parents[3]
    scripts = tomllib.loads((root / package / "pyproject.toml").read_text())["project"]["scripts"]
    for name, module in (
        ("foveal-runtime", "foveal_runtime"), ("foveal", "foveal_operator.cli"),
        ("kubectl-foveal", "foveal_operator.cli"),
    ):  # fmt: skip
        if name in scripts:
            assert scripts[name] == f"{module}.__main__:main"
            done = subprocess.run(
                [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60
            )
            assert (done.returncode, done.stdout[:6]) == (0, "usage:")


def test_each_signal_is_counted_and_ends_a_wait() -> None:
    asked: list[int] = []
    with StopSignals(lambda: asked.append(1)).listening() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        began = time.monotonic()
        stop.wait(30.0)
        assert (stop.count, asked) == (1, [])
        os.kill(os.getpid(), signal.SIGINT)
        stop.wait(30.0)
        assert (stop.count, asked) == (2, [1])
        assert time.monotonic() - began < 20.0
