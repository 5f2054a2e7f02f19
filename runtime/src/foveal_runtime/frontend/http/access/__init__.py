"""Authentication, admission control and the admin API."""
