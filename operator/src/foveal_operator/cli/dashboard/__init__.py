"""`foveal dashboard`: one self-contained HTML page from Prometheus or from /metrics directly.

layout.py says which panels of observability/boards are shown. sources.py asks a Prometheus;
or /metrics itself, and promql/ answers the very same expressions from what was read. page.py and
chart.py draw; they are pure.
"""
