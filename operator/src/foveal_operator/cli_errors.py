"""Errors that end a command with one line (or one a problem) and exit code 2."""

from __future__ import annotations


class UsageError(Exception):
    """The user's input is wrong: the message says what and how to put it right."""
