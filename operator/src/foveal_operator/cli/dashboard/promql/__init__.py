"""A PromQL evaluator for the dashboard page without a Prometheus."""
