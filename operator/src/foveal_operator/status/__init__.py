"""The status of a resource: conditions, report and gauges."""
