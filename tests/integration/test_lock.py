"""The rehearsal resolved for real: against the package index, the distribution's mirror and our own patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.fetch.indexes import new_client
from forge_build.lock.diff import diff
from forge_build.lock.index import Resolver
from forge_build.lock.resolve import resolve
from forge_core.console import Console
from forge_core.errors import UsageError
from forge_core.store import Store

QUIET = Console(quiet=True)


def test_nothing_changes_without_upgrade() -> None:
    manifest = manifests.load("rehearsal")
    committed = locks.load(manifest)
    again = resolve(manifest, committed, Store.open(), upgrade=False, console=QUIET)
    assert [str(change) for change in diff(committed, again)] == []
    assert again == committed


def test_resolved_from_nothing_as_of_its_day_the_wheels_are_the_committed_ones() -> None:
    manifest = manifests.load("rehearsal")
    committed = locks.load(manifest)
    with new_client() as client, QUIET.step("resolve") as step:
        resolver = Resolver(manifest, Store.open(), client)
        for use, environment in manifest.environments.items():
            assert resolver.environment(environment, {}, step) == committed.wheels[use], use


def test_the_production_profile_resolves_to_torch_for_cuda_13_without_the_published_kernels() -> None:
    manifest = manifests.load("sm120")
    with new_client() as client, QUIET.step("resolve") as step:
        found = Resolver(manifest, Store.open(), client).environment(manifest.environments["runtime"], {}, step)
    by_name = {wheel.name: wheel for wheel in found}
    assert by_name["torch"].version == "2.11.0"
    assert by_name["torch"].file.startswith("torch-2.11.0-cp311-")
    assert by_name["nvidia-cuda-runtime"].version.startswith("13.0.")
    assert not {"sgl-kernel", "flashinfer-python", "sglang"} & set(by_name), "these come from source"
    assert not [name for name in by_name if name.endswith("-cu12")]


def test_a_contradiction_is_told_in_the_resolvers_words(tmp_path: Path) -> None:
    manifest = manifests.load("rehearsal")
    runtime = manifest.environments["builder"].model_copy(
        update={"requires": ("numpy>=2", "numba==0.65.1", "numpy<1.20")}
    )
    with new_client() as client, QUIET.step("resolve") as step, pytest.raises(UsageError) as caught:
        Resolver(manifest, Store.open(), client).environment(runtime, {}, step)
    assert any("numpy" in line for line in caught.value.details)
