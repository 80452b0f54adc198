"""What the integration tests share: a build of the rehearsal, made once; a build made before is taken up in seconds."""

from __future__ import annotations

import pytest

from forge_build.__main__ import main as build
from forge_core import record
from forge_core.cli import work_folder
from forge_core.record import BuildRecord


@pytest.fixture(scope="session")
def built() -> BuildRecord:
    """The record of the rehearsal; without an engine the build fails, and so does the test."""
    assert build(["build", "--profile", "rehearsal"]) == 0
    return record.load(work_folder("rehearsal") / record.FILE_NAME)
