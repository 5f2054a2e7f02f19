"""Single-flight calls and counters, shared by all of the frontend."""
