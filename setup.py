"""Build of the C++ extension `kernels._native`; everything else about the package is in pyproject.toml."""

from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "csrc").rglob("*.cpp"))
HEADERS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels" / "csrc").rglob("*.h"))

# No -march: each instruction set's code carries its own target attributes and is chosen at run time.
native = Pybind11Extension(
    "kernels._native",
    SOURCES,
    depends=HEADERS,
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra"],
)

ParallelCompile("KERNELS_BUILD_JOBS", default=2).install()
setup(ext_modules=[native], cmdclass={"build_ext": build_ext})
