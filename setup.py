"""Compiles the native kernels at installation, if a C++17 compiler is there; all else is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# The build front end does not put the project on the path.
sys.path.insert(0, str(Path(__file__).parent))
from baton.native.build import BuildError, build


class BuildNative(build_ext):
    """Compiles a shared library for ctypes, which knows nothing of Python, so its name has no tag of Python."""

    def build_extension(self, ext: Extension) -> None:
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        # Left from an earlier build with other sources.
        output.unlink(missing_ok=True)
        try:
            build(output)
        except BuildError as error:
            raise CompileError(str(error)) from None

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class NativeWheel(bdist_wheel):
    """One wheel for all versions of Python on a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # Optional: an extension that can't be compiled does not end the installation.
    ext_modules=[
        Extension(
            "baton.native._baton_native",
            sources=sorted(str(path) for path in Path("baton/native/src").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("baton/native/src").glob("*.h")),
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": NativeWheel},
)
