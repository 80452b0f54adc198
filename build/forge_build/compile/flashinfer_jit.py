"""The recipe `flashinfer-jit`: FlashInfer's JIT modules compiled ahead of time, where its own loader looks for them.

FlashInfer asks `flashinfer_jit_cache.get_jit_cache_dir()` for a folder of MODULE/MODULE.so, and refuses a package whose
`__version__` does not begin with its own (flashinfer/jit/env.py of 0.6.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

from forge_build.compile import flashinfer_modules, wheel
from forge_build.compile.flashinfer_modules import modules
from forge_build.compile.recipe import SOURCE, Order, Plan, labelled
from forge_build.manifest import BuiltWheel
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError

DISTRIBUTION = "flashinfer-jit-cache"
_PACKAGE = "flashinfer_jit_cache"
_INIT = '''"""FlashInfer modules compiled ahead of time for {architectures}; FlashInfer's loader finds them here."""

from pathlib import Path

__version__ = "{version}"


def get_jit_cache_dir() -> str:
    """Folder that holds MODULE/MODULE.so."""
    return str(Path(__file__).parent / "jit_cache")
'''


class FlashInferJit:
    """See the module."""

    sources: tuple[Path, ...] = (Path(__file__), Path(flashinfer_modules.__file__), Path(wheel.__file__))
    subsets: tuple[str, ...] = ("fp4",)

    def narrowed(self, spec: BuiltWheel, where: str) -> BuiltWheel:
        """Dense FP4, quantisation and GEMM; what the check demands of other modules is not demanded then.

        Raises UsageError when none of the wheel's modules belongs to it.
        """
        kept = tuple(name for name in modules(spec, where) if name.startswith("fp4_"))
        if not kept:
            raise UsageError(f"{where}: none of its modules belongs to the subset 'fp4'", hint="leave --subset away")
        demanded = tuple(
            demand for demand in spec.check.instructions if any(fnmatch(f"/{name}.so", demand.objects) for name in kept)
        )
        check = spec.check.model_copy(update={"instructions": demanded})
        return spec.model_copy(update={"serves": None, "modules": kept, "check": check})

    def plan(self, order: Order) -> Plan:
        """Generate and compile the modules for the named architectures."""
        if order.name != DISTRIBUTION:
            raise UsageError(
                f"wheels.{order.name}: the recipe flashinfer-jit makes {DISTRIBUTION}",
                hint="FlashInfer's loader looks for a package of that name, so the wheel must have it",
            )
        known = modules(order.spec, f"wheels.{order.name}")
        return Plan(
            script=project_root() / "build" / "inside" / "compile_flashinfer.py",
            arguments={"modules": {name: module.call for name, module in known.items()}},
            environment={
                "PYTHONPATH": SOURCE,
                "FLASHINFER_CUDA_ARCH_LIST": " ".join(sorted(order.spec.architectures)),
                "FLASHINFER_WORKSPACE_BASE": "/forge/workspace",
            },
            outputs=tuple(f"{name}/{name}.so" for name in known),
            units=sum(module.units for module in known.values()),
            peak=max(module.peak for module in known.values()),
            version=labelled(order),
            # its loader opens the modules, no Python ABI is used
            tag=f"py3-none-{order.platform}",
        )

    def pack(self, order: Order, results: Path, tools: Mapping[str, str], target: Path) -> None:
        """The package, the modules, and FlashInfer's licence."""
        tree, architectures, plan = order.tree, ", ".join(order.spec.architectures), self.plan(order)
        known = modules(order.spec, f"wheels.{order.name}")
        what = (
            "FlashInfer modules"
            if order.subset is None
            else f"The {order.subset} part of FlashInfer's modules, for a look,"
        )
        members = {f"{_PACKAGE}/__init__.py": _INIT.format(version=plan.version, architectures=architectures).encode()}
        for name in plan.outputs:
            members[f"{_PACKAGE}/jit_cache/{name}"] = (results / name).read_bytes()
        libraries = ["nvidia-cuda-runtime", *(["nvidia-cuda-nvrtc"] if "fused_moe_120" in known else [])]
        if missing := [name for name in libraries if name not in tools]:
            raise IntegrityError(f"the builder linked without {', '.join(missing)}")
        needed = {name: (tools[name], int(tools[name].split(".", 1)[0]) + 1) for name in libraries}
        told = f"Compiled from {tree.name} {tree.version}, git tree {tree.tree}"
        if tree.patches:
            told += f", changed by the patches of {tree.series} to git tree {tree.patched_tree}"
        wheel.write_wheel(
            target,
            name=DISTRIBUTION,
            version=plan.version,
            tag=plan.tag,
            members=members,
            fields=[
                ("Summary", f"{what} compiled for {architectures}"),
                ("License-Expression", "Apache-2.0"),
                ("Classifier", "Private :: Do Not Upload"),
                ("Requires-Dist", f"flashinfer-python=={tree.version}"),
                # what the objects are linked with, and what their undefined symbols come from
                *(("Requires-Dist", f"{name}<{major},>={least}") for name, (least, major) in needed.items()),
                ("Requires-Dist", f"apache-tvm-ffi>={tools['apache-tvm-ffi']}"),
            ],
            description="\n".join([f"{told}.", "", *(f"- {name}" for name in known)]),
            licenses=_licenses(tree.path),
            epoch=order.manifest.epoch,
        )


def _licenses(tree: Path) -> dict[str, bytes]:
    """Licence files of the source's own metadata, which its compiled form must carry on."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for folder in sorted(tree.glob("*.dist-info/licenses"))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
