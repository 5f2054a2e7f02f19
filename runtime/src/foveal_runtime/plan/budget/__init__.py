"""Budgets: resource and model profile in, every byte out."""
