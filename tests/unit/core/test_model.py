"""Values: frozen, closed, named by their content."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from forge_core.model import Deviation, Finding, Frozen, ImageRef, ModelRef, canonical_sha256, file_sha256

DIGEST = "sha256:" + "a" * 64


def test_values_are_frozen_and_closed() -> None:
    value = Finding(kind="k", where="w", message="m")
    with pytest.raises(ValidationError):
        value.kind = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Deviation(kind="injected-fault", subject="s", detail="d", more=1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Deviation(kind="unknown", subject="s", detail="d")  # type: ignore[arg-type]


def test_image_reference_round_trip() -> None:
    ref = ImageRef.parse(f"127.0.0.1:5000/sm120-forge/x@{DIGEST}")
    assert (ref.repository, ref.digest, ref.registry) == ("127.0.0.1:5000/sm120-forge/x", DIGEST, "127.0.0.1:5000")
    assert ImageRef.parse(str(ref)) == ref


def test_a_tag_is_never_part_of_an_identity() -> None:
    assert ImageRef.parse(f"127.0.0.1:5000/x:v1@{DIGEST}") == ImageRef.parse(f"127.0.0.1:5000/x@{DIGEST}")
    with pytest.raises(ValueError, match="tag"):
        ImageRef(repository="host/x:v1", digest=DIGEST)


@pytest.mark.parametrize(
    "text", ["host/x", "host/x:v1", f"@{DIGEST}", "host/x@sha256:abc", f"host/x@{DIGEST}0", "host/x@md5:" + "a" * 32]
)
def test_no_image_reference_without_a_digest(text: str) -> None:
    with pytest.raises(ValueError):
        ImageRef.parse(text)


def test_a_model_is_named_by_its_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "sub" / "w.bin").write_bytes(b"\0" * 100)
    a, b = (ModelRef.of_folder("m", tmp_path / f) for f in ("a", "b"))
    assert a == b and a.revision == b.revision
    assert [f.path for f in a.files] == ["config.json", "sub/w.bin"] and a.files[1].size == 100
    assert ModelRef(name="other", files=a.files[::-1]).revision == a.revision
    (tmp_path / "b" / "sub" / "w.bin").write_bytes(b"\0" * 99 + b"\1")
    assert ModelRef.of_folder("m", tmp_path / "b").revision != a.revision
    with pytest.raises(FileNotFoundError):
        ModelRef.of_folder("m", tmp_path / "gone")


def test_hashes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert file_sha256(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert canonical_sha256({"b": 1, "a": [1, None]}) == canonical_sha256({"a": [1, None], "b": 1})
    assert canonical_sha256({"a": 1}) != canonical_sha256({"a": "1"})
    canonical_sha256("\ud800")


class Sample(Frozen):
    text: str
    number: int
    ratio: float


@given(st.builds(Sample, text=st.text(), number=st.integers(), ratio=st.floats(allow_nan=False, allow_infinity=False)))
def test_content_hash_survives_json(value: Sample) -> None:
    assert Sample.model_validate_json(value.model_dump_json()).content_sha256() == value.content_sha256()
