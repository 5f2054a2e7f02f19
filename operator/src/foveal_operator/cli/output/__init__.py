"""Tables, times and terminal output of the command line."""
