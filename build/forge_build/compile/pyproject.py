"""The recipe `pyproject`: a package without compiled code, by the backend that its own pyproject.toml names.

A release is built where git tells setuptools-scm the version and which data files belong to a package. Here the manifest tells
the version, and every file of the tree below a package of the wheel belongs to it: the tree holds what git holds and no more.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from packaging.utils import canonicalize_name

from forge_build.compile import wheel
from forge_build.compile.recipe import SOURCE, Order, Plan
from forge_build.manifest import BuiltWheel
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError

_WHEEL = "built.whl"
_TAG = "py3-none-any"
_OURS = ("METADATA", "WHEEL", "RECORD")


class Pyproject:
    """See the module."""

    sources: tuple[Path, ...] = (Path(__file__), Path(wheel.__file__))
    subsets: tuple[str, ...] = ()

    def narrowed(self, spec: BuiltWheel, where: str) -> BuiltWheel:
        """There are no subsets."""
        return spec

    def plan(self, order: Order) -> Plan:
        """Build the tree under the version that the manifest gives it."""
        if given := [name for name in ("architectures", "modules", "serves") if getattr(order.spec, name)]:
            raise UsageError(
                f"wheels.{order.name}: the recipe pyproject compiles nothing, so {given[0]} means nothing to it",
                hint=f"leave {', '.join(f'`{name}`' for name in given)} away",
            )
        # setuptools-scm's word for it, per distribution
        variable = f"SETUPTOOLS_SCM_PRETEND_VERSION_FOR_{canonicalize_name(order.name).replace('-', '_').upper()}"
        return Plan(
            script=project_root() / "build" / "inside" / "build_pyproject.py",
            arguments={"source": SOURCE, "environment": {variable: order.tree.version}},
            environment={},
            outputs=(_WHEEL,),
            units=1,
            peak=500_000_000,
            version=order.tree.version,
            tag=_TAG,
        )

    def pack(self, order: Order, results: Path, tools: Mapping[str, str], target: Path) -> None:
        """The built wheel with all of the tree's files, packed anew so that equal trees give equal bytes.

        Raises IntegrityError when it has another name, version or tag than the manifest's.
        """
        info = f"{order.name.replace('-', '_')}-{order.tree.version}.dist-info"
        with zipfile.ZipFile(results / _WHEEL) as archive:
            found = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        if f"{info}/METADATA" not in found:
            raise IntegrityError(
                f"{order.name}: its build packed no {info}",
                details=tuple(sorted(name for name in found if name.endswith("/METADATA"))),
            )
        if f"Tag: {_TAG}\n" not in found[f"{info}/WHEEL"].decode():
            raise IntegrityError(f"{order.name}: its build packed no {_TAG}: it compiles something")
        members = {path: data for path, data in found.items() if not path.startswith(f"{info}/")}
        for package in sorted({path.split("/", 1)[0] for path in members if "/" in path}):
            for path in sorted((order.tree.path / package).rglob("*")):
                if path.is_file():
                    members.setdefault(path.relative_to(order.tree.path).as_posix(), path.read_bytes())
        metadata = {
            path.removeprefix(f"{info}/"): data
            for path, data in found.items()
            if path.startswith(f"{info}/") and path.removeprefix(f"{info}/") not in _OURS
        }
        wheel.write_members(
            target,
            info=info,
            members=members,
            metadata={**metadata, "METADATA": found[f"{info}/METADATA"]},
            tag=_TAG,
            epoch=order.manifest.epoch,
        )
