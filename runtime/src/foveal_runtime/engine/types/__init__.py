"""The engine's data types: requests, step plans, limits, statistics."""
