"""Compiles FlashInfer's JIT modules ahead of time. Runs in the builder container, where the patched source lies in /forge/src.

    compile_flashinfer.py PLAN OUT

PLAN is JSON: `modules` maps each module's name to the function that generates it (`package.module:function`, and after a space
its arguments as JSON), `scheduler` says what memory and cores there are. OUT receives MODULE/MODULE.so and `tools.json`. What else
FlashInfer reads from the environment is set by the caller. Ends with 1 when a unit does not compile, with 3 when the source is not
what the plan expects.
"""

import importlib
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


def links(home, folder):
    """Link names that the wheels lack: nvrtc's plain one, and a driver's library to link with, for modules that call either."""
    folder.mkdir()
    for found in home.glob("lib/libnvrtc.so.*"):
        (folder / "libnvrtc.so").symlink_to(found)
    # every name of the header, types too: only functions are ever looked for
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", (home / "include" / "cuda.h").read_text(encoding="utf-8"))))
    source = folder / "cuda.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
    driver = str(folder / "libcuda.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", driver, str(source)], check=True)
    return folder


def prepare(home, scheduler, folder):
    """What FlashInfer's build files are made with."""
    os.environ["CUDA_HOME"] = str(home)
    os.environ["MAX_JOBS"] = str(scheduler.window)
    os.environ["CXX"] = scheduler.launched("c++")
    os.environ["FLASHINFER_NVCC"] = scheduler.launched(home / "bin" / "nvcc")
    # From flashinfer_jit_cache/jit_cache/MODULE/ to the libraries of the nvidia-* wheels beside that package.
    # `-Xlinker` is understood by c++ and nvcc alike. FlashInfer splits as a shell does, ninja takes one $ away, the inner
    # quotes are for ninja's shell.
    os.environ["FLASHINFER_EXTRA_LDFLAGS"] = (
        f"""-Xlinker -rpath -Xlinker "'$$ORIGIN/../../../nvidia/{home.name}/lib'" """
        f"-L{folder} -Xlinker --as-needed -lcuda -Xlinker --no-as-needed"
    )


def tools(home):
    """Versions of what compiles and of what the objects need at run time."""

    def said(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    found = {
        "nvcc": re.search(r"V(\d[\d.]+)", said(home / "bin" / "nvcc", "--version"))[1],
        "c++": said("c++", "-dumpfullversion"),
        "ld": said("ld", "--version").splitlines()[0].rpartition(" ")[2],
        "ninja": said("ninja", "--version"),
        "nvidia-cuda-runtime": version("nvidia-cuda-runtime"),
        "apache-tvm-ffi": version("apache-tvm-ffi"),
    }
    if list(home.glob("lib/libnvrtc.so.*")):
        found["nvidia-cuda-nvrtc"] = version("nvidia-cuda-nvrtc")
    return found


def call(text):
    """What `package.module:function JSON` gives; an argument `torch.X` stands for that type."""
    place, _, given = text.partition(" ")
    module, _, function = place.partition(":")
    arguments = json.loads(given or "{}")
    for key, value in arguments.items():
        if isinstance(value, str) and value.startswith("torch."):
            arguments[key] = getattr(importlib.import_module("torch"), value.removeprefix("torch."))
    return getattr(importlib.import_module(module), function)(**arguments)


def generate(name, where):
    """The JitSpec of a module, from its generator."""
    try:
        spec = call(where)
    except (ImportError, AttributeError, TypeError) as error:
        stop(f"{where}, which should generate {name}: {error}")
    if spec.name != name:
        stop(f"{where} generates {spec.name!r}, not {name!r}")
    # It lists the files that it generated in the order of a folder, which is another on each file system; linked in that order.
    generated = iter(sorted(path for path in spec.sources if path.name.endswith(".generated.cu")))
    spec.sources = [next(generated) if path.name.endswith(".generated.cu") else path for path in spec.sources]
    print(f"forge: generated {name}, {len(spec.sources)} units", flush=True)
    return spec


def main(plan_file, out):
    """Generate, compile, collect."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    home = cuda_home()
    versions = tools(home)
    print(f"forge: {', '.join(f'{name} {found}' for name, found in versions.items())}", flush=True)
    scheduler = Scheduler(plan["scheduler"], versions)
    prepare(home, scheduler, links(home, Path("/forge/links")))

    from flashinfer.jit.core import build_jit_specs

    specs = [generate(name, where) for name, where in sorted(plan["modules"].items())]
    try:
        with scheduler:
            os.environ.update(scheduler.environment)
            # one ninja over all modules, so that its [N/M] counts all of them
            build_jit_specs(specs, verbose=True, skip_prebuilt=False)
    except RuntimeError as error:
        print(f"forge: {str(error).splitlines()[0]}", flush=True)
        return 1
    for spec in specs:
        target = Path(out) / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True)
        shutil.copyfile(spec.jit_library_path, target)
    (Path(out) / "tools.json").write_text(json.dumps(versions, sort_keys=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
