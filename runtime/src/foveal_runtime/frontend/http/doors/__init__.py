"""Other APIs' doors to chat completions: each translates requests, and writes answers its way."""
