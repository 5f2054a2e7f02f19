"""Stop signals that arrive at any instruction of the main thread, also inside a wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

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
