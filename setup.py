"""Builds the libraries and ``_C`` with CMake and Ninja, for every build front end; all else is in pyproject.toml.

CMake's folder in build/ outlives a call, so that only changed files are compiled again. CMakeCache.txt does not: it
would name the folder of an isolated environment that is gone. `make build` runs CMake itself, in another folder.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    sys.exit("liger_ext is built with setuptools >= 77, and an older one is installed: pip install -U setuptools")

ROOT = Path(__file__).resolve().parent
SETTINGS = ("LIGER_EXT_GPU", "LIGER_EXT_CUDA_ARCHS", "LIGER_EXT_HIP_ARCHS", "LIGER_EXT_PYTHONS")  # in the environment
PYTHONS = [python for python in os.environ.get("LIGER_EXT_PYTHONS", "").split(";") if python] or [sys.executable]


class BuildPackage(build_py):
    def run(self):
        if not self.editable_mode:  # else deleted modules would stay in wheels
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildLibraries(build_ext):
    def run(self):
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # venv may be inactive
        for tool in ("cmake", "ninja"):
            if shutil.which(tool) is None:
                sys.exit(f"liger_ext is built by cmake and ninja, and the PATH has no {tool}: pip install {tool}")
        build = ROOT / "build" / f"pip-{sys.implementation.cache_tag}"
        target = ROOT if self.editable_mode or self.inplace else Path(self.build_lib)
        (build / "CMakeCache.txt").unlink(missing_ok=True)
        settings = [f"-D{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]
        for arguments in (
            ["-G", "Ninja", "-S", ROOT, "-B", build, f"-DPython_EXECUTABLE={sys.executable}", *settings],
            ["--build", build],
            ["--install", build, "--prefix", target, "--strip"],
        ):
            if status := subprocess.run(["cmake", *arguments]).returncode:
                sys.exit(f"cmake {arguments[0]} failed with status {status}: its message is above")

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class Wheel(bdist_wheel):
    def get_tag(self):
        """Returns a tag with every Python for which the wheel has a ``_C``."""
        code = "import sys; print('cp%d%d' % sys.version_info[:2])"
        tags = [subprocess.check_output([python, "-c", code], text=True).strip() for python in PYTHONS]
        return ".".join(tags), "none", super().get_tag()[2]


def readme() -> str:
    """Returns README.md with absolute links: a package index has no other files of the project."""
    project = (ROOT / "pyproject.toml").read_text()
    source, version = (re.search(rf'^{name} = "(.*)"', project, re.M)[1] for name in ("Source", "version"))
    text = re.sub(r"!\[(.*?)\]\((?!https?:)", rf"![\1]({source}/raw/v{version}/", (ROOT / "README.md").read_text())
    return re.sub(r"(?<!!)\[([^]]*)\]\((?!https?:|#)", rf"[\1]({source}/blob/v{version}/", text)


setup(
    cmdclass={"build_py": BuildPackage, "build_ext": BuildLibraries, "bdist_wheel": Wheel},
    ext_modules=[Extension("liger_ext._C", sources=[])],
    long_description=readme(),
    long_description_content_type="text/markdown",
)
