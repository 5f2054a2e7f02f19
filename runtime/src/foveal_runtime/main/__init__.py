"""The composition root: starts frontends and engines from their configuration documents."""
