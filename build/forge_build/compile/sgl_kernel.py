"""The recipe `sgl-kernel`: SGLang's kernel package for the named architectures, by the build that its tree brings along.

What comes out is packed anew: with the platform that the builder really is, the torch that its symbols come from, and the licences
of what is compiled in. docs/sgl-kernel.md says what is left out and why.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

from forge_build.compile import wheel
from forge_build.compile.recipe import DEPENDENCIES, SOURCE, Order, Plan, labelled
from forge_build.manifest import BuiltWheel
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError

DISTRIBUTION = "sgl-kernel"
BUILD = "/forge/build"
"""Where the objects lie in the builder; fixed, as the source is."""
_ABI = "cp310-abi3"
"""The stable ABI that pyproject.toml names (`wheel.py-api`)."""
_WHEEL = "sgl_kernel.whl"
_OPTIONS = {
    # our launcher, where there is one, is given from outside
    "ENABLE_CCACHE": "OFF",
    # nvcc's own threads would compile several architectures at once, unseen by whoever minds the memory
    "SGL_KERNEL_COMPILE_THREADS": "1",
    "SGL_KERNEL_ENABLE_FA3": "OFF",
    "SGL_KERNEL_ENABLE_SPARSE_ATTENTION": "OFF",
    "SGL_KERNEL_ENABLE_MSCCLPP": "OFF",
    "SGL_KERNEL_INSTALL_TRITON_KERNELS": "OFF",
}
_NEEDED = ("repo-cutlass", "repo-flashinfer")
_UNITS = {None: 68, "fp4": 8}
"""Objects and links, by subset."""
_PEAK = {None: 15_500_000_000, "fp4": 14_810_000_000}
"""Resident bytes of the largest unit for sm_120a: fp8_gemm_kernel.cu, nvfp4_scaled_mm_kernels.cu."""


class SglKernel:
    """See the module."""

    sources: tuple[Path, ...] = (Path(__file__), Path(wheel.__file__))
    subsets: tuple[str, ...] = tuple(name for name in _UNITS if name)

    def narrowed(self, spec: BuiltWheel, where: str) -> BuiltWheel:
        """All that is demanded of the whole holds for the part: it is the part with the FP4 instructions."""
        return spec

    def plan(self, order: Order) -> Plan:
        """Compile the tree, or the part that `order.subset` names, for the named architectures."""
        if order.name != DISTRIBUTION:
            raise UsageError(
                f"wheels.{order.name}: the recipe sgl-kernel makes {DISTRIBUTION}",
                hint="SGLang asks for a package of that name",
            )
        if order.spec.modules:
            raise UsageError(
                f"wheels.{order.name}.modules: the recipe sgl-kernel has no modules", hint="leave `modules` away"
            )
        if order.subset not in _UNITS:
            raise UsageError(
                f"sgl-kernel: there is no subset {order.subset!r}", hint=f"known: {', '.join(self.subsets)}"
            )
        if missing := [name for name in _NEEDED if name not in order.tree.dependencies]:
            raise UsageError(
                f"wheels.{order.name}: the source {order.tree.name} comes without {', '.join(missing)}",
                hint=f"sources.{order.tree.name}.git.dependencies in the manifest, then `nox -s lock`",
            )
        architectures = ";".join(sorted(order.spec.architectures))
        version = labelled(order)
        return Plan(
            script=project_root() / "build" / "inside" / "compile_sgl_kernel.py",
            arguments={
                "source": SOURCE,
                "build": BUILD,
                "version": version,
                "options": _OPTIONS
                | {"SGL_KERNEL_CUDA_ARCHS": architectures}
                | ({"SGL_KERNEL_SUBSET": order.subset} if order.subset else {}),
                "dependencies": {name: f"{DEPENDENCIES}/{name}" for name in sorted(order.tree.dependencies)},
            },
            # torch's own CMake files read it, and would otherwise look for a GPU
            environment={"TORCH_CUDA_ARCH_LIST": architectures},
            outputs=(_WHEEL,),
            units=_UNITS[order.subset],
            peak=_PEAK[order.subset],
            version=version,
            tag=f"{_ABI}-{order.platform}",
        )

    def pack(self, order: Order, results: Path, tools: Mapping[str, str], target: Path) -> None:
        """What the tree's build packed, with our metadata. Raises IntegrityError when it has another version or no library."""
        tree, plan = order.tree, self.plan(order)
        members = _members(results / _WHEEL, plan.version)
        architectures = ", ".join(order.spec.architectures)
        told = f"Compiled from {tree.name} {tree.version}, git tree {tree.tree}"
        if tree.patches:
            told += f", changed by the patches of {tree.series} to git tree {tree.patched_tree}"
        what = f"The {order.subset} part of SGLang's kernels, for a look" if order.subset else "SGLang's kernels"
        torch = Version(tools["torch"]).release
        wheel.write_wheel(
            target,
            name=DISTRIBUTION,
            version=plan.version,
            tag=plan.tag,
            members=members,
            fields=[
                ("Summary", f"{what}, compiled for {architectures}"),
                ("License-Expression", "Apache-2.0 AND BSD-3-Clause"),
                ("Classifier", "Private :: Do Not Upload"),
                ("Requires-Python", ">=3.10"),
                # the C++ symbols of torch fit one minor version
                ("Requires-Dist", f"torch=={torch[0]}.{torch[1]}.*"),
            ],
            description=f"{told}.",
            licenses=_licenses(order),
            epoch=order.manifest.epoch,
        )


def _members(built: Path, version: str) -> dict[str, bytes]:
    """Files of the wheel that came out of the builder, without its metadata."""
    info = f"sgl_kernel-{version}.dist-info/"
    members = {}
    with zipfile.ZipFile(built) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if f"{info}METADATA" not in names:
            raise IntegrityError(f"{built.name}: the build packed no version {version}", details=tuple(names[-3:]))
        members = {name: archive.read(name) for name in names if not name.startswith(info)}
    if not any(name.startswith("sgl_kernel/sm100/common_ops.") for name in members):
        raise IntegrityError(f"{built.name}: the build packed no sgl_kernel/sm100/common_ops")
    return members


def _licenses(order: Order) -> dict[str, bytes]:
    """Licences of the source and of each dependency whose templates are compiled in."""
    places = {"": order.tree.path} | {f"{name}/": item.path for name, item in sorted(order.tree.dependencies.items())}
    return {
        f"{prefix}{path.name}": path.read_bytes()
        for prefix, folder in places.items()
        for pattern in ("LICENSE*", "NOTICE*", "THIRDPARTYNOTICES*")
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }
