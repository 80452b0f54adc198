"""The real CUDA compiler from the rehearsal's locked wheels, and what tests make with it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import yaml
from uv import find_uv_bin
from wheel_factory import make_wheel, shared_object

from forge_core.process import run

LOCK = Path(__file__).parents[1] / "build" / "manifests" / "rehearsal.lock.yaml"
TOOLS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
CLEAN = """
__global__ void fill(int *p) { *p = 120; }
extern "C" int go(int *p) { fill<<<1, 1>>>(p); return (int)cudaGetLastError(); }
"""
SM120 = ("-gencode", "arch=compute_120a,code=sm_120a")
SM90 = ("-gencode", "arch=compute_90,code=sm_90")


@dataclass(frozen=True)
class Toolchain:
    """nvcc 13.0 below `root`; what it makes goes to `folder`, units once per source and options."""

    root: Path
    folder: Path

    @classmethod
    def installed(cls, folder: Path) -> Self:
        """Install the lock's own wheels by hash; nothing of the machine is taken."""
        locked = yaml.safe_load(LOCK.read_text())["wheels"]["builder"]
        lines = [f"{w['name']}=={w['version']} --hash=sha256:{w['sha256']}" for w in locked if w["name"] in TOOLS]
        assert len(lines) == len(TOOLS)
        (folder / "requirements.txt").write_text("\n".join(lines) + "\n")
        argv = [find_uv_bin(), "pip", "install", "--require-hashes", "--no-deps", "--target", folder / "site"]
        run([*argv, "-r", folder / "requirements.txt"], env=dict(os.environ), timeout=600)
        return cls(folder / "site" / "nvidia" / "cu13", folder)

    @property
    def lib(self) -> Path:
        """Folder of the CUDA runtime."""
        return self.root / "lib"

    def unit(self, name: str, source: str, *options: str) -> Path:
        """Compile one source file to an object file."""
        key = f"{name}-{abs(hash((source, options)))}"
        made = self.folder / f"{key}.o"
        if not made.exists():
            (self.folder / f"{key}.cu").write_text(source)
            nvcc = [self.root / "bin" / "nvcc", "-c", "-O2", "-Xcompiler", "-fPIC", *options]
            run([*nvcc, self.folder / f"{key}.cu", "-o", made], timeout=300)
        return made

    def shared(self, name: str, *parts: str | Path, runtime: Path | None = None) -> Path:
        """Link units (and options) to a shared object against the runtime, or another one."""
        target = self.folder / "linked" / name
        target.parent.mkdir(exist_ok=True)
        library = runtime or self.lib / "libcudart.so.13"
        # by its path through the linker: nvcc does not know the ending of a versioned library
        nvcc = [self.root / "bin" / "nvcc", "-shared", "-cudart", "none"]
        run([*nvcc, *parts, "-Xlinker", library, "-o", target], timeout=300)
        return target

    def renamed_runtime(self, folder: Path, soname: str) -> Path:
        """A runtime of another major version: its soname and the symbols that small kernels ask for, with its version."""
        script = folder / "versions"
        names = ("cudaGetLastError", "cudaLaunchKernel", "__cudaRegisterFatBinary", "__cudaRegisterFatBinaryEnd")
        names += ("__cudaRegisterFunction", "__cudaUnregisterFatBinary", "__cudaPopCallConfiguration")
        names += ("__cudaPushCallConfiguration", "__cudaGetKernel", "__cudaLaunchKernel", "__cudaInitModule")
        script.write_text(f"{soname} {{ global: {'; '.join(names)}; local: *; }};")
        source = "\n".join(f"int {name}(void) {{ return 0; }}" for name in names)
        return shared_object(folder, soname, source, f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}")

    def runtime_wheel(self, folder: Path) -> Path:
        """A wheel that holds the runtime, as NVIDIA's does."""
        library = folder / "libcudart.so.13"
        shutil.copyfile(self.lib / "libcudart.so.13", library)
        members: dict[str, bytes | str | Path] = {"nvidia/cu13/lib/libcudart.so.13": library}
        return make_wheel(folder, members, name="nvidia_cuda_runtime", version="13.0.96")
