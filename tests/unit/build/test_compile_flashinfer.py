"""The script that compiles FlashInfer's modules, outside its container: what it calls, and what it links with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from forge_core.cli import project_root

INSIDE = project_root() / "build" / "inside"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(INSIDE))
    spec = importlib.util.spec_from_file_location(f"inside_{name}", INSIDE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand-ins for FlashInfer's generators and for torch's types."""
    made = SimpleNamespace(sources=[])
    torch, jit = ModuleType("torch"), ModuleType("jit")
    torch.bfloat16 = object()  # type: ignore[attr-defined]
    jit.plain = lambda: SimpleNamespace(name="plain", sources=made.sources)  # type: ignore[attr-defined]
    jit.typed = lambda **words: words  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "jit", jit)
    made.bfloat16 = torch.bfloat16
    return made


@pytest.mark.parametrize("name", ["compile_flashinfer", "image_check"])
def test_a_generator_is_called_with_torchs_types(
    name: str, generators: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = script(name, monkeypatch)
    found = inside.call('jit:typed {"backend": "fa2", "dtype": "torch.bfloat16", "head_dim": 64, "swa": false}')
    assert found == {"backend": "fa2", "dtype": generators.bfloat16, "head_dim": 64, "swa": False}
    assert inside.call("jit:plain").name == "plain"


@pytest.mark.parametrize(
    ("name", "place", "said"),
    [
        ("other", "jit:plain", "jit:plain generates 'plain', not 'other'"),
        ("plain", "jit:gone", "jit:gone, which should generate plain: "),
        ("plain", 'jit:plain {"x": 1}', "unexpected keyword argument 'x'"),
        ("plain", 'jit:typed {"x": "torch.float4"}', "has no attribute 'float4'"),
    ],
)
@pytest.mark.usefixtures("generators")
def test_a_plan_that_does_not_fit_the_source_ends_with_3(
    name: str, place: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script("compile_flashinfer", monkeypatch).generate(name, place)
    assert caught.value.code == 3
    assert said in capsys.readouterr().out


def test_generated_files_are_linked_in_the_order_of_their_names(
    generators: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    generators.sources += map(Path, ["z.cu", "g/b.generated.cu", "g/c.generated.cu", "g/a.generated.cu", "y.cpp"])
    found = script("compile_flashinfer", monkeypatch).generate("plain", "jit:plain").sources
    assert [path.name for path in found] == ["z.cu", "a.generated.cu", "b.generated.cu", "c.generated.cu", "y.cpp"]


def needed(source: str, folder: Path, name: str) -> list[str]:
    """What a shared object of that C source NEEDs beyond the C library, linked as FlashInfer's modules are."""
    (folder / f"{name}.c").write_text(source)
    target = folder / f"{name}.so"
    words = ["-L", str(folder / "links"), "-Xlinker", "--as-needed", "-lcuda", "-Xlinker", "--no-as-needed"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", target, folder / f"{name}.c", *words], check=True)
    with target.open("rb") as stream:
        tags = ELFFile(stream).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")
        return [tag.needed for tag in tags if not tag.needed.startswith("libc.")]


def test_only_a_module_that_calls_the_driver_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cu13"
    for path in ("include/cuda.h", "lib/libnvrtc.so.13", "lib/libnvrtc-builtins.so.13.0"):
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).touch()
    (home / "include" / "cuda.h").write_text(
        "typedef struct CUlib_st *CUlibrary;\n#define cuMemAlloc cuMemAlloc_v2\n"
        "CUresult CUDAAPI cuMemAlloc(CUdeviceptr *p, size_t n);\nCUresult CUDAAPI cuLibraryUnload(CUlibrary library);\n"
    )
    links = script("compile_flashinfer", monkeypatch).links(home, tmp_path / "links")
    assert (links / "libnvrtc.so").resolve() == home / "lib" / "libnvrtc.so.13"
    assert needed("int plain(void) { return 1; }", tmp_path, "plain") == []
    for name in ("cuLibraryUnload", "cuMemAlloc_v2"):
        source = f"extern int {name}(void); int call(void) {{ return {name}(); }}"
        assert needed(source, tmp_path, name) == ["libcuda.so.1"]
