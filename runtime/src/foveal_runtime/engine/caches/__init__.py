"""KV blocks, prefix cache, encoder cache, host tier and warm set."""
