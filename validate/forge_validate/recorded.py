"""From files alone: exchanges judged again, and the promotion that a receipt allows made later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.console import Console
from forge_core.errors import ExitCode, UsageError
from forge_core.model import Frozen
from forge_validate import data, exchange, policy, report
from forge_validate import receipt as receipts
from forge_validate.bench import bench, bench_of_others
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.offers.see import PREFIX
from forge_validate.verdict import Verdict, decide

if TYPE_CHECKING:
    from forge_validate.promote import Promotion


class Judgement(Frozen):
    """What recorded exchanges come to. It names no image, so nothing can be promoted on it."""

    results: tuple[CheckResult, ...]
    verdict: Verdict


def judge(profile: str, places: Sequence[Path], console: Console, suite_name: str | None = None) -> Judgement:
    """Judge exchanges (files, or folders of them) under a profile and its suite, or another, by the code that judges live ones.

    What has no exchange is unmeasured. Raises UsageError for a file that is no exchange, an exchange of nothing that the
    suite asks, and two of one name.
    """
    exchanges = [(path, exchange.load(path)) for path in _files(places)]
    if profile in data.names("serving"):
        judged = bench(profile, suite_name=suite_name)
    else:
        # Somebody else's server: it was asked under the name it serves.
        judged = bench_of_others(profile, _asked_for(one for _, one in exchanges), suite_name=suite_name)
    cases = {case.name for case in judged.suite.cases}
    found: dict[str, Exchange] = {}
    for path, one in exchanges:
        family = one.name.partition("/")[0]
        if one.name not in cases and family not in judged.suite.families and not one.name.startswith(PREFIX):
            raise UsageError(f"{path}: {one.name!r} is no case and of no family of suites/{judged.suite.suite}.yaml")
        if one.name in found:
            raise UsageError(f"{path}: a second exchange named {one.name!r}")
        found[one.name] = one
    results = judged.judge(found.values())
    verdict = decide(results, judged.policy)
    report.show_results(console, results, judged.policy)
    console.say(f"verdict    {verdict.outcome}" + (f" ({verdict.kind})" if verdict.kind else ""), "bold")
    console.say(f"cause      {verdict.cause}")
    return Judgement(results=results, verdict=verdict)


def exit_code(found: Judgement) -> ExitCode:
    """0 for a pass, 1 otherwise."""
    return ExitCode.PASSED if found.verdict.outcome == "passed" else ExitCode.REFUSED


def promote(path: Path, profile: str | None, work: Callable[[str], Path], console: Console) -> Promotion:
    """Move the tags that a sealed receipt allows; raises as `receipt.load` and `promote.promote`.

    UsageError (2) when `profile` is given and is not the receipt's.
    """
    # Here, not above: judging needs no registry and nothing that speaks to one.
    from forge_validate import promote as promotion

    done = receipts.load(path)
    if profile not in (None, done.profile):
        raise UsageError(f"{path} is of profile {done.profile!r}, not {profile!r}")
    folder = work(done.profile)
    with console.step("promote", done.subject.name) as step:
        moved = promotion.promote(
            done,
            policy.load(done.profile),
            log=folder / "logs" / "promote.log",
            record=folder / promotion.FILE_NAME,
        )
        step.result(moved.reference)
    return moved


def _asked_for(exchanges: Iterable[Exchange]) -> str:
    """The model that most requests name; UsageError where none names one."""
    bodies = (one.request.body for one in exchanges)
    named = Counter(body["model"] for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str))
    if not named:
        raise UsageError("no exchange names a model", hint="judge the whole folder of a run")
    return str(named.most_common(1)[0][0])


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if not place.is_dir():
            yield place
        elif inside := sorted(place.glob("*.json")):
            yield from inside
        else:
            raise UsageError(f"{place} holds no exchange", hint="`validate` writes them to work/PROFILE/exchanges")
