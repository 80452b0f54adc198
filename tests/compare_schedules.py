"""Compares ways to schedule a compile on a machine that is small for its units; prints the table of docs/compiling.md.

    python tests/compare_schedules.py [WAY...]

Every run is a builder container with 3 GB of memory, an eighth of the machine whose real units are scaled down here. The
compilers are fake: each grows to the memory it is told to over the time it is told to, and sleeps meanwhile, so that what else
runs on the machine does not count. Needs an engine that holds a builder image.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

MEMORY = 3_000_000_000
FLOOR = 125_000_000
UNKNOWN_MB = 375
"""An eighth of what a CUDA unit is taken to need when nothing is known of it."""
LIGHT = {f"light{n:02}": {"mb": 325, "seconds": 4} for n in range(12)}
HEAVY = {"heavy0": {"mb": 1760, "seconds": 20}}
LOADS = {
    "one heavy, 12 light": LIGHT | HEAVY,
    "two heavy, 12 light": LIGHT | HEAVY | {"heavy1": {"mb": 1940, "seconds": 22}},
}
WAYS = ("-j1", "-j2", "ours", "ours, sizes unknown")


def watch(free, seen, end):
    """The least that is left at any moment."""
    while not end.wait(0.05):
        seen["free"] = min(seen.get("free", MEMORY), free())


def inside(way, load):
    """One run, in the container."""
    from scheduled import write
    from scheduling import Scheduler, memory

    folder, units = Path("/forge/work"), LOADS[load]
    folder.mkdir()
    fake = f"{sys.executable} -I -S /forge/inside/fake_compiler.py"
    seen, end = {}, threading.Event()
    start = memory.free()
    watcher = threading.Thread(target=watch, args=(memory.free, seen, end))
    watcher.start()
    began = time.monotonic()
    if way.startswith("-j"):
        write(folder, units, fake)
        status = subprocess.run(["ninja", "-C", str(folder), way]).returncode
    else:
        known = {} if "unknown" in way else {name: unit["mb"] for name, unit in units.items()}
        sizes = {
            f"work/{name}.cu|sm_120a|{Path(sys.executable).name}": known.get(name, UNKNOWN_MB) * 1_000_000
            for name in units
        }
        with Scheduler({"slots": 2, "floor": FLOOR, "budget": start - FLOOR, "sizes": sizes}) as scheduler:
            write(folder, units, scheduler.launched(fake))
            ninja = ["ninja", "-C", str(folder), f"-j{scheduler.window}"]
            status = subprocess.run(ninja, env=os.environ | scheduler.environment).returncode
    wall = time.monotonic() - began
    end.set()
    watcher.join()
    print("result:", json.dumps({"wall": wall, "peak": start - seen["free"], "free": seen["free"], "status": status}))


def main(ways):
    """Every load in every way, one after another."""
    from forge_build.compile.container import builder, copy_in, follow, out_of_memory
    from forge_build.compile.schedule import folder
    from forge_core.cli import project_root
    from forge_core.engine import connect

    engine, here = connect(), Path(__file__)
    (image, *_) = [tag for i in engine.client.images.list() for tag in i.tags if tag.startswith("sm120-forge/builder:")]
    files = {f"/forge/inside/scheduling/{path.name}": path for path in folder().glob("*.py")}
    files |= {f"/forge/inside/{name}": here.with_name(name) for name in (here.name, "scheduled.py", "fake_compiler.py")}
    print("| units | way | wall s | peak GB | least free GB | |\n|---|---|---|---|---|---|")
    log = project_root() / "work" / "compare-schedules.log"
    for load in LOADS:
        for way in ways:
            argv = ["python3", f"/forge/inside/{here.name}", "inside", way, load]
            lines = []
            with builder(engine, image, argv, {}, name="compare", keep=False, memory=MEMORY) as container:
                copy_in(container, files, epoch=0)
                follow(container, log, lines.append)
                killed = out_of_memory(container)
            found = [json.loads(line[8:]) for line in lines if line.startswith("result: ")]
            if not found:
                print("\n".join(lines[-12:]), file=sys.stderr)
                continue
            again = [json.loads(line.partition(": ")[2])["again"] for line in lines if '"event": "summary"' in line]
            told = ["a compiler killed by the kernel"] if killed else []
            told += [f"{again[0]} given up and compiled again"] if again and again[0] else []
            told += ["failed"] if found[0]["status"] else []
            row = (
                load,
                way,
                f"{found[0]['wall']:.0f}",
                f"{found[0]['peak'] / 1e9:.2f}",
                f"{found[0]['free'] / 1e9:.2f}",
            )
            print("|", " | ".join((*row, ", ".join(told))), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        inside(*sys.argv[2:])
    else:
        main(sys.argv[1:] or WAYS)
