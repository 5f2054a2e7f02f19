"""Pods as the operator observes them: diagnosis, probes, metrics, Events."""
