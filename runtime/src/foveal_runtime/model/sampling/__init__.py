"""Sampling: logit rules, token choice and log probabilities."""
