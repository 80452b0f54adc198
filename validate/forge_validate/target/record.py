"""A target of ours: what a build record names, the only kind that can be promoted."""

from __future__ import annotations

from pathlib import Path

from forge_core import record
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import Deviation, ModelRef
from forge_validate.target import Recorded


def recorded(path: Path, *, profile: str, served: str, model: Path | None, usual_model: Path) -> tuple[Recorded, Path]:
    """The target a record names, and the model folder (`model`, else `usual_model`).

    Raises UsageError (2) without a record or a model, IntegrityError (5) for an edited record, and for a model folder
    that is not the recorded one unless `model` was given: then that is a deviation.
    """
    found = record.load(path)
    if found.profile != profile:
        raise UsageError(
            f"{path} is of profile {found.profile!r}, not {profile!r}", hint=f"`--profile {found.profile}`"
        )
    folder = model_folder(model, usual_model, built=found.model is not None)
    here = ModelRef.of_folder(found.model.name if found.model else served, folder)
    deviations = found.deviations
    if found.model is None:
        deviations += (_differs(here, "the record names no model"),)
    elif here.revision != found.model.revision:
        changed = _changed(found.model, here)
        if model is None:
            raise IntegrityError(
                f"{folder} is not the model of the record: {changed}",
                hint="build again, or judge it as it is with --model (a deviation: it will not be promoted)",
            )
        deviations += (_differs(here, changed),)
    target = Recorded(
        profile=profile,
        kind=found.kind,
        record=found.sha256,
        image=found.image,
        image_config=found.image_config,
        architectures=found.architectures,
        model=here,
        deviations=deviations,
    )
    return target, folder


def model_folder(model: Path | None, usual_model: Path, *, built: bool) -> Path:
    """The model folder that was given, else the usual one, which a build makes if `built`; raises UsageError."""
    folder = (model or usual_model).absolute()
    if not (folder / "config.json").is_file():
        hint = "`nox -s build -- --profile NAME` makes it" if built and not model else "name one with --model"
        raise UsageError(f"no model at {folder}: it holds no config.json", hint=hint)
    return folder


def _differs(model: ModelRef, detail: str) -> Deviation:
    return Deviation(kind="model-differs", subject=model.name, detail=detail)


def _changed(then: ModelRef, now: ModelRef) -> str:
    before, after = {f.path: f for f in then.files}, {f.path: f for f in now.files}
    parts = [f"{path} differs" for path in sorted(before.keys() & after.keys()) if before[path] != after[path]]
    parts += [f"{path} is missing" for path in sorted(before.keys() - after.keys())]
    parts += [f"{path} is new" for path in sorted(after.keys() - before.keys())]
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
