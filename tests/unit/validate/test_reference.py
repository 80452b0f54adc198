"""Images by tag or digest, as docker reads a reference, and how one that is not ours is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forge_core.errors import EnvironmentFailure, UsageError
from forge_validate import bench, serving
from forge_validate.options import create
from forge_validate.target.reference import fitted, image, parts

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("lmsysorg/sglang:v0.5.9", ("docker.io/lmsysorg/sglang", "v0.5.9", None)),
        ("sglang", ("docker.io/library/sglang", "latest", None)),
        (f"sglang@{DIGEST}", ("docker.io/library/sglang", "latest", DIGEST)),
        ("ghcr.io/a/b:1", ("ghcr.io/a/b", "1", None)),
        ("127.0.0.1:5120/x", ("127.0.0.1:5120/x", "latest", None)),
        (f"localhost/x:1@{DIGEST}", ("localhost/x", "1", DIGEST)),
    ],
)
def test_references(reference: str, expected: tuple[str, str, str | None]) -> None:
    assert parts(reference) == expected


@pytest.mark.parametrize("reference", ["", "x:", "x@", "a/", "@sha256:1"])
def test_what_is_no_reference(reference: str) -> None:
    with pytest.raises(UsageError, match="no reference"):
        parts(reference)


def test_a_digest_that_is_none(model_folder: Any) -> None:
    with pytest.raises(UsageError, match="no reference"):
        image("x.example/y@sha256:abc", profile="rehearsal", served="m", model=model_folder, usual_model=model_folder)


def test_a_registry_that_does_not_answer(model_folder: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="does not answer"):
        image("127.0.0.1:1/x:1", profile="rehearsal", served="m", model=model_folder, usual_model=model_folder)


def test_no_model(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no model"):
        image("127.0.0.1:1/x:1", profile="rehearsal", served="m", model=None, usual_model=tmp_path)


def held(**config: Any) -> Any:
    """An engine that holds one image; what docker-py answers has this shape."""
    found = SimpleNamespace(attrs={"Config": config}, id=DIGEST)
    return SimpleNamespace(client=SimpleNamespace(images=SimpleNamespace(get=lambda _: found)))


def test_an_image_like_ours_is_started_as_it_is() -> None:
    plan = serving.load("rehearsal")
    assert fitted(held(User="10001:10001", Entrypoint=["tini", "--", "sglang", "serve"]), "x", plan) == plan


@pytest.mark.parametrize("user", ["", "root", "0:0"])
def test_a_root_image_with_a_shell_is_started_by_nobody_as_sglang(user: str, tmp_path: Any) -> None:
    plan = fitted(held(User=user, Entrypoint=["/opt/nvidia/nvidia_entrypoint.sh"]), "x", serving.load("rehearsal"))
    made = create(plan, "name", "word", tmp_path)
    assert made["entrypoint"] == ["python3", "-m", "sglang.launch_server"] and made["user"] == "65534:65534"


def test_what_the_serving_says_stays() -> None:
    plan = serving.load("rehearsal").model_copy(update={"command": ("mine",), "user": "1000"})
    assert fitted(held(User="", Entrypoint=None), "x", plan) == plan


def test_another_suite_or_answers_are_deviations() -> None:
    judged = bench.bench("rehearsal", suite_name="any", answers="any")
    assert (judged.suite.suite, judged.answers.model) == ("any", "any")
    asked = bench.chosen(judged.policy, "SmolLM2-135M-Instruct", suite_name="any", answers="any")
    assert [(d.kind, d.subject) for d in asked] == [("other-suite", "any"), ("other-answers", "any")]
    same = bench.chosen(judged.policy, "SmolLM2-135M-Instruct", suite_name="smoke", answers="SmolLM2-135M-Instruct")
    assert same == () == bench.chosen(judged.policy, "x", suite_name=None, answers=None)
