"""The stand-ins, each in a Python of its own: they hook into the import system of the process they are in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge_core.cli import project_root

STAND_INS = project_root() / "build" / "inside" / "stand_ins"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site folder as in the image: all stand-ins side by side."""
    for stand_in in STAND_INS.iterdir():
        shutil.copytree(stand_in, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def python(site: Path, code: str) -> str:
    start = f"import site; site.addsitedir({str(site)!r})\n"
    done = subprocess.run([sys.executable, "-B", "-c", start + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_resolve_and_raise_when_called(site: Path) -> None:
    said = python(
        site,
        """
import sgl_kernel, importlib.util
from sgl_kernel import silu_and_mul, moe_align
from sgl_kernel.flash_attn import flash_attn_with_kvcache
from sgl_kernel.deep.er import thing
import sgl_kernel.elementwise as elementwise
assert importlib.util.find_spec("sgl_kernel") is not None
assert elementwise.rope.default.__name__ == "sgl_kernel.elementwise.rope.default"
for kernel in (silu_and_mul, flash_attn_with_kvcache, thing, moe_align.default, elementwise.rope):
    try:
        kernel(1, x=2)
    except RuntimeError as error:
        print(error)
""",
    )
    lines = said.splitlines()
    assert len(lines) == 5
    assert lines[1] == (
        "sgl_kernel.flash_attn.flash_attn_with_kvcache needs a CUDA device; this image holds a stand-in for sgl_kernel"
    )


def test_a_kernel_is_not_taken_for_what_it_is_not(site: Path) -> None:
    """Names with underscores on both sides are asked for by the language itself."""
    said = python(
        site,
        """
import sgl_kernel
print(hasattr(sgl_kernel, "__path_of_nothing__"), hasattr(sgl_kernel.x, "__len__"), sgl_kernel.__version__)
""",
    )
    assert said == "False False 0.0.0"


def test_torchvision_finds_its_operators_declared_and_torch_is_not_imported_before(site: Path) -> None:
    (site / "torch.py").write_text(
        """
class library:
    class Library:
        def __init__(self, namespace, kind): self.namespace = namespace
        def define(self, text): print("declared", self.namespace, text.split("(")[0])
"""
    )
    (site / "torchvision.py").write_text("print('torchvision')\n")
    said = python(
        site,
        "import sys\nprint('torch' in sys.modules)\nimport torchvision\nsys.modules.pop('torchvision')\nimport torchvision",
    )
    assert said.splitlines() == ["False", "declared torchvision nms", "declared torchvision qnms", *["torchvision"] * 2]


def test_the_cuda_runtime_is_loaded_before_flashinfer_looks_for_it(site: Path) -> None:
    folder = site / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    done = subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcudart.so.13")],
        input="int cudart_stand_in(void) { return 13; }\n",
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (site / "flashinfer").mkdir()
    (site / "flashinfer" / "__init__.py").write_text("")
    (site / "flashinfer" / "comm.py").write_text(
        "print(any('libcudart' in line for line in open('/proc/self/maps')))\n"
    )
    said = python(
        site,
        f"""
import sysconfig
sysconfig.get_path = lambda name: {str(site)!r}
import flashinfer
print(any("libcudart" in line for line in open("/proc/self/maps")))
import flashinfer.comm
""",
    )
    assert said.splitlines() == ["False", "True"]


def test_a_start_of_python_without_any_of_them_stays_quick(site: Path) -> None:
    said = python(
        site,
        "import sys\nprint([m for m in ('torch', 'torchvision', 'flashinfer', 'ctypes.util') if m in sys.modules])",
    )
    assert said == "[]"
