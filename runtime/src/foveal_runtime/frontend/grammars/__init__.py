"""Grammars of requests: schemas, structural tags, and the process that compiles them."""
