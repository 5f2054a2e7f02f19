"""`python -m foveal_operator` is the operator's process, like the command foveal-operator."""

from foveal_operator.process.main import process

if __name__ == "__main__":  # walking the package must not start it
    process()
