"""The operator's own metrics: their declarations and their values."""
