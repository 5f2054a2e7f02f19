"""The decoder's forward pass and its faster replacements on CPUs."""
