"""`python -m foveal_operator` is the operator's process, like the command foveal-operator."""

import sys

from foveal_operator.main import main

sys.exit(main())
