"""What changes between two locks, named for people."""

from __future__ import annotations

from forge_build.lock import Lock
from forge_core.model import Frozen


class Change(Frozen):
    """One thing that a new lock names differently."""

    section: str
    """For example `wheels.runtime`."""
    name: str
    before: str | None
    """Version or tree id; none: it is new."""
    after: str | None
    """None: it is gone."""

    def __str__(self) -> str:
        return f"{self.section}: {self.name}: {self.before or '(new)'} -> {self.after or '(gone)'}"


def diff(previous: Lock | None, new: Lock) -> list[Change]:
    """Every change from `previous` (none: there was no lock) to `new`, by section and name."""
    before = _flat(previous) if previous else {}
    after = _flat(new)
    changes = []
    for key in sorted(before.keys() | after.keys()):
        old, now = before.get(key), after.get(key)
        if old != now:
            shown_old, shown_now = (old or (None, ""))[0], (now or (None, ""))[0]
            if old and now and shown_old == shown_now:
                # the same version with other bytes: show the bytes
                shown_old, shown_now = f"{old[0]} ({old[1][:12]})", f"{now[0]} ({now[1][:12]})"
            changes.append(Change(section=key[0], name=key[1], before=shown_old, after=shown_now))
    return changes


def _flat(lock: Lock) -> dict[tuple[str, str], tuple[str, str]]:
    """(section, name) -> (what people call it, its identity)."""
    flat: dict[tuple[str, str], tuple[str, str]] = {}
    for use, wheels in lock.wheels.items():
        flat |= {(f"wheels.{use}", w.name): (w.version, w.sha256) for w in wheels}
    for use, debs in lock.debs.items():
        flat |= {(f"debs.{use}", d.name): (d.version, d.sha256) for d in debs}
    for name, source in lock.sources.items():
        version = source.wheel.version if source.wheel else str(source.commit)
        flat["sources", name] = (version, source.tree)
        flat["sources", f"{name} patched"] = (source.patched_tree[:12], source.patched_tree)
        for part, item in source.dependencies.items():
            state = "dropped" if item.dropped else "unlocked" if item.unlocked else str(item.commit)
            flat["sources", f"{name}/{part}"] = (state, item.taken or item.dropped or str(item.unlocked))
    return flat
