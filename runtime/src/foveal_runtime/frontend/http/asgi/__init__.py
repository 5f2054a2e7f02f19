"""ASGI plumbing: server, middleware, disconnects, JSON and errors."""
