"""Foveal runtime: frontends (HTTP, media, mirrors) and engines (scheduler, caches, model)."""
