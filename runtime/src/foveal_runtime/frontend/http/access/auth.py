"""API keys from a mounted file: compared in constant time, read again when the file changes.

Used by the middleware. One key a line; empty lines and lines that begin with # do not count. A
Secret volume swaps files by renaming a symlink, so the stat of the path tells a change.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable

from foveal_runtime.plan.errors import StartupError

logger = logging.getLogger(__name__)

_RECHECK_SECONDS = 1.0
_MAX_FILE_BYTES = 1 << 20


class KeyFile:
    """The keys of one file. Holds only their digests."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StartupError when the file cannot be read or holds no key."""
        self._path = path
        self._clock = clock
        self._checked = clock()
        try:
            self._stamp = self._stat()
            self._digests = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"API key file {path}: {error}") from error

    def accepts(self, key: bytes) -> bool:
        """Compares with every key, whichever matches."""
        self._reload_if_changed()
        given = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches) and bool(key)

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> tuple[bytes, ...]:
        with open(self._path, "rb") as file:
            lines = file.read(_MAX_FILE_BYTES).splitlines()
        keys = [line.strip() for line in lines]
        digests = tuple(
            hashlib.sha256(key).digest() for key in keys if key and not key.startswith(b"#")
        )
        if not digests:
            raise ValueError("it holds no key")
        return digests

    def _reload_if_changed(self) -> None:
        """A file that cannot be read, or is empty for a moment, leaves the known keys valid."""
        now = self._clock()
        if now - self._checked < _RECHECK_SECONDS:
            return
        self._checked = now
        try:
            stamp = self._stat()
            if stamp != self._stamp:
                self._digests = self._read()
                self._stamp = stamp
                logger.info("API keys reloaded", extra={"fields": {"num_keys": len(self._digests)}})
        except (OSError, ValueError) as error:
            logger.warning("API key file not reloaded", extra={"fields": {"error": str(error)}})
