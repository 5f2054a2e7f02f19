"""Compiles the CPU kernels into the wheel, one shared object per instruction set.

Everything else about the package is in pyproject.toml. The objects are plain C behind a C ABI:
they do not depend on the Python version, hence the wheel's tag. Without a C compiler the package
still builds and decodes with torch; FOVEAL_REQUIRE_KERNELS=1 makes that an error (images set it).
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGE = "foveal_runtime.model.cpu.kernels"
FOLDER = "src/foveal_runtime/model/cpu/kernels"
SOURCES = ("decoder_layers", "paged_decode", "paged_prefill", "recurrent", "rows")
VARIANTS = (
    {
        "generic": ["-march=x86-64"],
        "v3": ["-march=x86-64-v3"],
        "v4": ["-march=x86-64-v4"],
        "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16"],
        "v4_amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
    }
    if platform.machine() in ("x86_64", "AMD64")
    else {"generic": []}
)
ONLY = {"v4_amx": ("decoder_layers", "paged_prefill")}  # kernels with products in tiles
FLAGS = ["-std=gnu11", "-O3", "-fopenmp", "-fPIC", "-shared", "-fvisibility=default"]


class BuildKernels(build_ext):
    """One compiler call per variant, as many at once as there are CPUs; the file names carry no
    Python ABI."""

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise CompileError("no C compiler (gcc or cc) for the CPU kernels")
        command = [*compiler.split(), *FLAGS, *ext.extra_compile_args, *ext.sources]
        try:
            subprocess.run([*command, "-o", str(target), "-lm"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"a CPU kernel does not compile: {error}") from error

    def copy_extensions_to_source(self):
        """Where one does not compile, the older object must go: it takes other structures than
        the Python code of these sources gives."""
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            if not Path(self.build_lib, name).exists():
                Path("src", name).unlink(missing_ok=True)
        super().copy_extensions_to_source()


class Wheel(bdist_wheel):
    """Any Python 3, this platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}.{source}_{name}",
            sources=[f"{FOLDER}/{source}.c"],
            depends=[str(path) for path in Path(FOLDER).glob("*.h")],
            extra_compile_args=flags,
            optional=os.environ.get("FOVEAL_REQUIRE_KERNELS") != "1",
        )
        for source in SOURCES
        for name, flags in VARIANTS.items()
        if source in ONLY.get(name, SOURCES)
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
