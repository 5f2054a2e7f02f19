"""The bytes of every message that crosses a process, and the transports that carry them.

Never pickles; never believes a length it has not checked.
"""
