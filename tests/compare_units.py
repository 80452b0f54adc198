"""Compares ways to schedule the FP4 part of sgl-kernel with the real compilers; prints the table of docs/compiling.md.

    python tests/compare_units.py [one|two] [WAY...]

Every run is a builder container as a build of the profile sm120 has it: the same memory, the same patched sources, no compiler
cache. Run it after `build --profile sm120 --subset fp4`, whose inputs and builder image it takes, on
a machine that does nothing else.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SETS = {"one": ("one heavy, 5 light", "nvfp4_blockwise_moe"), "two": ("two heavy, 5 light", None)}
"""Name on the command line -> name in the table, the unit that is left out."""
WAYS = ("-j1", "-j2", "ours")
PROFILE = "sm120"


def watch(free, seen, end):
    """The least that is left at any moment."""
    while not end.wait(0.1):
        seen["free"] = min(seen["free"], free())


def inside(way, left_out):
    """One run, in the container: configure, then compile under a watch. The configuration is not counted."""
    import compile_sgl_kernel as own
    from scheduling import Scheduler, memory

    plan = json.loads(Path("/forge/plan.json").read_text())
    home = own.cuda_home()
    own.complete(home)
    os.environ |= {"CUDA_HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    scheduler = Scheduler(plan["scheduler"], own.tools(home))
    defined = own.definitions(plan, home) | {
        "CMAKE_BUILD_TYPE": "Release",
        "Python_EXECUTABLE": sys.executable,
        "SKBUILD_SABI_COMPONENT": "Development.SABIModule",
        "SKBUILD_SABI_VERSION": "3.10",
    }
    launched = scheduler.cmake_options if way == "ours" else []
    command = ["cmake", "-G", "Ninja", "-S", plan["source"], "-B", plan["build"], *launched]
    subprocess.run([*command, *(f"-D{name}={value}" for name, value in defined.items())], check=True)
    ninja = ["ninja", "-C", plan["build"]]
    listed = subprocess.run([*ninja, "-t", "targets", "all"], capture_output=True, text=True, check=True).stdout
    targets = [line.partition(": ")[0] for line in listed.splitlines() if ": CXX_" in line or ": CUDA_" in line]
    targets = [name for name in targets if name.endswith(".o") and (not left_out or left_out not in name)]
    start, end = memory.free(), threading.Event()
    seen = {"free": start}
    watcher = threading.Thread(target=watch, args=(memory.free, seen, end))
    watcher.start()
    began = time.monotonic()
    if way == "ours":
        with scheduler:
            status = subprocess.run([*ninja, f"-j{scheduler.window}", *targets], env=os.environ | scheduler.environment)
    else:
        status = subprocess.run([*ninja, way, *targets])
    wall = time.monotonic() - began
    end.set()
    watcher.join()
    found = {"wall": wall, "peak": start - seen["free"], "free": seen["free"], "status": status.returncode}
    print("result:", json.dumps(found | {"units": len(targets)}))


def main(sets, ways):
    """Every set in every way, one after another."""
    from forge_build import base, image, lock, manifest, steps
    from forge_build import compile as stage
    from forge_build.compile import schedule, sizes
    from forge_build.compile.container import builder, copy_in, follow, out_of_memory
    from forge_build.compile.recipe import DEPENDENCIES, SOURCE
    from forge_build.fetch import fetch
    from forge_core.cli import work_folder
    from forge_core.console import Console
    from forge_core.engine import connect
    from forge_core.store import Store

    engine, console, store, here = connect(), Console(), Store.open(), Path(__file__)
    plan = stage.narrowed(manifest.load(PROFILE), "fp4")
    print("| units | way | wall s | peak GB | least free GB | |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        locked = lock.load(plan)
        inputs = fetch(plan, locked, store, offline=True, console=console)
        logs = work_folder(PROFILE) / "logs"
        root = base.build("builder", plan, inputs, log=logs / "base.log", console=console)
        wheels, log = locked.wheels["builder"], logs / "builder.log"
        tag = image.builder(plan, inputs, root, wheels, engine, store, log=log, console=console)
        tree = steps.patch_sources(plan, locked, inputs, Path(scratch), console)["sgl-kernel"]
        order, recipe = stage._order("sgl-kernel", plan, tree, "fp4")
        given = recipe.plan(order)
        for load, left_out in (SETS[name] for name in sets):
            for way in ways:
                memory, cores = schedule.share(engine)
                scheduler = schedule.inside(memory, cores, sizes.known(store))
                files = {SOURCE: tree.path, "/forge/inside/compile_sgl_kernel.py": given.script, **scheduler.files}
                files |= {f"{DEPENDENCIES}/{name}": item.path for name, item in tree.dependencies.items()}
                files |= {f"/forge/inside/{here.name}": here}
                files |= {"/forge/plan.json": json.dumps({**given.arguments, "scheduler": scheduler.plan}).encode()}
                argv = ["python3", f"/forge/inside/{here.name}", "inside", way, left_out or ""]
                environment, lines = stage._environment(order, given), []
                with builder(engine, tag, argv, environment, name="compare", keep=False, memory=memory) as container:
                    copy_in(container, files, epoch=plan.epoch)
                    follow(container, logs / "compare-units.log", lines.append)
                    killed = out_of_memory(container)
                report(load, way, lines, killed)


def report(load, way, lines, killed):
    """A line of the table."""
    found = [json.loads(line[8:]) for line in lines if line.startswith("result: ")]
    if not found:
        print("\n".join(lines[-12:]), file=sys.stderr)
        print(f"| {load} | {way} | | | | ended without a result{', memory' if killed else ''} |", flush=True)
        return
    amounts = f"{found[0]['wall']:.0f} | {found[0]['peak'] / 1e9:.2f} | {found[0]['free'] / 1e9:.2f}"
    told = ["a compiler killed by the kernel"] if killed else []
    told += ["failed"] if found[0]["status"] else []
    print(f"| {load} | {way} | {amounts} | {', '.join(told)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(*sys.argv[2:])
    else:
        wanted = sys.argv[1:]
        main([name for name in SETS if name in wanted] or SETS, [way for way in wanted if way not in SETS] or WAYS)
