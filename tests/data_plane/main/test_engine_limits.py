"""Limits of the operating system that an engine process sets for itself."""

import resource
import subprocess
import sys

import msgspec

from foveal_runtime.plan.config import EngineConfig, ModelConfig

CODE = """
import resource, sys
from foveal_runtime.main import engine
from foveal_runtime.plan.errors import StartupError
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    engine.run(sys.argv[1])
except StartupError as error:
    print(*resource.getrlimit(resource.RLIMIT_NOFILE), error)
"""


def test_an_engine_opens_as_many_files_as_it_may(tmp_path):
    """The soft limit of a shell or a service, often 1,024, was too low for a thousand shared values
    or frontends. The engine ends here because its address belongs to nobody."""
    config = EngineConfig(model=ModelConfig(path=str(tmp_path)), http_host="203.0.113.1")
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(config))
    found = subprocess.run(
        [sys.executable, "-c", CODE, str(path)], capture_output=True, text=True, timeout=300
    )
    soft, hard, error = found.stdout.split(maxsplit=2)
    assert "http_host" in error
    assert int(soft) == int(hard) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
