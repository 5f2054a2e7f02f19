"""Media on their way in: fetch with limits, identity, and the worker processes that run processors.

The HTTP process uses everything here but `worker_main`, `decode` and `processors`, which only media
workers import: those three may load torch, Pillow codecs and Hugging Face processors.
"""
