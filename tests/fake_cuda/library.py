"""Compiles and loads the C++ library of the fake device. Call `load` before torch is imported."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "fake_cuda"
DEVICE = ("queue", "memory", "device", "kernels", "interface")
PROCESS_GROUP = ("process_group",)
FLAGS = ("-O1", "-fPIC", "-std=c++20", "-DUSE_C10D_GLOO")


def torch_directory() -> Path:
    """Return torch's directory without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def fits() -> bool:
    """Return whether this is torch's build for CPUs, without importing it."""
    version = (torch_directory() / "version.py").read_text()
    return re.search(r"^cuda\b.*= None", version, re.MULTILINE) is not None


def load() -> ctypes.CDLL:
    """Load torch's libraries and then the device, which must precede torch's Python module."""
    libraries = torch_directory() / "lib"
    names = ["libc10.so"]
    names += sorted(path.name for path in libraries.glob("libgomp*"))
    names += [name for name in ("libtorch_global_deps.so",) if (libraries / name).exists()]
    for name in [*names, "libtorch_cpu.so"]:
        ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(built("device", DEVICE)), ctypes.RTLD_GLOBAL)


def built(name: str, sources: tuple[str, ...], *flags: str) -> Path:
    """Compile a library, cached by the content of its sources and versions of torch and Python."""
    library = BUILD / f"{name}-{_fingerprint(sources, flags)}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    # Workers that start together build it once.
    with open(BUILD / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            for outdated in BUILD.glob(f"{name}-*.so"):
                outdated.unlink()
            _compile(library, sources, flags)
    return library


def _fingerprint(sources: tuple[str, ...], flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((FLAGS, flags, sysconfig.get_python_version())).encode())
    digest.update((torch_directory() / "version.py").read_bytes())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix == ".h" or path.stem in sources:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(library: Path, sources: tuple[str, ...], flags: tuple[str, ...]) -> None:
    torch = torch_directory()
    include = torch / "include"
    paths = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    options = [*FLAGS, *flags, *(f"-I{path}" for path in paths)]
    compiler = os.environ.get("CXX", "g++")
    temporary = library.with_suffix(".building")
    if shutil.which(compiler) is None:
        raise RuntimeError(f"the fake device needs a C++ compiler, not found: {compiler} (CXX)")
    objects = [library.with_name(f"{name}.o") for name in sources]
    compilers = [
        subprocess.Popen(
            [compiler, *options, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(target)]
        )
        for name, target in zip(sources, objects, strict=True)
    ]
    if any(code != 0 for code in [process.wait() for process in compilers]):
        raise RuntimeError(f"{compiler} could not compile tests/fake_cuda/csrc")
    link = [compiler, "-shared", *map(str, objects), "-o", str(temporary), f"-L{torch / 'lib'}"]
    subprocess.run([*link, "-ltorch_cpu", "-lc10"], check=True)
    os.replace(temporary, library)
    for target in objects:
        target.unlink()
