"""Compiles the emulation against the installed torch. The result is cached by torch's version, the compiler and the sources."""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
MODULE = "petra_emulated_cuda"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-w", "-DUSE_DISTRIBUTED", "-DAT_PER_OPERATOR_HEADERS", f"-DTORCH_EXTENSION_NAME={MODULE}"]


def torch_folder() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def missing() -> str | None:
    """Return why the emulation can't be built here, or None."""
    if compiler() is None:
        return "no C++ compiler (g++ or clang++)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no headers of Python (Python.h)"
    if (torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return "torch is built for CUDA; the emulation needs the CPU build"
    return None


def compiler() -> str | None:
    return next((found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None)


def library() -> Path:
    """Return the path of the compiled library; compile it first if the cache doesn't have it.

    Raises:
        RuntimeError: If the emulation can't be built here.
        subprocess.CalledProcessError: If the compiler fails.
    """
    if reason := missing():
        raise RuntimeError(reason)
    cache = Path(os.environ.get("PETRA_EMULATED_CACHE") or Path(tempfile.gettempdir()) / f"petra-emulated-{os.getuid()}")
    target = cache / _key() / f"{MODULE}.so"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:  # several test processes may start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _key() -> str:
    parts = [importlib.metadata.version("torch"), str(torch_folder()), sys.version, str(compiler()), *FLAGS]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(target: Path) -> None:
    torch = torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    flags = [str(compiler()), *FLAGS, *(f"-I{path}" for path in includes)]

    def compile_one(source: Path) -> str:
        result = str(target.with_name(f"{source.stem}.o"))
        subprocess.run([*flags, "-c", str(source), "-o", result], check=True)
        return result

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)))
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    unfinished = target.with_suffix(".unfinished.so")
    subprocess.run([str(compiler()), "-shared", *objects, "-o", str(unfinished), *libraries], check=True)
    unfinished.rename(target)


if __name__ == "__main__":
    print(missing() or library())
