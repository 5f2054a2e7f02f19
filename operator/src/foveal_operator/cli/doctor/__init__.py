"""`foveal doctor`: checks of the cluster and this machine, each with a next step."""
