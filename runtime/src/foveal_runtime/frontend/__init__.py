"""P0: the OpenAI HTTP app, media fetch and hashing, processor cache, routing, the engine client.

The HTTP process imports no torch.
"""
