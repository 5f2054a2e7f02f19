"""`foveal status`: the state of resources in a cluster."""
