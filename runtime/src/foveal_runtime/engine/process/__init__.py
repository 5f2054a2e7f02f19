"""The engine process: step loop, link to frontends, health, metrics."""
