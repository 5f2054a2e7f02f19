"""P1: step loop, request state, scheduler, encoder cache, block pool, prefix cache. No torch."""
