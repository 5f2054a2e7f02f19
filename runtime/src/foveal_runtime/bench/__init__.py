"""A load generator for OpenAI-compatible servers: traces, runs in turn, tables and plots.

Knows no server in particular; `foveal bench` is its command, and e2e/bench starts servers for it.
"""
