"""`serve`, `launch` and the live view: a whole deployment on this machine."""
