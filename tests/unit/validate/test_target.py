from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forge_core import record
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.record import BuildRecord
from forge_validate.target import Recorded
from forge_validate.target.pull import demand_answering
from forge_validate.target.record import recorded

Make = Callable[..., BuildRecord]


def read(path: Path, *, model: Path | None = None, usual: Path = Path("/nonexistent")) -> Recorded:
    return recorded(path, profile="rehearsal", served="SmolLM2-135M-Instruct", model=model, usual_model=usual)[0]


def test_the_record_and_its_model(make_record: Make, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(), path)
    found = read(path, usual=model_folder)
    assert found.record == make_record().sha256
    assert found.image == make_record().image
    assert found.deviations == ()


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "build-record.json")
    assert "nox -s build" in str(caught.value.hint)


def test_an_edited_record(make_record: Make, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(), path)
    data = json.loads(path.read_text())
    data["image"]["digest"] = "sha256:" + "c" * 64
    path.write_text(json.dumps(data))
    with pytest.raises(IntegrityError):
        read(path, usual=model_folder)


def test_another_profile(make_record: Make, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(profile="sm120", kind="production"), path)
    with pytest.raises(UsageError, match="sm120"):
        read(path, usual=model_folder)


def test_a_model_that_is_not_the_recorded_one(make_record: Make, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(), path)
    weights = model_folder / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[100] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(IntegrityError, match=r"model\.safetensors differs"):
        read(path, usual=model_folder)
    found = read(path, model=model_folder)
    assert [d.kind for d in found.deviations] == ["model-differs"]
    assert "model.safetensors differs" in found.deviations[0].detail
    (model_folder / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        read(path, model=model_folder)


def test_an_equal_model_elsewhere_is_no_deviation(make_record: Make, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(), path)
    assert read(path, model=model_folder).deviations == ()


def test_a_record_without_a_model_makes_any_model_a_deviation(
    make_record: Make, model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "build-record.json"
    record.save(make_record(model=None), path)
    assert [d.kind for d in read(path, model=model_folder).deviations] == ["model-differs"]


def test_a_registry_that_does_not_answer_is_the_environment() -> None:
    # Nobody listens on port 1.
    with pytest.raises(EnvironmentFailure) as caught:
        demand_answering("127.0.0.1:1")
    assert "nox -s engine" in str(caught.value.hint)
