"""OpenAI's request and response types and their validation."""
