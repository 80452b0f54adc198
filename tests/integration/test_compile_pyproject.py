"""The recipe `pyproject`: the real script and the real backend on a small tree shaped like SGLang's."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from installer.sources import WheelFile

from forge_build import compile as stage
from forge_build import manifest as manifests
from forge_build import wheel_check
from forge_build.compile.recipe import Order
from forge_build.patch import PatchedTree
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError

RECIPE = stage.RECIPES["pyproject"]
VERSION = "0.5.9+git6ffc74efd"
FILES = {
    "pyproject.toml": """
[build-system]
requires = ["setuptools>=61.0", "setuptools-scm>=8.0"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang"
dynamic = ["version"]
requires-python = ">=3.10"
dependencies = ["torch==2.9.1", "sgl-kernel==0.3.21"]
[project.scripts]
sglang = "sglang.main:main"
[tool.setuptools.packages.find]
exclude = ["tests*"]
[tool.setuptools_scm]
root = ".."
version_file = "sglang/_version.py"
git_describe_command = ["false"]
""",
    "sglang/__init__.py": "",
    "sglang/main.py": "def main(): pass\n",
    "sglang/data/config.json": "{}\n",
    "sglang/csrc/kernel.cuh": "// compiled at run time\n",
    "tests/test_x.py": "",
}


def order(tmp_path: Path, **changes: Any) -> Order:
    source = tmp_path / "source"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    manifest = manifests.load("sm120")
    spec = manifest.wheels["sglang"].model_copy(update=changes.pop("spec", {}))
    tree = PatchedTree("sglang", changes.pop("version", VERSION), source, "1" * 40, "1" * 40, None, ())
    return Order(changes.pop("name", "sglang"), spec, manifest, tree)


def run(wanted: Order, out: Path) -> subprocess.CompletedProcess[str]:
    plan = RECIPE.plan(wanted)
    out.mkdir()
    path = out / "plan.json"
    path.write_text(json.dumps({**plan.arguments, "source": str(wanted.tree.path)}))
    return subprocess.run(
        [sys.executable, str(plan.script), str(path), str(out)], capture_output=True, text=True, check=False
    )


def test_a_tree_becomes_the_wheel_that_its_release_would_be(tmp_path: Path) -> None:
    wanted = order(tmp_path)
    done = run(wanted, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    tools = json.loads((tmp_path / "out" / "tools.json").read_text())
    assert tools.keys() == {"pip", "setuptools", "setuptools-scm"}
    path = tmp_path / "sglang-0.5.9+git6ffc74efd-py3-none-any.whl"
    RECIPE.pack(wanted, tmp_path / "out", tools, path)
    with WheelFile.open(path) as made:
        made.validate_record()
        metadata = HeaderParser().parsestr(made.read_dist_info("METADATA"))
        assert (metadata["Name"], metadata["Version"]) == ("sglang", VERSION)
        assert metadata.get_all("Requires-Dist") == ["torch==2.9.1", "sgl-kernel==0.3.21"]
        assert "Root-Is-Purelib: true" in made.read_dist_info("WHEEL")
        assert "sglang = sglang.main:main" in made.read_dist_info("entry_points.txt")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        assert VERSION in archive.read("sglang/_version.py").decode()
    # what git would have told setuptools-scm is there, and what is outside the package is not
    assert {"sglang/main.py", "sglang/data/config.json", "sglang/csrc/kernel.cuh"} <= names
    assert not [name for name in names if name.startswith("tests/")]
    report = wheel_check.check(path, wanted.spec.check, epoch=wanted.manifest.epoch)
    wheel_check.raise_for(report)
    assert report.objects == ()


def test_two_builds_of_a_tree_have_the_same_bytes(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        wanted = order(tmp_path / name)
        assert run(wanted, tmp_path / name / "out").returncode == 0
        RECIPE.pack(wanted, tmp_path / name / "out", {}, tmp_path / name / "wheel")
        made.append((tmp_path / name / "wheel").read_bytes())
    assert made[0] == made[1]


def test_a_tree_that_builds_another_distribution_is_refused(tmp_path: Path) -> None:
    wanted = order(tmp_path, name="sglang-router")
    # the script itself does not care what comes out
    assert run(order(tmp_path), tmp_path / "out").returncode == 0
    with pytest.raises(IntegrityError, match=r"packed no sglang_router-0\.5\.9") as caught:
        RECIPE.pack(wanted, tmp_path / "out", {}, tmp_path / "wheel")
    assert caught.value.details == (f"sglang-{VERSION}.dist-info/METADATA",)


def test_a_backend_that_fails_ends_with_1_and_a_missing_one_with_3(tmp_path: Path) -> None:
    wanted = order(tmp_path / "one")
    toml = wanted.tree.path / "pyproject.toml"
    toml.write_text(toml.read_text().replace("sglang.main:main", "no entry point"))
    assert run(wanted, tmp_path / "one" / "out").returncode == 1
    wanted = order(tmp_path / "two")
    toml = wanted.tree.path / "pyproject.toml"
    toml.write_text(toml.read_text().replace('"setuptools-scm>=8.0"', '"not-in-the-builder"'))
    done = run(wanted, tmp_path / "two" / "out")
    assert done.returncode == 3
    assert "asks for not-in-the-builder, which the builder does not have" in done.stdout


def test_what_means_nothing_to_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"wheels\.sglang: the recipe pyproject compiles nothing"):
        RECIPE.plan(order(tmp_path, spec={"modules": ("norm",)}))


def test_every_tool_it_needs_is_in_the_builder() -> None:
    named = {text.partition(">")[0] for text in manifests.load("sm120").environments["builder"].requires}
    assert {"pip", "setuptools", "setuptools-scm", "wheel"} <= named
    assert (project_root() / "build" / "inside" / "build_pyproject.py").is_file()
