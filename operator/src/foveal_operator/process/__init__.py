"""The operator process: options, start-up, HTTP endpoints."""
