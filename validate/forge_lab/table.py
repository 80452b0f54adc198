"""docs/gate-power.md, from the journal and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from forge_core.console import duration
from forge_lab import bounds
from forge_lab.held_out import hard
from forge_lab.journal import Entry, Measured
from forge_lab.mutants import Hardness
from forge_validate.families import FAMILIES

CASES = "cases"
"""All checks of single cases, as one column."""


def family(check: str) -> str:
    """The column of a check: its family, or that of all cases."""
    name = check.partition("/")[0]
    return name if name in FAMILIES else CASES


def without(entry: Entry, left_out: str) -> bool:
    """Whether a mutant would escape if a family (or the cases) were not asked."""
    missing = [one for one in entry.checks if _kills(one.outcome) and one.required]
    return bool(missing) and all(family(one.check) == left_out for one in missing)


def power(entries: Sequence[Entry], rule: Hardness) -> str:
    """The whole page from the entries of the plan `power`, in order of the mutants."""
    found = [entry for entry in entries if entry.trial.plan == "power" and entry.trial.mutant is not None]
    lines = [*_head(found, rule), *_summary(found, rule), *_matrix(found, rule), *_ablation(found, rule)]
    rest = [entry for entry in entries if entry.trial.plan == "rare"]
    runs = [entry for entry in entries if entry.trial.plan == "clean"]
    return "\n".join([*lines, *_rare(rest), *_clean(runs)]) + "\n"


def escapes(entries: Iterable[Entry], rule: Hardness) -> list[Entry]:
    """Hard mutants that the gate let pass."""
    return [entry for entry in entries if not entry.killed and _hard(entry, rule)]


def right(entry: Entry) -> bool:
    """Whether a killed mutant was named as one of the kinds it expects."""
    return entry.trial.mutant is not None and entry.kind in entry.trial.mutant.expects


def _head(found: Sequence[Entry], rule: Hardness) -> Iterator[str]:
    yield "# The gate's power, measured"
    yield ""
    yield "<!-- Written by `nox -s power` from validate/forge_lab/power.jsonl. Change that, or the code; not this page. -->"
    yield ""
    yield (
        "A real SGLang is made wrong in one way at a time "
        "([mutants.yaml](../validate/forge_lab/faults/mutants.yaml)) while it runs, and the gate is asked. "
        "How it is done stands in [power.md](power.md)."
    )
    yield ""
    if not found:
        yield "No mutant was run."
        yield ""
        return
    subjects = {(entry.subject.image, entry.subject.code, entry.subject.suite) for entry in found}
    days = sorted({f"{entry.when:%Y-%m-%d}" for entry in found})
    yield (
        f"Run {' and '.join(days)}; suite `{found[0].trial.suite}`; {len(subjects)} "
        f"combination{'s' if len(subjects) > 1 else ''} of image, code and suite, the last: image `{found[-1].subject.image}`, "
        f"code `{found[-1].subject.code[:12]}`, suite `{found[-1].subject.suite[:12]}`."
    )
    yield ""
    yield (
        f"A mutant is **hard** if the held-out probe finds a number that is not finite "
        f"or at least {rule.share.value:.0%} other likeliest tokens, if a request gets no answer there, "
        "or if it breaks a promise of the protocol."
    )
    yield ""


def _summary(found: Sequence[Entry], rule: Hardness) -> Iterator[str]:
    if not found:
        return
    hards = [entry for entry in found if _hard(entry, rule)]
    milds = [entry for entry in found if not _hard(entry, rule)]
    yield "| | mutants | killed | named right | escaped | killed by the seeds' test |"
    yield "|---|---|---|---|---|---|"
    for name, group in (("hard", hards), ("mild", milds), ("all", list(found))):
        killed = [entry for entry in group if entry.killed]
        named = sum(right(entry) for entry in killed)
        seeds = sum(1 for entry in group if entry.baseline is not None and not entry.baseline.passed)
        share = f"{named} ({named / len(killed):.0%})" if killed else "0"
        yield f"| {name} | {len(group)} | {len(killed)} | {share} | {len(group) - len(killed)} | {seeds} |"
    yield ""
    seconds, tokens = sum(e.seconds for e in found), sum(e.prompt_tokens + e.reply_tokens for e in found)
    yield (
        f"The suite was asked {len(found)} times: {duration(seconds)}, "
        f"{sum(e.requests for e in found):,} requests, {tokens:,} tokens; "
        f"{duration(seconds / len(found))} for each mutant (boots, the seeds' test and the held-out probe not counted)."
    )
    yield ""
    noise = [entry.noise for entry in found if entry.noise is not None]
    if noise:
        yield (
            "The held-out probe on the healthy server, twice: at most "
            f"{max(n.share for n in noise):.1%} of the tokens of one way of asking differed."
        )
        yield ""


def _matrix(found: Sequence[Entry], rule: Hardness) -> Iterator[str]:
    if not found:
        return
    columns = _columns(found)
    yield "## Mutants and checks"
    yield ""
    yield (
        "A number is how many required checks of a family did not pass; a dot is a family that passed, nothing one that was "
        "not asked. "
        "`share`: held-out tokens whose likeliest is another. `idle`: the fault did nothing while it was asked."
    )
    yield ""
    yield f"| class | mutant | hard | share | verdict | named | right | {' | '.join(columns)} | seeds |"
    yield "|" + "---|" * (len(columns) + 8)
    for entry in found:
        mutant = entry.trial.mutant
        assert mutant is not None
        verdict = "killed" if entry.killed else "**escaped**" if _hard(entry, rule) else "escaped"
        if entry.fired is False:
            verdict += ", idle"
        cells = [_cell(entry, column) for column in columns]
        named = ("yes" if right(entry) else "no") if entry.killed else ""
        yield (
            f"| {mutant.of} | `{mutant.name}` | {'yes' if _hard(entry, rule) else ''} | {_share(entry.measured)} | {verdict} | "
            f"{entry.kind or ''} | {named} | {' | '.join(cells)} | {_seeds(entry)} |"
        )
    yield ""


def _ablation(found: Sequence[Entry], rule: Hardness) -> Iterator[str]:
    whole = [entry for entry in found if entry.trial.checks == "all"]
    if not whole:
        return
    yield "## What each family kills alone"
    yield ""
    yield "What would escape if the family were left out; the other families would have let it pass."
    yield ""
    yield "| left out | escape then | of them hard | seconds in the mean |"
    yield "|---|---|---|---|"
    for column in _columns(whole):
        gone = [entry for entry in whole if without(entry, column)]
        names = ", ".join(f"`{entry.trial.name}`" for entry in gone) or "none"
        took = bounds.mean(entry.families[column] for entry in whole if column in entry.families)
        yield f"| {column} | {names} | {sum(_hard(entry, rule) for entry in gone)} | {took:.1f} |"
    yield ""


def _rare(found: Sequence[Entry]) -> Iterator[str]:
    if not found:
        return
    yield "## Corruption in one of many requests"
    yield ""
    yield (
        "Closed form: with one corrupted request in N, each by itself, k requests hold at least one with probability "
        "1 - (1 - 1/N)^k; k is the number of requests in which the model spoke. It says when there was "
        "something to catch; a corrupted answer may still pass."
    )
    yield ""
    yield "| one in | runs | caught | rate, 95 % between | closed form | requests in the mean |"
    yield "|---|---|---|---|---|---|"
    groups: dict[int, list[Entry]] = {}
    for entry in found:
        assert entry.trial.mutant is not None
        groups.setdefault(int(entry.trial.mutant.parameters["one_in"]), []).append(entry)
    for one_in, group in sorted(groups.items()):
        caught = sum(entry.killed for entry in group)
        low, high = bounds.interval(caught, len(group))
        form = bounds.mean(bounds.caught(entry.generating, one_in) for entry in group)
        asked = bounds.mean(entry.generating for entry in group)
        yield (
            f"| {one_in} | {len(group)} | {caught} | {caught / len(group):.2f}, {low:.2f} to {high:.2f} | {form:.2f} "
            f"| {asked:.0f} |"
        )
    yield ""


def _clean(found: Sequence[Entry]) -> Iterator[str]:
    if not found:
        return
    alarms = [entry for entry in found if entry.killed]
    yield "## Clean runs: false alarms"
    yield ""
    yield (
        f"The same suite on the same server without a fault, {len(found)} times, seeds {_range(found)}: "
        f"{len(alarms)} false alarm{'s' if len(alarms) != 1 else ''}. With 95 % confidence the rate is at most "
        f"{bounds.upper(len(alarms), len(found)):.2%} of the runs (exact bound; for this suite, this server and this model)."
    )
    yield ""
    yield "| number format | style | runs | alarms |"
    yield "|---|---|---|---|"
    groups = Counter((entry.trial.dtype, entry.trial.style) for entry in found)
    wrong = Counter((entry.trial.dtype, entry.trial.style) for entry in alarms)
    for (dtype, style), count in sorted(groups.items()):
        yield f"| {dtype} | {style} | {count} | {wrong[dtype, style]} |"
    yield ""
    asked, failed = _by_check(found)
    if failed:
        yield "| check | asked | alarms | at most, with 95 % confidence |"
        yield "|---|---|---|---|"
        for check, count in sorted(failed.items()):
            yield f"| {check} | {asked[check]} | {count} | {bounds.upper(count, asked[check]):.2%} |"
        yield ""
    total = sum(asked.values())
    if total:
        yield f"{len(asked)} required checks, {total:,} times asked, {sum(failed.values())} without a pass."
        yield ""


def _by_check(found: Iterable[Entry]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    asked: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for entry in found:
        for one in entry.checks:
            if one.required:
                asked[one.check] += 1
                failed[one.check] += _kills(one.outcome)
    return asked, Counter({check: count for check, count in failed.items() if count})


def _columns(found: Iterable[Entry]) -> list[str]:
    """The cases, then the families in the order in which they were asked."""
    seen: dict[str, None] = {CASES: None}
    for entry in found:
        for one in entry.checks:
            seen.setdefault(family(one.check))
    return list(seen)


def _cell(entry: Entry, column: str) -> str:
    mine = [one for one in entry.checks if family(one.check) == column and one.required]
    if not mine:
        return ""
    return str(sum(_kills(one.outcome) for one in mine) or ".")


def _seeds(entry: Entry) -> str:
    if entry.baseline is None:
        return ""
    return "passed" if entry.baseline.passed else "failed"


def _share(measured: Measured | None) -> str:
    if measured is None:
        return ""
    words = [f"{measured.share:.1%}"]
    if measured.nonfinite:
        words.append("not finite")
    if measured.unanswered:
        words.append(f"{measured.unanswered} unanswered")
    return ", ".join(words)


def _hard(entry: Entry, rule: Hardness) -> bool:
    assert entry.trial.mutant is not None
    return hard(entry.trial.mutant, entry.measured, rule)


def _kills(outcome: str) -> bool:
    return outcome not in ("passed", "warned")


def _range(found: Sequence[Entry]) -> str:
    seeds = [entry.trial.seed for entry in found if entry.trial.seed is not None]
    return f"{min(seeds)} to {max(seeds)}" if seeds else "of the suite"
