"""Compiles sgl-kernel and packs it as its own build does. Runs in the builder container, where nothing reaches a network.

    compile_sgl_kernel.py PLAN OUT

PLAN is JSON: `source` is the patched tree, `build` a new folder for objects, `version` what the wheel calls itself, `options` are
CMake's cache variables, `dependencies` maps CMake's name of each repository that the tree would fetch to the folder that stands
for it, `scheduler` says what memory and cores there are. OUT receives `sgl_kernel.whl` and `tools.json`. Ends with 1 when a unit
does not compile, with 3 when the source is not what the plan expects.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

from scheduling import Scheduler

LINKED = "cublas cublasLt cudart cufft curand cusolver cusparse nvrtc"
"""Libraries that CMake's modules for CUDA and torch look for by their name without a version."""
VERSIONS = {
    "pyproject.toml": r'(?m)^version = "[^"]*"$',
    "python/sgl_kernel/version.py": r'(?m)^__version__ = "[^"]*"$',
}


def stop(message):
    """Say why plan and source do not fit, and end with 3."""
    print(f"forge: error: {message}", flush=True)
    sys.exit(3)


def cuda_home():
    """The one tool chain that the nvidia-* wheels installed."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc"))
    if len(found) != 1:
        stop(f"exactly one CUDA tool chain from wheels is needed, there are {len(found)}: {', '.join(map(str, found))}")
    return found[0].parent.parent


def complete(home):
    """Add what a linker wants and the wheels lack: `lib64`, libraries without a version in their name, a driver to link with."""
    link(home / "lib64", "lib")
    for name in LINKED.split():
        # the wheel's one file of that library: its version is the toolkit's or its own
        found = sorted((home / "lib").glob(f"lib{name}.so.*"))
        if len(found) != 1:
            stop(f"exactly one lib{name}.so.* is needed in {home / 'lib'}, there are {len(found)}")
        link(home / "lib" / f"lib{name}.so", found[0].name)
    stubs = home / "lib" / "stubs"
    stubs.mkdir(exist_ok=True)
    # Undefined symbols of a shared object may stay so: the real driver has them. What counts is the name it is asked for by.
    command = ["c++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(stubs / "libcuda.so.1")], check=True)
    link(stubs / "libcuda.so", "libcuda.so.1")


def link(path, target):
    """A relative link, if it is not there."""
    if not path.is_symlink():
        path.symlink_to(target)


def name_version(source, wanted):
    """Write the version where the build and the package say it."""
    for name, pattern in VERSIONS.items():
        path = source / name
        text = path.read_text(encoding="utf-8")
        changed, count = re.subn(pattern, lambda found: found[0].partition('"')[0] + f'"{wanted}"', text)
        if count != 1:
            stop(f"{name} states its version {count} times")
        path.write_text(changed, encoding="utf-8")


def tools(home):
    """Versions of what compiles and of what the objects need at run time."""

    def said(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return {
        "nvcc": re.search(r"V(\d[\d.]+)", said(home / "bin" / "nvcc", "--version"))[1],
        "c++": said("c++", "-dumpfullversion"),
        "ld": said("ld", "--version").splitlines()[0].rpartition(" ")[2],
        "cmake": said("cmake", "--version").split()[2],
        "ninja": said("ninja", "--version"),
        "scikit-build-core": version("scikit-build-core"),
        "nvidia-cuda-runtime": version("nvidia-cuda-runtime"),
        "torch": version("torch"),
    }


def definitions(plan, home):
    """Everything CMake is told."""
    found = {
        "CMAKE_CUDA_COMPILER": str(home / "bin" / "nvcc"),
        "CUDAToolkit_ROOT": str(home),
        "CMAKE_PREFIX_PATH": str(Path(sysconfig.get_path("purelib")) / "torch"),
        # Without a network a repository that is not named here must be an error, not a wait.
        "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
    }
    for name, folder in plan["dependencies"].items():
        if not Path(folder).is_dir():
            stop(f"the dependency {name} is not at {folder}")
        found[f"FETCHCONTENT_SOURCE_DIR_{name.upper()}"] = folder
    return found | plan["options"]


def main(plan_file, out):
    """Complete the tool chain, name the version, build the wheel."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    source, out = Path(plan["source"]), Path(out).absolute()
    home = cuda_home()
    complete(home)
    name_version(source, plan["version"])
    os.environ["CUDA_HOME"] = str(home)
    os.environ["PATH"] = os.pathsep.join([str(home / "bin"), sysconfig.get_path("scripts"), os.environ["PATH"]])
    os.environ["CMAKE_GENERATOR"] = "Ninja"
    versions = tools(home)
    print(f"forge: {', '.join(f'{name} {found}' for name, found in versions.items())}", flush=True)
    scheduler = Scheduler(plan["scheduler"], versions)
    os.environ["CMAKE_BUILD_PARALLEL_LEVEL"] = str(scheduler.window)
    launched = dict(option.removeprefix("-D").split("=", 1) for option in scheduler.cmake_options)
    defined = definitions(plan, home) | launched
    settings = {f"cmake.define.{name}": value for name, value in defined.items()}
    folder = out / "wheel"
    folder.mkdir(parents=True)
    os.chdir(source)
    # The build's own backend, called as pip calls it; pip would indent what ninja says.
    from scikit_build_core.build import build_wheel

    try:
        with scheduler:
            os.environ.update(scheduler.environment)
            built = build_wheel(str(folder), settings | {"build-dir": plan["build"]})
    except subprocess.CalledProcessError as error:
        print(f"forge: {error}", flush=True)
        return 1
    shutil.move(folder / built, out / "sgl_kernel.whl")
    folder.rmdir()
    (out / "tools.json").write_text(json.dumps(versions, sort_keys=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
