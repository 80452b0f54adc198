"""Exit codes are an interface."""

from pathlib import Path

from forge_core import errors
from forge_core.errors import ExitCode, ForgeError


def test_codes() -> None:
    assert {c.name: c.value for c in ExitCode} == {
        "PASSED": 0,
        "REFUSED": 1,
        "USAGE": 2,
        "ENVIRONMENT": 3,
        "INCONCLUSIVE": 4,
        "INTEGRITY": 5,
        "INTERRUPTED": 130,
    }


def test_every_class_has_a_code_of_its_own() -> None:
    classes = [errors.Refused, errors.UsageError, errors.EnvironmentFailure, errors.Inconclusive, errors.IntegrityError]
    assert [c.exit_code for c in classes] == [1, 2, 3, 4, 5]


def test_an_error_carries_the_way_out() -> None:
    error = errors.Refused("no", hint="do", log=Path("/x.log"), details=("a", "b"))
    assert isinstance(error, ForgeError) and str(error) == "no"
    assert (error.message, error.hint, error.log, error.details) == ("no", "do", Path("/x.log"), ("a", "b"))
