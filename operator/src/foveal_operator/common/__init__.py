"""Clock, logging and command-line errors, shared by all layers."""
