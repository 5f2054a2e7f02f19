"""The scheduler: admission, step planning, encoder budget, run-ahead."""
