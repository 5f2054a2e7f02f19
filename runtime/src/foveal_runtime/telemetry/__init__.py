"""Metrics exposition, structured logs and traces, for frontends and engines alike.

Turns the metric registry (plan/metrics, data only) into live series. Never decides anything.
"""
