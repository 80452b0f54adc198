from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from forge_core.errors import UsageError
from forge_validate import data, policy, serving, suite
from forge_validate.injected import Injected
from forge_validate.judge import Bench
from forge_validate.options import create
from forge_validate.serving import Devices, Serving
from forge_validate.suite import Suite


@pytest.mark.parametrize("profile", data.names("serving"))
def test_every_profile_is_complete(profile: str) -> None:
    plan, rules = serving.load(profile), policy.load(profile)
    assert plan.profile == rules.profile == profile
    found, answers = suite.load(rules.suite, plan.model)
    Bench(found, answers, rules, plan.model)
    # An optional pattern that matches no check would be a typing error that loosens nothing, or all.
    labels = [f"{case.name}/{check}" for case in found.cases for check in case.checks]
    labels += [f"numeric/{kernel}" for kernel in (rules.numeric.kernels if rules.numeric else ())]
    for some in rules.optional:
        assert any(fnmatchcase(label, some.check) for label in labels), some.check


def test_what_is_asked_of_any_server_is_complete() -> None:
    rules = policy.load("any")
    found, answers = suite.load(rules.suite, "any")
    Bench(found, answers, rules, "m")
    # Nothing is known of that model, so nothing may be promoted under its policy, and nothing is demanded word for word.
    assert rules.promotion is None and rules.accepts == () and rules.optional == ()
    assert not any(q.content or q.call or q.tokens or q.prompt_tokens for q in answers.questions.values())
    labels = [f"{case.name}/{check}" for case in found.cases for check in case.checks]
    for some in rules.waived:
        assert any(fnmatchcase(label, some.check) for label in labels), some.check
    assert {label for label in labels if rules.waiver(label) is None} >= {
        "models/listed",
        "known-answer/text",
        "streamed/same",
    }


def test_a_name_without_a_file_lists_those_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        serving.load("nope")
    assert "rehearsal" in str(caught.value.hint)


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        data.parse("suites/x.yaml", {"schema": 1, "suite": "x", "sed": 1, "cases": [{"name": "A"}]}, Suite)
    text = "\n".join(caught.value.details)
    for place in ("seed", "sed", "cases.0.name", "cases.0.endpoint", "cases.0.timeout", "cases.0.checks"):
        assert place in text


def case(**changes: Any) -> dict[str, Any]:
    base = {"name": "a", "endpoint": "chat", "question": "q", "max_tokens": 1, "timeout": 1, "checks": ["text"]}
    return base | changes


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        ([case(max_tokens=None)], "needs `question` and `max_tokens`"),
        ([case(endpoint="models")], "asks no question"),
        ([case(), case()], "two cases are named a"),
        ([case(name="b", same_as="a", checks=["same"])], "no earlier case"),
        ([case(checks=["same"])], "go together"),
    ],
)
def test_a_suite_must_make_sense(cases: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        data.parse("x", {"schema": 1, "suite": "x", "seed": 1, "cases": cases}, Suite)
    assert message in "\n".join(caught.value.details)


def test_a_suite_that_asks_what_no_answer_is_known_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = data._read

    def without(kind: data.Kind, name: str) -> Any:
        found = real(kind, name)
        if kind == "answers":
            del found["questions"]["completion"]
        return found

    monkeypatch.setattr(data, "_read", without)
    with pytest.raises(UsageError) as caught:
        suite.load("smoke", "SmolLM2-135M-Instruct")
    assert caught.value.details == ("case tokenize asks 'completion'", "case completion asks 'completion'")


def test_extends_replaces_whole_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    real = data._read("serving", "rehearsal")
    child = {"extends": "rehearsal", "profile": "child", "flags": {"device": "cuda"}}
    grandchild = {"extends": "child", "profile": "grandchild"}
    files = {"rehearsal": real, "child": child, "grandchild": grandchild}
    monkeypatch.setattr(data, "_read", lambda kind, name: dict(files[name]))
    found = data.load("serving", "child", Serving)
    assert found.flags == {"device": "cuda"} and found.model == real["model"]
    with pytest.raises(UsageError, match="one level only"):
        data.load("serving", "grandchild", Serving)


def plan(**changes: Any) -> Serving:
    return data.parse("x", data._read("serving", "rehearsal") | changes, Serving)


def test_arguments() -> None:
    words = plan(flags={"device": "cpu", "enable-metrics": True, "quiet": False, "seed": 0}).arguments("word")
    assert words[:4] == ("--model-path", "/model", "--served-model-name", "SmolLM2-135M-Instruct")
    assert words[-7:] == ("--device", "cpu", "--enable-metrics", "--seed", "0", "--weight-version", "word")
    assert "--quiet" not in words


@pytest.mark.parametrize("flag", ["port", "model-path", "--device", "api-key"])
def test_flags_that_boot_decides_are_refused(flag: str) -> None:
    with pytest.raises(UsageError):
        plan(flags={flag: "x"})


def test_a_container_gets_the_least_it_needs(tmp_path: Any) -> None:
    made = create(plan(), "name", "word", tmp_path)
    assert made["cap_drop"] == ["ALL"] and made["read_only"] and made["security_opt"] == ["no-new-privileges:true"]
    assert "user" not in made and "privileged" not in made and "network_mode" not in made
    assert made["mem_limit"] == made["memswap_limit"] == "8g"
    assert made["ports"] == {"30000/tcp": ("127.0.0.1", None)}
    (mount,) = made["mounts"]
    assert mount["ReadOnly"] and mount["Type"] == "bind" and mount["Target"] == "/model"
    assert "device_requests" not in made and "entrypoint" not in made
    assert made["ipc_mode"] == "private"


def test_what_is_put_in_on_purpose_is_read_only(tmp_path: Any) -> None:
    more = Injected(
        mounts=((tmp_path, "/forge-faults"),), environment={"PYTHONPATH": "/forge-faults", "HOME": "/other"}
    )
    whole = plan(environment={"HOME": "/tmp"})
    made, plain = (create(whole, "name", "word", tmp_path, **given) for given in ({"injected": more}, {}))
    assert made["environment"] == {"HOME": "/other", "PYTHONPATH": "/forge-faults"}
    assert [mount["Target"] for mount in made["mounts"]] == ["/model", "/forge-faults"]
    assert all(mount["ReadOnly"] and mount["Type"] == "bind" for mount in made["mounts"])
    assert {**made, "environment": 0, "mounts": 0} == {**plain, "environment": 0, "mounts": 0}
    assert plain["environment"] == {"HOME": "/tmp"}


SLACK = {"size": "1m", "within": 1, "reason": "any number will do for a test"}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (Devices(gpus="all"), {"Count": -1, "Capabilities": [["gpu"]]}),
        (Devices(gpus=("0", "1")), {"DeviceIDs": ["0", "1"], "Capabilities": [["gpu"]]}),
        (Devices(cdi=("nvidia.com/gpu=0",)), {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}),
    ],
)
def test_gpus(devices: Devices, expected: dict[str, Any], tmp_path: Any) -> None:
    made = create(plan(devices=devices.model_dump(), gpu_memory_slack=SLACK), "name", "word", tmp_path)
    (request,) = made["device_requests"]
    assert {name: request[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": {"gpus": "all", "cdi": ["nvidia.com/gpu=0"]}}, "two ways to say one thing"),
        ({"devices": {"gpus": ["0"]}}, "needs `gpu_memory_slack`"),
        ({"gpu_memory_slack": SLACK | {"reason": "short"}}, "at least 15 characters"),
        ({"caches": {"a": "relative"}}, "no place for a cache"),
        ({"caches": {"a": "/model/"}}, "no place for a cache"),
        ({"caches": {"a": "/c", "b": "/c"}}, "two caches have one path"),
        ({"caches": {"a": "/tmp"}}, "both a cache and a tmpfs"),
        ({"caches": {"A b": "/c"}}, "caches"),
        ({"host_port": 0}, "host_port"),
    ],
)
def test_a_serving_must_make_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan(**changes)
    assert message in "\n".join(caught.value.details)


def test_the_api_key_is_given_to_the_server_and_to_nobody_else(tmp_path: Any) -> None:
    keyed = plan(api_key_flag="api-key")
    made = create(keyed, "name", "word", tmp_path, api_key="sk-1")
    assert made["command"][-2:] == ["--api-key", "sk-1"]
    assert "sk-1" not in str({name: value for name, value in made.items() if name != "command"})
    assert "--api-key" not in keyed.arguments("word")
    assert "sk-1" not in str(create(plan(api_key_flag=None), "name", "word", tmp_path, api_key="sk-1"))


def test_a_fixed_port_stays_on_loopback(tmp_path: Any) -> None:
    made = create(plan(host_port=31000), "name", "word", tmp_path)
    assert made["ports"] == {"30000/tcp": ("127.0.0.1", 31000)}


def test_memory_in_bytes() -> None:
    assert [serving.in_bytes(text) for text in ("3k", "512m", "8g")] == [3072, 512 << 20, 8 << 30]


def test_a_cache_belongs_to_one_image(tmp_path: Any) -> None:
    cached = plan(caches={"triton": "/cache/triton"})
    names = set()
    for digit in "ab":
        digest = "sha256:" + digit * 64
        model, cache = create(cached, "name", "word", tmp_path, digest=digest)["mounts"]
        assert model["Target"] == "/model" and model["ReadOnly"]
        assert (cache["Type"], cache["Target"], cache["ReadOnly"]) == ("volume", "/cache/triton", False)
        assert cache["VolumeOptions"]["Labels"] == {
            "sm120-forge.cache": "rehearsal",
            "sm120-forge.cache.image": digest,
        }
        names.add(cache["Source"])
    assert names == {f"sm120-forge-rehearsal-triton-{'a' * 16}", f"sm120-forge-rehearsal-triton-{'b' * 16}"}


@pytest.mark.parametrize("digest", ["", "latest", "sha256:abc"])
def test_a_cache_without_a_digest_is_refused(digest: str, tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="no digest"):
        create(plan(caches={"triton": "/cache/triton"}), "name", "word", tmp_path, digest=digest)


def test_the_production_model_is_held_to_323() -> None:
    """By value and as a whole: what contains it is not it."""
    _, answers = suite.load("smoke", serving.load("sm120").model)
    for name in ("known-answer", "known-answer-thinking"):
        expected, silent = answers.questions[name].content, answers.questions[name].reasoning
        assert expected is not None and expected.met_by(" 323\n") and silent is None
        for wrong in ("3230", "17 x 19 = 323", "323!!!!", "the answer is 323", "333", ""):
            assert not expected.met_by(wrong), wrong


def test_production_accepts_no_deviation() -> None:
    rules = policy.load("sm120")
    assert rules.promotion is not None and rules.promotion.registries == "any"
    assert rules.accepts == () == rules.waived
    # What nobody has seen of that model yet, and what the server does not do: no check of an answer is among them.
    assert {some.check.partition("/")[2] for some in rules.optional} == {"refused", "token-ids", "prompt-tokens"}
    assert rules.text == policy.load("rehearsal").text
