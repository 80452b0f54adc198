"""Compile: wheels made here, from a patched tree, in a container of the builder image, network off, at fixed paths.

Equal inputs give equal bytes: the flags are the deterministic ones, and the packer adds neither time nor place. So a wheel is
known by a key over all that enters it, and one that was made of the same before is taken from the store.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from forge_build.compile import cache, schedule, sizes
from forge_build.compile.cache import Cache
from forge_build.compile.container import builder, copy_in, copy_out, follow, out_of_memory
from forge_build.compile.failure import failure
from forge_build.compile.flashinfer_jit import FlashInferJit
from forge_build.compile.progress import Progress
from forge_build.compile.pyproject import Pyproject
from forge_build.compile.recipe import DEPENDENCIES, OUTPUT, SOURCE, Order, Plan, Recipe
from forge_build.compile.schedule import share
from forge_build.compile.sgl_kernel import SglKernel
from forge_build.compile.wheel import file_name
from forge_build.manifest import Manifest
from forge_build.patch import PatchedTree
from forge_core.console import Console, Step, duration, size
from forge_core.engine import Engine
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import Deviation, canonical_sha256, file_sha256
from forge_core.store import Derived, Store

RECIPES: dict[str, Recipe] = {
    "flashinfer-jit": FlashInferJit(),
    "pyproject": Pyproject(),
    "sgl-kernel": SglKernel(),
}

_ENVIRONMENT = {
    "HOME": "/forge/home",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    # without it a process id becomes part of an ELF symbol (nvcc 13.0)
    "NVCC_APPEND_FLAGS": "--objdir-as-tempdir",
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
KEY_LABEL = "sm120-forge.key"
STORE_LABEL = "sm120-forge.store"


@dataclass(frozen=True)
class Wheel:
    """A wheel made here."""

    name: str
    path: Path
    file: str
    """File name as an installer wants it; in the store it is named by its sha256."""
    sha256: str
    size: int
    """Bytes."""
    key: str
    """Sha256 over all that entered it."""
    cached: bool
    seconds: float
    """What the compile took when it was made."""
    version: str
    tools: Mapping[str, str] = field(default_factory=dict)
    """Version of each tool and library that it was compiled with."""
    deviations: tuple[Deviation, ...] = ()
    """What is unusual about how it was made."""


def compile_wheel(
    name: str,
    manifest: Manifest,
    tree: PatchedTree,
    builder_image: str,
    engine: Engine,
    store: Store,
    *,
    log: Path,
    console: Console,
    keep: bool = False,
    subset: str | None = None,
    ensure_builder: Callable[[], object] | None = None,
) -> Wheel:
    """Compile and pack one wheel of the manifest, or take the one that equal inputs gave before.

    With `subset` a recipe that knows it compiles that part alone and says so in the wheel's version. `builder_image` is a tag that
    carries the key of its content; `ensure_builder` is called before the image is needed. Raises Refused (1) with the first
    compiler error when a unit does not compile, UsageError (2) for what no recipe knows, EnvironmentFailure (3) when memory, disk
    or engine fail, IntegrityError (5) when a stored wheel has changed.
    """
    order, recipe = _order(name, manifest, tree, subset)
    plan = recipe.plan(order)
    compiler_cache = cache.chosen(engine)
    key = wheel_key(order, recipe, plan, builder_image, compiler_cache)
    file = file_name(name, plan.version, plan.tag)
    parts = f"{len(plan.outputs)} modules" if order.spec.serves else ", ".join(order.spec.modules)
    told = f"{parts or order.subset or 'all'}"
    if order.spec.architectures:
        told += f" for {', '.join(order.spec.architectures)}"
    with console.step("compile", f"{name} {plan.version}: {told}, network off") as step:
        with store.derived_lock("wheel", key, waiting=step.waiting_for_another):
            made = store.derived_get("wheel", key)
            cached = made is not None
            if made is None:
                if ensure_builder is not None:
                    ensure_builder()
                made = _make(
                    order,
                    recipe,
                    plan,
                    key,
                    builder_image,
                    engine,
                    store,
                    compiler_cache,
                    log=log,
                    step=step,
                    keep=keep,
                )
        seconds, amount = float(made.meta["seconds"]), made.path.stat().st_size
        step.result(f"{file}, {size(amount)}" + (f", made before in {duration(seconds)}" if cached else ""))
    return Wheel(
        name,
        made.path,
        file,
        made.sha256,
        amount,
        key,
        cached,
        seconds,
        plan.version,
        dict(made.meta["tools"]),
        (*(compiler_cache.deviations(file) if compiler_cache else ()), *_deviations(order, plan, file)),
    )


def narrowed(manifest: Manifest, subset: str | None) -> Manifest:
    """The manifest as a build of that subset sees it: the sections of the wheels that are compiled in part.

    Raises UsageError unless the recipe of one of the manifest's wheels at least knows the part.
    """
    if subset is None:
        return manifest
    recipes = {name: RECIPES[spec.recipe] for name, spec in manifest.wheels.items() if spec.recipe in RECIPES}
    concerned = {name: recipe for name, recipe in recipes.items() if subset in recipe.subsets}
    if not concerned:
        known = sorted({part for recipe in recipes.values() for part in recipe.subsets})
        raise UsageError(
            f"{manifest.profile}: no wheel has a subset {subset!r}",
            hint=f"known: {', '.join(known)}" if known else "leave --subset away",
        )
    wheels = {
        name: concerned[name].narrowed(spec, f"wheels.{name}") if name in concerned else spec
        for name, spec in manifest.wheels.items()
    }
    return manifest.model_copy(update={"wheels": wheels})


def wheel_key(order: Order, recipe: Recipe, plan: Plan, builder_image: str, compiler_cache: Cache | None = None) -> str:
    """Sha256 (hex) over all that decides the wheel's bytes; neither the scheduler nor a local ccache does."""
    dependencies = {name: item.tree for name, item in order.tree.dependencies.items()}
    return canonical_sha256(
        {
            "name": order.name,
            "version": plan.version,
            "source": [order.tree.name, order.tree.tree, order.tree.series, order.tree.patched_tree],
            **({"dependencies": dependencies} if dependencies else {}),
            "spec": order.spec.model_dump(mode="json", exclude={"check"}),
            "recipe": [file_sha256(path) for path in (*recipe.sources, plan.script)],
            "arguments": plan.arguments,
            "environment": _environment(order, plan),
            "builder": builder_image,
            "tag": plan.tag,
            **({"cache": compiler_cache.identity} if compiler_cache and compiler_cache.identity else {}),
        }
    )


def _order(name: str, manifest: Manifest, tree: PatchedTree, subset: str | None) -> tuple[Order, Recipe]:
    spec = manifest.wheels.get(name)
    if spec is None:
        raise UsageError(f"the manifest {manifest.profile!r} has no wheel {name!r}")
    recipe = RECIPES.get(spec.recipe)
    if recipe is None:
        raise UsageError(
            f"wheels.{name}.recipe: nothing here compiles {spec.recipe!r}", hint=f"recipes: {', '.join(RECIPES)}"
        )
    return Order(name, spec, manifest, tree, subset if subset in recipe.subsets else None), recipe


def _deviations(order: Order, plan: Plan, file: str) -> tuple[Deviation, ...]:
    """A part is never the whole: a recipe that took the subset says so in the version."""
    if plan.version == order.tree.version:
        return ()
    detail = f"only the part {order.subset!r} of {order.name} is compiled"
    return (Deviation(kind="subset", subject=file, detail=detail),)


def _environment(order: Order, plan: Plan) -> dict[str, str]:
    """What the compiler sees; nothing else of any machine does."""
    return {**_ENVIRONMENT, "SOURCE_DATE_EPOCH": str(order.manifest.epoch), **plan.environment}


def _make(
    order: Order,
    recipe: Recipe,
    plan: Plan,
    key: str,
    image: str,
    engine: Engine,
    store: Store,
    compiler_cache: Cache | None,
    *,
    log: Path,
    step: Step,
    keep: bool,
) -> Derived:
    memory, cores = share(engine)
    step.detail(f"{cores} cores, {size(memory)} of memory, log {log}")
    if plan.peak > memory:
        step.say(f"the largest unit is known to need {size(plan.peak)}, there are {size(memory)}")
    told = compiler_cache.plan(image) if compiler_cache else None
    scheduler = schedule.inside(memory, cores, sizes.known(store), cache=told)
    progress = Progress(total=plan.units)
    # The lock of the key is the store's: another store on the same engine may be compiling the same thing.
    mark = {KEY_LABEL: key, STORE_LABEL: f"{platform.node()}:{store.root}"}
    script = f"/forge/inside/{plan.script.name}"
    argv = ["python3", script, "/forge/plan.json", OUTPUT]

    def show() -> None:
        while progress.notes:
            step.say(progress.notes.pop(0))
        if progress.done:
            step.progress(progress.done, progress.total, unit="units", note=progress.now)
        else:
            step.waiting(f"0 of {progress.total} units" + (f", {progress.now}" if progress.now else ""))

    def on_line(line: str) -> None:
        progress.feed(line)
        show()

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wheel-", dir=store.root / "partial")))
        volumes = stack.enter_context(compiler_cache.volumes()) if compiler_cache else None
        with builder(
            engine,
            image,
            argv,
            _environment(order, plan),
            name=order.name,
            keep=keep,
            mark=mark,
            memory=memory,
            volumes=volumes,
        ) as container:
            arguments = json.dumps({**plan.arguments, "scheduler": scheduler.plan}).encode()
            files: dict[str, Path | bytes] = {SOURCE: order.tree.path, script: plan.script, **scheduler.files}
            files |= compiler_cache.files if compiler_cache else {}
            files |= {f"{DEPENDENCIES}/{name}": item.path for name, item in order.tree.dependencies.items()}
            copy_in(container, files | {"/forge/plan.json": arguments}, epoch=order.manifest.epoch)
            status = follow(container, log, on_line, show)
            # also of a compile that failed: the next one knows more
            sizes.learn(store, progress.measured)
            _tell(step, progress)
            if keep:
                step.say(f"the container {container.name} is kept")
            if status != 0:
                raise failure(order, progress, status, out_of_memory(container), memory, log)
            results = copy_out(container, OUTPUT, folder)
        if missing := [name for name in (*plan.outputs, "tools.json") if not (results / name).is_file()]:
            raise IntegrityError(f"the compile ended well but left no {', '.join(missing)}", log=log)
        tools = json.loads((results / "tools.json").read_text(encoding="utf-8"))
        recipe.pack(order, results, tools, folder / "wheel")
        meta = {"name": order.name, "version": plan.version, "seconds": round(step.elapsed, 1), "tools": tools}
        return store.derived_put("wheel", key, folder / "wheel", meta, move=True)


def _tell(step: Step, progress: Progress) -> None:
    """What the compile took, once it has ended."""
    # nothing was seen where the configuration failed, before any unit
    if (found := progress.summary) and found["free"] is not None:
        step.say(
            f"{found['units']} units in {duration(found['wall'])}, {duration(found['cpu'])} of CPU time; "
            f"at most {size(found['peak'])} at once, never under {size(found['free'])} free"
        )
    if progress.hits:
        step.say(progress.hits)


__all__ = ["RECIPES", "Wheel", "compile_wheel", "narrowed", "share", "wheel_key"]
