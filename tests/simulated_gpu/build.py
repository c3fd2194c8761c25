"""Compiles the simulated devices, once for each version of their sources, of torch and of Python."""

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

NAME = "simulated_cuda"
"""Of the module that is compiled."""

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".simulated_gpu"
FLAGS = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}"]


class CannotSimulateError(Exception):
    """Something is missing here, or in the way. Says what, and the cure."""


def built(kind: str = "computing") -> Path:
    """The library of a kind of device, which is compiled if that has not been done yet. It takes half a minute."""
    torch = _torch()
    library = FOLDER / f"{NAME}-{kind}-{_fingerprint(torch)}.so"
    if library.exists():
        return library
    compiler, headers = _compiler(), _headers()
    FOLDER.mkdir(exist_ok=True)
    # Under another name until it is whole: others may build it at the same time, and this one may be interrupted.
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        made = Path(scratch) / library.name
        folders = [HERE, HERE / kind, torch / "include", torch / "include/torch/csrc/api/include", headers]
        includes = [f"-I{folder}" for folder in folders]
        libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        found_at = [f"-Wl,-rpath,{torch / 'lib'}"]
        command = [compiler, *FLAGS, *includes, str(HERE / "module.cpp"), "-o", str(made), *libraries, *found_at]
        result = subprocess.run(command, check=False, capture_output=True, text=True)
        if result.returncode:
            raise CannotSimulateError(
                f"the simulated GPU was not compiled for torch {importlib.metadata.version('torch')}:\n"
                f"{result.stderr[-4000:]}\nIt uses what torch does not promise to keep: adapt {HERE} to this version, "
                "or install the one in constraints.txt"
            )
        made.replace(library)
    return library


def _torch() -> Path:
    """Where torch is installed. It is not imported: the device must be there before."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise CannotSimulateError("torch is not installed here: make install")
    folder = Path(spec.submodule_search_locations[0])
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise CannotSimulateError(
            f"torch in {folder} is built for CUDA, which leaves no room for a simulated device. Install the same "
            "version for the CPU alone, or run the tests on real hardware: make gpu-test"
        )
    return folder


def _fingerprint(torch: Path) -> str:
    """Another one wherever another library would come out."""
    digest = hashlib.sha256()
    for source in sorted([*HERE.rglob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(str(source.relative_to(HERE)).encode() + b"\0" + source.read_bytes())
    digest.update("\0".join([str(torch), importlib.metadata.version("torch"), sys.version, *FLAGS]).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise CannotSimulateError(
            "the simulated GPU is written in C++, and there is no compiler here: install g++ (on Debian and Ubuntu: "
            "apt install g++), or name another one in CXX"
        )
    return compiler


def _headers() -> str:
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise CannotSimulateError(
            f"the simulated GPU is compiled with Python's headers, and {headers} has none: install them (on Debian and "
            "Ubuntu: apt install python3-dev)"
        )
    return str(headers)
