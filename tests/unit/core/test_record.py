"""The bar: sealed, written whole, refused when edited."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import IntegrityError, UsageError
from forge_core.model import ImageRef, ModelRef
from forge_core.record import BuildRecord, RecordedObject, RecordedStage, RecordedWheel, load, save


@pytest.fixture
def record() -> BuildRecord:
    fields: dict[str, Any] = dict.fromkeys(("bases", "sources", "inputs", "deviations"), ())
    item = RecordedObject(path="d/é.so", size=1, cubins={"sm_120a": 2}, ptx=(), needed=("libcudart.so.13",))
    known: dict[str, Any] = {
        **fields,
        "profile": "rehearsal",
        "kind": "rehearsal",
        "finished": datetime(2026, 3, 8, 1, 2, 3, 456, tzinfo=UTC),
        "forge_version": "0.1.0",
        "forge_commit": None,
        "manifest": "a" * 64,
        "lock": "b" * 64,
        "image": ImageRef(repository="127.0.0.1:5000/x", digest="sha256:" + "c" * 64),
        "image_config": "sha256:" + "d" * 64,
        "image_size": 1,
        "architectures": ("sm_120a",),
        "model": ModelRef(name="m", files=()),
        "wheels": (RecordedWheel(file="x.whl", sha256="e" * 64, size=1, objects=(item,), cached=False),),
        "image_check": {"imports": "ok"},
        "tools": {"nvcc": "13.0.88"},
        "stages": (RecordedStage(name="compile", seconds=0.1 + 0.2),),
    }
    return BuildRecord(**{name: known[name] for name in known if name in BuildRecord.model_fields})


def test_round_trip(record: BuildRecord, tmp_path: Path) -> None:
    path = tmp_path / "work" / "build-record.json"
    save(record, path)
    assert load(path) == record
    assert json.loads(path.read_text())["seal"] == record.sha256 == load(path).sha256
    assert [p.name for p in path.parent.iterdir()] == ["build-record.json"]


def test_another_layout_of_the_same_content_is_the_same_record(record: BuildRecord, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(record, path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(dict(reversed(data.items()))))
    assert load(path) == record


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("profile", "sm120"),
        ("image_size", 2),
        ("architectures", []),
        ("seal", "0" * 64),
        ("seal", None),
        ("extra", 1),
        ("forge_version", "\ud800"),
    ],
)
def test_an_edited_record_is_refused(record: BuildRecord, tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "r.json"
    save(record, path)
    data = json.loads(path.read_text())
    data[field] = value
    path.write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="changed after it was sealed"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'"x"', b"{}"])
def test_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        load(path)


def test_no_record_is_a_usage_error_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no build record") as caught:
        load(tmp_path / "r.json")
    assert caught.value.hint and "nox -s build" in caught.value.hint


def test_a_sealed_record_of_another_version(record: BuildRecord, tmp_path: Path) -> None:
    from forge_core.model import canonical_sha256

    data = record.model_dump(mode="json") | {"schema_version": 2}
    (tmp_path / "r.json").write_text(json.dumps({"seal": canonical_sha256(data)} | data))
    with pytest.raises(UsageError, match="not a build record of this version"):
        load(tmp_path / "r.json")
