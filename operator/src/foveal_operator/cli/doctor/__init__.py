"""`foveal doctor`: what in a cluster or on this machine would bite, each with a next step."""
