from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build import pipeline
from forge_build.manifest import Manifest
from forge_core.console import Console
from forge_core.errors import UsageError

REHEARSAL = (manifests.manifests_folder() / "rehearsal.yaml").read_text(encoding="utf-8")
Parse = Callable[[str], Manifest]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    def parse(text: str) -> Manifest:
        path = tmp_path / "rehearsal.yaml"
        path.write_text(text, encoding="utf-8")
        return manifests.parse(path)

    return parse


def changed(*pairs: tuple[str, str]) -> str:
    text = REHEARSAL
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def mistakes(parse: Parse, text: str) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(len(caught.value.details)) in caught.value.message
    return caught.value.details


@pytest.mark.parametrize("profile", manifests.profiles())
def test_every_committed_manifest_is_valid(profile: str) -> None:
    assert manifests.load(profile).profile == profile


def test_sm120_compiles_two_wheels_for_sm_120a_alone_in_production() -> None:
    found = manifests.load("sm120")
    assert found.kind == "production"
    assert {w.recipe for w in found.wheels.values()} == {"sgl-kernel", "flashinfer-jit", "pyproject"}
    compiled = [w for w in found.wheels.values() if w.architectures]
    assert len(compiled) == 2
    assert all(w.check.allow == ("sm_120a",) == w.check.demand for w in compiled)
    assert {"torch==2.11.0", "flashinfer-python==0.6.5"} <= set(found.environments["runtime"].overrides)
    source = found.sources["sgl-kernel"].git
    assert source is not None
    assert (source.version, source.subfolder) == ("0.3.21", "sgl-kernel")


def test_a_profile_without_a_lock_says_so_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (manifests.manifests_folder() / "sm120.yaml").read_text(encoding="utf-8")
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    manifests.manifests_folder().mkdir(parents=True)
    (manifests.manifests_folder() / "sm120.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="'sm120' has no lock") as caught:
        pipeline.build("sm120", offline=False, keep=False, console=Console(quiet=True))
    assert "nox -s lock -- --profile sm120" in (caught.value.hint or "")


def test_no_profile_names_the_profiles() -> None:
    with pytest.raises(UsageError) as caught:
        manifests.load(None)
    assert {"rehearsal", "sm120"} <= set((caught.value.hint or "").replace(",", " ").replace(";", " ").split())
    with pytest.raises(UsageError, match="no profile 'nowhere'"):
        manifests.load("nowhere")


def test_four_mistakes_give_four_messages_with_their_paths(parse: Parse) -> None:
    found = mistakes(
        parse,
        changed(
            ("as_of: 2026-11-28", "as_of: 2026-11-27\nas_of: 2026-11-28"),
            ("kind: rehearsal", "kind: rehersal"),
            ("torch==2.13.0+cpu", "torch=2.13.0"),
            ("source: flashinfer", "source: flashinfr"),
        ),
    )
    assert len(found) == 4
    assert found[0] == "as_of: given twice, in lines 8 and 9"
    assert found[1].startswith("kind: ")
    assert found[1].endswith("(found 'rehersal')")
    assert found[2].startswith("environments.runtime.requires.46: 'torch=2.13.0' is no PEP 508 requirement")
    assert found[3] == "wheels.flashinfer-jit-cache.source: names no entry of `sources` (found 'flashinfr')"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epoch: 1795910400", "epoch: 12", "epoch: Input should be greater than or equal to 315532800 (found 12)"),
        ('python: "3.11"', "python: 3.11", "target.python: Input should be a valid string (found 3.11)"),
        ("kind: rehearsal", "kind: rehearsal\ncolour: red", "colour: Extra inputs are not permitted (found 'red')"),
        ("packages: [torch]", "packages: [Torch_X]", "indexes.pytorch-cpu.packages.0: String should match pattern"),
        (
            "packages: [torch]",
            "packages: [torch_x]",
            "indexes.pytorch-cpu.packages.0: 'torch_x' must be spelled 'torch-x'",
        ),
        ("  builder:\n    requires:", "  bulider:\n    requires:", "environments.builder: this environment is needed"),
        ("  suite: bookworm\n", "", "base: `builder` needs `suite`"),
        (
            "  suite: bookworm",
            "  suite: bookworm\n  security_mirror: http://x",
            "base: `security_mirror` needs `mirror`",
        ),
        ("      - einops\n", "      - einops @ https://x/y.whl\n", "environments.runtime.requires.7: "),
        ("allow: [sm_120a]", "allow: [sm_90]", "wheels.flashinfer-jit-cache.check"),
        ("wheel: flashinfer-python==0.6.5", "series: x", "sources.flashinfer: exactly one of `wheel` and `git`"),
    ],
)
def test_a_mistake_is_named_at_its_path(parse: Parse, old: str, new: str, message: str) -> None:
    if "allow:" in old:
        message = "wheels.flashinfer-jit-cache: demands sm_120a but does not allow it"
    assert any(line.startswith(message) for line in mistakes(parse, changed((old, new))))


def test_a_package_belongs_to_one_index(parse: Parse) -> None:
    two = changed(("    packages: [torch]\n", "    packages: [torch]\n  other:\n    packages: [numpy, torch]\n"))
    assert mistakes(parse, two) == ("indexes.other.packages: the index 'pytorch-cpu' has it too (found 'torch')",)


@pytest.mark.parametrize(
    ("url", "wrong"),
    [
        ("https://example.org/x.git", None),
        ("git@example.org:x/y.git", None),
        ("ext::sh -c id", "no https, ssh, git, http or file address"),
        ("/somewhere/x", "no https, ssh, git, http or file address"),
        ("https://me:geheim@example.org/x", "holds a password"),
    ],
)
def test_addresses_of_git_run_nothing_and_hold_no_password(parse: Parse, url: str, wrong: str | None) -> None:
    text = changed(("wheel: flashinfer-python==0.6.5", f"git: {{url: '{url}', commit: {'a' * 40}, version: 0.6.5}}"))
    if wrong is None:
        assert parse(text).sources["flashinfer"].git is not None
    else:
        assert any(wrong in line for line in mistakes(parse, text))


@pytest.mark.parametrize("text", ["", "- a\n", "just words", "{a: [", "\x00", "a: *nowhere", "? [1]\n: x"])
def test_what_is_no_manifest_is_a_usage_error(parse: Parse, text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


def test_bytes_that_are_no_text_are_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(UsageError, match="not YAML"):
        manifests.read_yaml(path)


def test_keys_given_twice_are_found_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "a:\n  - b: 1\n    c: {d: 1, 'd': 2}\n    b: 2\nlocal: &x {k: 1}\nmerged: {<<: *x, k: 2}\n", encoding="utf-8"
    )
    with pytest.raises(UsageError) as caught:
        manifests.read_yaml(path)
    assert set(caught.value.details) == {
        "a.0.b: given twice, in lines 2 and 4",
        "a.0.c.d: given twice, in lines 3 and 3",
    }


def test_the_file_is_named_as_its_profile(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(REHEARSAL, encoding="utf-8")
    with pytest.raises(UsageError, match="profile is 'rehearsal', but the file is named 'other'"):
        manifests.parse(path, "other")


def test_the_committed_schema_is_the_models() -> None:
    committed = json.loads((manifests.manifests_folder() / "manifest.schema.json").read_text(encoding="utf-8"))
    assert committed == manifests.json_schema(), "python -m forge_build schema > build/manifests/manifest.schema.json"


@pytest.mark.parametrize("profile", manifests.profiles())
def test_editors_accept_what_we_accept_and_refuse_unknown_keys(profile: str) -> None:
    path = manifests.manifests_folder() / f"{profile}.yaml"
    data: Any = json.loads(json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")), default=str))
    check = jsonschema.Draft202012Validator(manifests.json_schema())
    assert list(check.iter_errors(data)) == []
    data["colour"] = "red"
    assert len(list(check.iter_errors(data))) == 1


def test_a_lock_goes_stale_with_what_it_resolves_and_with_nothing_else(parse: Parse) -> None:
    whole = parse(REHEARSAL).resolving_sha256()
    assert (
        parse(
            changed(("title: SGLang", "title: Another"), ("epoch: 1795910400", "epoch: 1795910401"))
        ).resolving_sha256()
        == whole
    )
    for old, new in (
        ("as_of: 2026-11-28", "as_of: 2026-11-27"),
        ("- einops\n", "- einops>1\n"),
        ("packages: [python3, libgomp1", "packages: [python3, libgomp2"),
        ("series: cuda-13-wheels", "series: other"),
        ("as_of: 2026-11-28", "as_of: 2026-11-28\nnewer: {torch: 2026-11-29}"),
    ):
        assert parse(changed((old, new))).resolving_sha256() != whole, new


def test_the_committed_lock_belongs_to_its_manifest() -> None:
    assert locks.load(manifests.load("rehearsal")).profile == "rehearsal"
