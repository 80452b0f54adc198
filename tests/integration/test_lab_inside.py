"""The faults inside the server, in its own image with its own torch: each does what it says, and every name it wraps is there."""

from __future__ import annotations

import json
import shutil
from contextlib import closing

import pytest
from docker.types import Mount

from forge_core.cli import project_root
from forge_core.engine import connect
from forge_core.record import BuildRecord
from forge_lab import mutants
from forge_lab.bed import CODE_MOUNT

SCRIPT = project_root() / "tests" / "testdata" / "lab" / "inside.py"


@pytest.mark.parametrize("chained", [False, True])
def test_every_fault_in_the_image(built: BuildRecord, chained: bool) -> None:
    """`chained`: through the start of Python, where .pth files of the image are read as well."""
    engine = connect(builds=False)
    folder = project_root() / "work" / "test-lab-inside"
    shutil.rmtree(folder, ignore_errors=True)
    # Below the checkout: an engine in a chroot or a container sees only some folders.
    shutil.copytree(mutants.inside(), folder / "faults")
    shutil.copy(SCRIPT, folder / "inside.py")
    if not chained:
        (folder / "faults" / "sitecustomize.py").unlink()
    try:
        with closing(engine.client):
            said = engine.client.containers.run(
                f"{built.image}",
                entrypoint=["python"],
                command=["-c", "import forge_faults, torchvision"] if chained else ["/test/inside.py"],
                environment={"PYTHONPATH": CODE_MOUNT, "HOME": "/tmp"},
                mounts=[
                    Mount(CODE_MOUNT, str(folder / "faults"), type="bind", read_only=True),
                    Mount("/test", str(folder), type="bind", read_only=True),
                ],
                network_mode="none",
                remove=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not chained:
        told = json.loads(said.decode().splitlines()[-1])
        assert len(told["modules"]) == 11 and told["faults"] > 30
