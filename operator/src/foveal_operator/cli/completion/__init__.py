"""Shell completion for `foveal` and the kubectl plugin."""
