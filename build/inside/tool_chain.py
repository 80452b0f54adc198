"""What the image check sees of the CUDA tool chain inside. Imported by image_check.py, in the runtime image, without a GPU.

The stub of the driver is made here, at check time, and is never part of an image: a library that NEEDs libcuda.so.1 could not be
loaded without one, and every function of the stub says that there is no device.
Standard library and what the image holds only.
"""

import base64
import ctypes
import os
import re
import subprocess
from pathlib import Path

SOURCE = """
#include <cuda.h>
#include <cublasLt.h>
#include <cuda/std/utility>
#include <cuda_runtime.h>
#include <curand.h>

__global__ void twice(float *x) { x[threadIdx.x] *= 2; }

extern "C" int forge_probe(float *x) {
    cublasLtHandle_t handle;
    twice<<<1, 32>>>(x);
    return cuInit(0) + cublasLtCreate(&handle);
}
"""
"""Headers, a kernel, and calls that need the link names of the driver, of the runtime and of a library."""

HOST = """
#include <Python.h>
#include <cuda/std/utility>
#include <cuda_runtime_api.h>
int forge_host(void) { return cuda::std::make_pair(1, 2).second; }
"""
"""A unit for the host's compiler alone: it has to be told where CCCL is."""

TEMPORARY = "/tmp"  # noqa: S108 - in memory, in a container of its own

language = None
"""Triton's, once it is imported."""

NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""

_RUNTIME = re.compile(r"^lib(?:cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti)(?:-[0-9a-f]+)?\.so\.(\d+)")
"""Libraries whose soname is numbered with CUDA's major version."""


def needs(site):
    """Every shared object below site-packages: (path -> what it NEEDs, by soname), (path -> its own soname)."""
    paths = sorted(p for p in site.rglob("*.so*") if p.is_file() and not p.is_symlink() and ".so" in p.suffixes)
    found, own = {}, {}
    for start in range(0, len(paths), 200):
        chunk = [*map(str, paths[start : start + 200]), "/dev/null"]  # two at least: only then it names the files
        said = subprocess.run(["readelf", "-dW", *chunk], capture_output=True, text=True, check=False).stdout
        current = None
        for line in said.splitlines():
            if line.startswith("File: "):
                current = line.removeprefix("File: ")
            elif current and (match := re.search(r"\(NEEDED\).*\[(.+)\]", line)):
                found.setdefault(current, []).append(match[1])
            elif current and (match := re.search(r"\(SONAME\).*\[(.+)\]", line)):
                own[current] = match[1]
    return found, own


def stub_driver(needed, folder):
    """Build libcuda.so.1 with every function that some library wants of it; returns how many. It is loaded at once."""
    folder.mkdir(parents=True)
    users = [path for path, names in needed.items() if "libcuda.so.1" in names]
    wanted = {"cuInit", "cuDriverGetVersion", "cuGetErrorString"}
    for path in users:
        said = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
        wanted |= set(re.findall(r"^\s+U (cu[A-Z]\w*)", said, re.MULTILINE))
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(wanted)))
    library = folder / "libcuda.so.1"
    run(["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, source])
    (folder / "libcuda.so").symlink_to(library.name)
    # For this process by loading it, for those it starts by their search path.
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    return len(wanted)


def look(home, architecture, folders, needed, sonames, stub):
    """All there is to see; `architecture` as nvcc spells it, for example `120a`, `folders` are to take run-time kernels."""
    home, work = Path(home), Path(TEMPORARY) / "tool-chain"
    work.mkdir()
    return {
        "on_path": on_path("nvcc"),
        "anywhere": anywhere("nvcc"),
        "home": os.environ.get("CUDA_HOME"),
        "nvcc": version(["nvcc", "--version"], r"V(\d[\d.]+)"),
        "ninja": version(["ninja", "--version"], r"(\d+(?:\.\d+)+)"),
        "gcc": version(["gcc", "-dumpfullversion"], r"(\d+(?:\.\d+)+)"),
        "g++": version(["g++", "-dumpfullversion"], r"(\d+(?:\.\d+)+)"),
        "absent": absent(home),
        "majors": majors(needed, sonames),
        "compiled": attempt(lambda: device(architecture, work, stub)),
        "host": attempt(lambda: host(home, work)),
        "triton": attempt(lambda: triton(architecture)),
        "folders": {name: nearest(Path(folder)) for name, folder in folders.items()},
    }


def run(command):
    """Run a command; its last words are the error when it fails."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise RuntimeError(f"{command[0]} ends with {done.returncode}: {said[:600]}")
    return done.stdout


def version(command, pattern):
    """What a tool says its version is; empty: it cannot be run or says none."""
    try:
        said = run(command)
    except (OSError, RuntimeError):
        return ""
    match = re.search(pattern, said)
    return match[1] if match else ""


def on_path(name):
    """The programs of that name that PATH leads to, the first one first; links resolved, each once."""
    places = [Path(folder, name) for folder in os.environ["PATH"].split(os.pathsep)]
    return list(dict.fromkeys(str(p.resolve()) for p in places if p.is_file() and os.access(p, os.X_OK)))


def anywhere(name):
    """Every real file of that name in the image."""
    left_out = {"/proc", "/sys", "/dev", TEMPORARY}
    found = []
    for folder, folders, files in os.walk("/"):
        folders[:] = [f for f in folders if str(Path(folder, f)) not in left_out]
        if name in files and not Path(folder, name).is_symlink():
            found.append(str(Path(folder, name)))
    return sorted(found)


def absent(home):
    """What a CUDA_HOME should have and does not, and links in it that lead nowhere."""
    wanted = [
        *(f"bin/{name}" for name in ("nvcc", "ptxas", "nvlink", "fatbinary", "cudafe++")),
        *(f"include/{name}" for name in ("cuda.h", "cuda_runtime.h", "crt/host_config.h", "cccl/cuda/std/utility")),
        *(f"lib64/{name}" for name in ("libcudart.so", "libcublas.so", "libcublasLt.so", "libnvrtc.so")),
        *("nvvm/bin/cicc", "nvvm/libdevice/libdevice.10.bc", "lib/libcudart.so"),
    ]
    missing = [name for name in wanted if not (home / name).exists()]
    links = (p for folder in ("bin", "lib64") for p in (home / folder).glob("*") if p.is_symlink())
    return [*missing, *(f"{p.relative_to(home)} -> {p.readlink()}" for p in links if not p.exists())]


def majors(needed, sonames):
    """CUDA's major version -> what needs or is a library of it.

    A library is what it calls itself: CUPTI's file name has a year where its soname has the major.
    """
    found = {}
    for path in needed.keys() | sonames.keys():
        for name in (sonames.get(path, Path(path).name), *needed.get(path, ())):
            if match := _RUNTIME.match(name):
                found.setdefault(match[1], set()).add(path)
    return {major: sorted(paths) for major, paths in found.items()}


def device(architecture, work, stub):
    """A shared object with a kernel, as the JIT makes them: its bytes."""
    source, target = work / "probe.cu", work / "probe.so"
    source.write_text(SOURCE)
    code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    options = [code, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", f"-L{stub}", "-lcuda", "-lcublasLt"]
    run(["nvcc", *options, "-o", target, source])
    return base64.b64encode(target.read_bytes()).decode()


def host(home, work):
    """An object for the host with headers of CUDA, CCCL and Python."""
    source = work / "host.cpp"
    source.write_text(HOST)
    python = run(["python3", "-c", "import sysconfig; print(sysconfig.get_path('include'))"]).strip()
    folders = [f"-I{home}/include", f"-I{home}/include/cccl", f"-I{python}"]
    run(["g++", "-std=c++17", "-c", *folders, "-o", work / "host.o", source])
    return "compiled"


def kernel(x):
    """Doubles 32 numbers; Triton reads this text, and its names in this module."""
    where = x + language.arange(0, 32)
    language.store(where, language.load(where) * 2)


def triton(architecture):
    """A kernel through Triton with the ptxas that it takes for this architecture: its cubin's bytes."""
    os.environ["TRITON_CACHE_DIR"] = f"{TEMPORARY}/triton"
    import triton as compiler
    from triton import knobs
    from triton import language as words
    from triton.backends.compiler import GPUTarget

    global language
    language = words
    source = compiler.compiler.ASTSource(fn=compiler.jit(kernel), signature={"x": "*fp32"}, constexprs={})
    made = compiler.compile(source, target=GPUTarget("cuda", int(architecture.rstrip("af")), 32))
    tool = knobs.nvidia.ptxas_blackwell
    said = version([tool.path, "--version"], r"V(\d[\d.]+)")
    return [tool.path, said, base64.b64encode(made.asm["cubin"]).decode()]


def nearest(folder):
    """The folder, or the nearest one above that is there: path, owner, whether the owner may write."""
    there = next(p for p in (folder, *folder.parents) if p.is_dir())
    status = there.stat()
    return [str(there), status.st_uid, bool(status.st_mode & 0o200)]


def attempt(action):
    """What came of an action, or how it failed."""
    try:
        return {"ok": True, "detail": action()}
    except Exception as error:
        return {"ok": False, "detail": f"{type(error).__name__}: {error}"}
