"""The HTTP application: routes and the request service."""
