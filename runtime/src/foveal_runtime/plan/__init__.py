"""The documents and the arithmetic: configuration, model profile, budgets, metric registry, errors.

Read by every package, by the operator and by the CLI. Never does I/O; imports the standard library
and msgspec only.
"""
