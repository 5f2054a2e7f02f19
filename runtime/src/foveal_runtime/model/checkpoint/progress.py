"""Progress of loading weights, as lines of the log: files, bytes, tensors and what comes next.

Used by main/ around the loading of a runner. transformers counts the tensors; its own bar, which
is made for terminals, does not reach the log.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foveal_runtime.model.checkpoint.weights import weight_files
from foveal_runtime.plan.quantity import short_bytes

_log = logging.getLogger(__name__)
PAUSE_SECONDS = 2.0
NEXT = "KV memory and warm-up come next"
_TITLE = "Loading weights"  # of the bar that counts tensors


def what_loads(path: str) -> str:
    """ "4 weight files, 15.4 GiB"."""
    files = [file for file in map(Path, weight_files(path)) if file.is_file()]
    size = short_bytes(sum(file.stat().st_size for file in files))
    return f"{len(files)} weight file{'s' if len(files) != 1 else ''}, {size}"


@contextlib.contextmanager
def told_loading(
    path: str, say: Callable[[str], None] = _log.info, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Says what is loaded, then every PAUSE_SECONDS how far that is, while the body loads."""
    from transformers.utils import logging as theirs

    what = what_loads(path)
    say(f"loading {what}; {NEXT}")

    def counted(tensors: Any) -> Iterator[Any]:
        said, total = clock(), len(tensors)
        for number, tensor in enumerate(tensors):
            if clock() - said >= PAUSE_SECONDS:
                said = clock()
                say(f"loading {what}: {number / total:.0%}, {number} of {total} tensors; {NEXT}")
            yield tensor

    def hook(make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if arguments and options.get("desc") == _TITLE:
            return counted(arguments[0])
        return make(*arguments, **options)

    before = theirs.set_tqdm_hook(hook)
    try:
        yield
    finally:
        theirs.set_tqdm_hook(before)
