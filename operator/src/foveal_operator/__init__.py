"""Foveal operator: turns a MultiModalInference into budgets, objects and a status."""
