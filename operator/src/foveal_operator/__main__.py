"""`python -m foveal_operator` is the operator's process, like the command foveal-operator."""

from foveal_operator.main import process

process()
