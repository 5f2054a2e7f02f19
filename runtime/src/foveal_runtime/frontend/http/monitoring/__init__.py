"""Health and metrics of the HTTP process."""
