"""The beginning of a program: Ctrl-C ends it without a word while its modules are imported."""

from __future__ import annotations

import importlib
import signal


def run(module: str) -> int:
    """`main` of `module`. Python's own handler would print where an import was, for a second."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(module).main
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    return int(main())
