"""Both halves of the cache mirror, side by side, as pure state machines.

The engine decides, mirrors are hints, NEED/FILL is the safety net. No sockets, clocks or
randomness: the same modules run in production, in the fuzzer and in the checker.
"""
