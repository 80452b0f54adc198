"""The hand-over: a record, the digest in staging and a model folder are all that the other machine gets.

A second engine in a root of its own, with nothing in it, stands in for that machine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import pytest

from forge_core import record, registry
from forge_core.cli import project_root, work_folder
from forge_core.console import Console
from forge_core.engine import install
from forge_core.engine.place import Place
from forge_core.record import BuildRecord
from forge_validate.__main__ import main


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Place]:
    """An engine without one image."""
    number = os.getpid() % 10000
    place = Place(Path(f"/var/lib/forge-other-{number}"), f"other{number}", "10.209.9.1/24")
    engine = install.start(Console(), place)
    assert engine.client.images.list() == []
    engine.client.close()
    yield place
    install.stop(Console(), place)
    assert place.processes() == []
    shutil.rmtree(place.root)


def test_another_machine_needs_the_record_and_the_model_only(
    built: BuildRecord,
    other: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = project_root() / "work" / f"test-handover-{tmp_path.name}"
    root.mkdir(mode=0o755)
    try:
        shutil.copy(work_folder("rehearsal") / record.FILE_NAME, root / "handed-over.json")
        shutil.copytree(work_folder("rehearsal") / "model", root / "model")
        monkeypatch.setenv("FORGE_ROOT", str(root))
        monkeypatch.setenv("FORGE_STORE", str(tmp_path / "no-store"))
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setenv("FORGE_ENGINE_ROOT", str(other.root))
        monkeypatch.setenv("FORGE_ENGINE_BRIDGE", f"{other.bridge}={other.subnet}")
        handed = ["--record", str(root / "handed-over.json"), "--model", str(root / "model")]
        assert main(["validate", "--profile", "rehearsal", *handed]) == 0
        err = capsys.readouterr().err
        assert f"promoted   {built.image.repository}:release -> {built.image.digest}" in err
        assert registry.digest_of(built.image.repository, "release") == built.image.digest
        # The image came here by its digest, and under no tag that could move.
        there = install.start(Console(), other)
        (image,) = there.client.images.list()
        assert image.attrs["RepoDigests"] == [str(built.image)]
        # (This image store calls the digest itself a tag.)
        assert set(image.tags) <= {str(built.image)}
        with pytest.raises(docker.errors.ImageNotFound):
            there.client.images.get(f"{built.image.repository}:release")
        there.client.close()
    finally:
        shutil.rmtree(root)
