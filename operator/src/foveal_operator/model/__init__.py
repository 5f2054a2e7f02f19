"""The model of a resource: fetch and profile Jobs, and what they found."""
