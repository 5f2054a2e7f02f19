"""Every metric declared once, as data."""
