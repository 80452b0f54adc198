"""What a server says about itself."""

from __future__ import annotations

from forge_validate.checks.result import CheckResult, Evidence
from forge_validate.resolved import differing


def served_model(evidence: Evidence) -> CheckResult:
    """`/v1/models` lists exactly the model we told it to serve."""
    names = _names(evidence)
    if names is None:
        return evidence.failed(f"HTTP {evidence.exchange.status}, no list of models")
    text = ", ".join(names)
    if names != [evidence.served]:
        return evidence.failed(f"lists {text or 'nothing'}, not {evidence.served}", value=text)
    return evidence.passed("lists the model we serve, and no other", value=text)


def listed(evidence: Evidence) -> CheckResult:
    """`/v1/models` lists the model that is asked; a server of others may serve more than one."""
    names = _names(evidence)
    if names is None:
        return evidence.failed(f"HTTP {evidence.exchange.status}, no list of models")
    text = ", ".join(names)
    if evidence.served not in names:
        return evidence.failed(f"lists {text or 'nothing'}, not {evidence.served}", value=text)
    return evidence.passed("lists the model that is asked", value=text)


def model_info(evidence: Evidence) -> CheckResult:
    """`/model_info` describes a generating model under our name."""
    body = evidence.exchange.response
    if evidence.exchange.status != 200 or not isinstance(body, dict):
        return evidence.failed(f"HTTP {evidence.exchange.status}, no description of the model")
    name = body.get("served_model_name")
    if name != evidence.served:
        return evidence.failed(f"describes {name!r}, not {evidence.served}", value=str(name))
    if body.get("is_generation") is not True:
        return evidence.failed("the server does not take the model for a generating one", value=str(name))
    kind = ", ".join(body.get("architectures") or ()) or str(body.get("model_type"))
    return evidence.passed(f"describes the model we serve ({kind})", value=str(name))


def unknown_model(evidence: Evidence) -> CheckResult:
    """A model that is not served is refused by name.

    SGLang 0.5.23 answers 200 and echoes the name, which is why `/v1/models` is what counts; a policy makes this check
    optional there.
    """
    status = evidence.exchange.status
    if status in (400, 404):
        return evidence.passed(f"HTTP {status}", value=status)
    return evidence.failed(f"HTTP {status} for a model that is not served", value=status)


def flags(evidence: Evidence) -> CheckResult:
    """The server runs with the flags of the serving, as it tells itself: a flag may be taken and then overruled."""
    if evidence.exchange.status != 200 or not isinstance(evidence.exchange.response, dict):
        return evidence.failed(f"HTTP {evidence.exchange.status}, no description of the server")
    if not evidence.flags:
        return evidence.unmeasured("the serving has no flags to compare with")
    if wrong := differing(evidence.exchange.response, evidence.flags):
        listed = ", ".join(f"{flag} is {told}, not {wanted}" for flag, wanted, told in wrong)
        return evidence.failed(f"the server does not run as it was told: {listed}", value=wrong[0][0])
    return evidence.passed(f"runs with the {len(evidence.flags)} flags of the serving", value=len(evidence.flags))


def _names(evidence: Evidence) -> list[str] | None:
    """The models that `/v1/models` lists; none where it lists nothing."""
    body = evidence.exchange.response
    models = body.get("data") if isinstance(body, dict) else None
    if evidence.exchange.status != 200 or not isinstance(models, list):
        return None
    return [str(model.get("id")) for model in models if isinstance(model, dict)]
