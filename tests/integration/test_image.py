"""The runtime image on a real engine: one digest from another checkout, the check's eyes, the model made in it.

Takes the recorded build (`nox -s build -- --profile rehearsal`) and about five minutes on two cores.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forge_build import base, image, image_check, model
from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.compile.container import builder, copy_in, follow
from forge_build.compile.flashinfer_modules import modules as flashinfer_modules
from forge_build.fetch import Inputs, fetch
from forge_build.image import BuiltFile, recipe
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine, install
from forge_core.errors import Refused, UsageError
from forge_core.model import file_sha256
from forge_core.record import BuildRecord
from forge_core.store import Store

SITE = "/opt/sglang/lib/python3.11/site-packages"
MODULE = "fp4_quantization_120"


@dataclass(frozen=True)
class Line:
    """The line up to the image, and the record of a build before."""

    manifest: manifests.Manifest
    lock: locks.Lock
    inputs: Inputs
    engine: Engine
    record: BuildRecord
    built: tuple[BuiltFile, ...]

    def check(self, name: str, log: Path) -> image_check.ImageReport:
        """The image check, of whatever image."""
        locked = self.lock.wheels["runtime"]
        spec = self.manifest.wheels["flashinfer-jit-cache"]
        modules = {n: module.call for n, module in flashinfer_modules(spec, "wheels").items()}
        return image_check.check(
            name,
            self.manifest,
            locked,
            {"flashinfer-jit-cache": "0.6.5"},
            modules,
            self.engine,
            wheels=[*(self.inputs.path(w.sha256) for w in locked), *(own.path for own in self.built)],
            log=log,
            console=Console(),
        )


@pytest.fixture(scope="module")
def line(built: BuildRecord) -> Iterator[Line]:
    console = Console()
    manifest = manifests.load("rehearsal")
    lock = locks.load(manifest)
    work = project_root() / "work" / "rehearsal"
    wheels = tuple(BuiltFile(work / "wheelhouse" / w.file, w.file, w.sha256) for w in built.wheels)
    assert all(file_sha256(own.path) == own.sha256 for own in wheels)
    engine = install.ensure(console)
    try:
        inputs = fetch(manifest, lock, Store.open(), offline=True, console=console)
        yield Line(manifest, lock, inputs, engine, built, wheels)
    finally:
        engine.client.close()


def test_another_checkout_without_caches_gives_the_recorded_digest(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "else where"
    for name in ("Dockerfile.sm120", "build/inside", "build/manifests"):
        source, target = project_root() / name, elsewhere / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copyfile(source, target)
    # dirt that must not enter
    (elsewhere / "build" / "inside" / "stand_ins" / "sgl_kernel" / "__pycache__").mkdir(exist_ok=True)
    (elsewhere / "build" / "inside" / "stand_ins" / "sgl_kernel" / "__pycache__" / "x.pyc").write_bytes(os.urandom(9))
    os.utime(elsewhere / "build" / "inside" / "stand_ins" / "sgl_kernel" / "sgl_kernel" / "__init__.py", (1, 1))
    monkeypatch.setenv("FORGE_ROOT", str(elsewhere))
    root = base.build("runtime", line.manifest, line.inputs, log=tmp_path / "base.log", console=Console())
    assert root.identity == {b.use: b.identity for b in line.record.bases}["runtime"]
    made = image.build(
        line.manifest,
        line.inputs,
        root,
        line.lock.wheels["runtime"],
        line.built,
        line.engine,
        tmp_path / "image.tar",
        log=tmp_path / "image.log",
        console=Console(),
        no_cache=True,
    )
    assert (made.digest, made.config_digest) == (line.record.image.digest, line.record.image_config)
    assert made.size == line.record.image_size
    assert made.annotations == image.labels(line.manifest) | recipe.base_labels(line.manifest, root)
    assert len(made.steps) == len(made.layers)
    assert "CACHED" not in (tmp_path / "image.log").read_text()
    assert list((line.inputs.store.root / "partial").glob("context-*")) == []


def test_the_recorded_image_passes(line: Line, tmp_path: Path) -> None:
    report = line.check(str(line.record.image), tmp_path / "check.log")
    assert report.findings == ()
    assert report.checks == line.record.image_check
    assert report.checks[f"loader {MODULE}"].startswith(f"{SITE}/flashinfer_jit_cache/")


def test_a_server_that_is_still_loading_ends_when_it_is_told_to(line: Line) -> None:
    """Without an init the interpreter, as process 1, would not see SIGTERM before it handles it."""
    container = line.engine.client.containers.create(str(line.record.image), ["--help"], network_mode="none")
    try:
        container.start()
        time.sleep(2)  # its imports take longer, and install no handler
        container.kill("SIGTERM")
        assert container.wait(timeout=60)["StatusCode"] == 128 + signal.SIGTERM
    finally:
        container.remove(force=True)


def archive(files: dict[str, bytes]) -> io.BytesIO:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(data), 0o644
            tar.addfile(member, io.BytesIO(data))
    spool.seek(0)
    return spool


def test_whatever_was_changed_later_is_found(line: Line, tmp_path: Path) -> None:
    """What a later `pip install`, a second kernel, a dropped user or a changed variable leave behind; all at once."""
    client = line.engine.client
    tag = "sm120-forge/test-tampered:latest"
    container = client.containers.create(str(line.record.image), ["true"], entrypoint=[])
    try:
        stream, _ = container.get_archive(f"{SITE}/einops/__init__.py")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
            member = tar.extractfile("__init__.py")
            assert member is not None
            einops = member.read()
        metadata = b"Metadata-Version: 2.1\nName: smuggled\nVersion: 6.6\nRequires-Dist: nothing-like-it\n"
        files = {
            f"{SITE}/einops/__init__.py": einops + b"\n# changed\n",
            f"{SITE}/tqdm/_utils.py": b"",
            f"{SITE}/smuggled-6.6.dist-info/METADATA": metadata,
            f"{SITE}/smuggled-6.6.dist-info/RECORD": b"",
            f"{SITE}/aaa/{MODULE}.so": b"\x7fELF",
        }
        container.put_archive("/", archive(files))
        changes = ["USER 0:0", "ENV HF_HUB_OFFLINE=0", "LABEL org.opencontainers.image.title=x"]
        container.commit(tag.partition(":")[0], "latest", changes=changes)
    finally:
        container.remove(force=True)
    try:
        with pytest.raises(Refused) as caught:
            line.check(tag, tmp_path / "check.log")
    finally:
        client.images.remove(tag, force=True)
    starts = [
        "user: image: runs as root",
        "environment: HF_HUB_OFFLINE:",
        "label: org.opencontainers.image.title:",
        "version: smuggled: locked not at all, installed 6.6",
        "file-changed: einops/__init__.py: einops: ",
        "file-changed: tqdm/_utils.py: tqdm: ",
        "record: smuggled:",
        f"file-unknown: aaa/{MODULE}.so:",
        "dependency-conflict: smuggled: smuggled 6.6 requires nothing-like-it",
        f"loader: {MODULE}: loaded {SITE}/flashinfer_jit_cache/",
    ]
    missed = [start for start in starts if not any(text.startswith(start) for text in caught.value.details)]
    assert missed == [], caught.value.details


@pytest.fixture
def fresh(line: Line, tmp_path: Path) -> Inputs:
    """A store that has the model's wheel and has never seen a conversion."""
    for name in ("objects", "derived", "partial", "locks"):
        (tmp_path / "store" / name).mkdir(parents=True)
    store = Store(tmp_path / "store")
    store.add_file(line.inputs.path(line.lock.wheels["model"][0].sha256))
    return Inputs(store, line.inputs.wheels, {}, ())


def prepare(line: Line, fresh: Inputs, manifest: manifests.Manifest, folder: Path) -> str:
    return model.prepare(
        manifest,
        fresh,
        line.lock.wheels["model"][0],
        list(line.lock.wheels["runtime"]),
        line.record.image,
        line.engine,
        folder,
        log=folder.with_suffix(".log"),
        console=Console(),
    ).revision


INSIDE = """
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("/forge/model")
def prompt(messages, **more):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
user = {"role": "user", "content": "What is the weather in Paris?"}
call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
print("seen " + json.dumps({
    "nan": tokenizer.decode([0, 0, 0, 0]),
    "round trip": tokenizer.decode(tokenizer.encode("Hi! Really?! No!")),
    "end": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    "plain": prompt([user]),
    "system": prompt([{"role": "system", "content": "Be brief."}, user]),
    "thought": prompt([user, {"role": "assistant", "content": "It is mild.", "reasoning_content": "mild"}, user]),
    "tools": prompt([user, {"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "content": "19 degrees"}], tools=tools),
}))
"""


def test_a_conversion_anew_gives_the_recorded_model(line: Line, fresh: Inputs, tmp_path: Path) -> None:
    assert line.record.model is not None
    folder = tmp_path / "model"
    assert prepare(line, fresh, line.manifest, folder) == line.record.model.revision
    assert sorted(p.name for p in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    lines: list[str] = []
    argv = ["python", "/forge/look.py"]
    with builder(line.engine, str(line.record.image), argv, {"HOME": "/tmp"}, name="test", keep=False) as container:
        files: dict[str, Path | bytes] = {"/forge/look.py": INSIDE.encode()}
        files |= {f"/forge/model/{p.name}": p for p in folder.iterdir() if p.suffix != ".safetensors"}
        copy_in(container, files, epoch=line.manifest.epoch)
        assert follow(container, tmp_path / "look.log", lines.append) == 0, lines
    seen = json.loads(next(text for text in lines if text.startswith("seen ")).removeprefix("seen "))
    assert seen["nan"] == "!!!!"
    assert seen["round trip"] == "Hi! Really?! No!"
    assert seen["end"] == json.loads((folder / "config.json").read_text())["unk_token_id"] != 0
    ask = "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    assert seen["plain"] == f"{ask}<|im_start|>assistant\n"
    assert seen["system"] == f"<|im_start|>system\nBe brief.<|im_end|>\n{ask}<|im_start|>assistant\n"
    answer = "<|im_start|>assistant\n<think>\nmild\n</think>\n\nIt is mild.<|im_end|>\n"
    assert seen["thought"] == f"{ask}{answer}{ask}<|im_start|>assistant\n"
    assert seen["tools"].startswith("<|im_start|>system\nYou may call these functions")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>' in seen["tools"]
    assert "<|im_start|>user\n<tool_response>\n19 degrees\n</tool_response><|im_end|>\n" in seen["tools"]


def test_a_token_that_the_model_lacks_is_a_mistake_of_the_manifest(line: Line, fresh: Inputs, tmp_path: Path) -> None:
    assert line.manifest.model is not None
    wrong = line.manifest.model.model_copy(update={"nan_token": "no such token"})
    with pytest.raises(UsageError, match=r"model\.nan_token: 'no such token' is no token"):
        prepare(line, fresh, line.manifest.model_copy(update={"model": wrong}), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    assert list((fresh.store.root / "derived").rglob("*.json")) == []
