"""The bed: the switch as the server finds it, what tells that a fault fired, and a server that is not as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from forge_core.errors import EnvironmentFailure
from forge_lab.bed import CODE_MOUNT, SWITCH_MOUNT, Places, Switchable, injected
from forge_lab.mutants import Mutant
from forge_lab.plan import Dtype
from forge_validate.injected import Injected
from forge_validate.server import Server

SICK = Mutant.model_validate(
    {"name": "sick", "class": "kv", "kind": "kv", "parameters": {"do": "fp8"}, "seed": 5, "expects": ["answers"]}
)
CUT = Mutant.model_validate(
    {
        "name": "usage",
        "class": "protocol",
        "where": "proxy",
        "kind": "usage",
        "expects": ["stream"],
        "promise": "usage counts the tokens",
    }
)


class Booted:
    """Boots the stand-in; notes what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.engine = FakeEngine()
        self.log = folder / "server.log"
        self.log.write_text("")
        self.dtypes: list[Dtype] = []
        self.ended = 0
        self.dead: str | None = None

    @contextmanager
    def __call__(self, dtype: Dtype, given: Injected) -> Iterator[Server]:
        self.dtypes.append(dtype)
        assert all(here.is_dir() for here, _ in given.mounts)
        try:
            yield Server(url=self.engine.url, served="m", log=self.log, died=lambda: self.dead)
        finally:
            self.ended += 1


@pytest.fixture
def booted(tmp_path: Path) -> Iterator[Booted]:
    made = Booted(tmp_path)
    with made.engine:
        yield made


def mode(folder: Path) -> object:
    return json.loads(Places(folder).switch.read_text())


def test_what_brings_the_faults_in(tmp_path: Path) -> None:
    given = injected(Places(tmp_path))
    assert [path for _, path in given.mounts] == [CODE_MOUNT, SWITCH_MOUNT]
    assert (given.mounts[0][0] / "sitecustomize.py").is_file() and (given.mounts[0][0] / "forge_faults").is_dir()
    assert given.environment["PYTHONPATH"] == CODE_MOUNT
    assert given.environment["FORGE_FAULT_SWITCH"].startswith(SWITCH_MOUNT + "/")


def test_a_fault_is_on_for_the_length_of_its_block(booted: Booted, tmp_path: Path) -> None:
    with Switchable(booted, tmp_path) as bed:
        with pytest.raises(EnvironmentFailure, match="no server"):
            bed.server.died()
        bed.start("bfloat16")
        assert mode(tmp_path) == {} and bed.heal() is None
        with bed.broken(SICK) as (server, fired):
            assert server.url == booted.engine.url
            assert mode(tmp_path) == {"kind": "kv", "parameters": {"do": "fp8"}, "seed": 5, "number": 1}
            booted.log.write_text("[x] forge-fault 1 kv fired in 7\nforge-fault 12 kv fired in 7 \n")
            assert not fired()
            booted.log.write_text("forge-fault 1 kv fired in 7 layer 3\n")
            assert fired()
        assert mode(tmp_path) == {}
        with bed.broken(CUT) as (server, fired):
            assert server.url != booted.engine.url and mode(tmp_path) == {} and not fired()
    assert booted.ended == 1


def test_a_server_that_is_not_as_it_was(booted: Booted, tmp_path: Path) -> None:
    with Switchable(booted, tmp_path) as bed:
        bed.start("bfloat16")
        booted.engine._poisoned = True
        assert "in place of" in (bed.heal() or "")
        booted.engine._poisoned = False
        assert bed.heal() is None
        booted.dead = "the server died (exit code 1)"
        assert bed.heal() == booted.dead
        booted.dead = None
        bed.start("float32")
    assert booted.dtypes == ["bfloat16", "float32"] and booted.ended == 2 and bed.dtype is None
