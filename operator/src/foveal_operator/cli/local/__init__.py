"""`foveal up`: the processes that pods would run, on this machine."""
