"""APIs beside chat completions: each translates its requests to one, and writes the answer."""
