"""Runs in the builder container: has FlashInfer describe modules, compiles them with ninja, leaves the shared objects in OUT.

Usage: compile_flashinfer.py OUT NAME=MODULE:FUNCTION...   with the source tree in /forge/src.
Standard library and FlashInfer only; ninja's lines go to stdout as they come.
"""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main(out, *units):
    sys.path.insert(0, "/forge/src")
    specs = []
    for unit in units:
        name, _, place = unit.partition("=")
        module, _, function = place.partition(":")
        spec = getattr(importlib.import_module(module), function)()
        if spec.name != name:
            print(f"error: {place} describes {spec.name}, not {name}")
            return 2
        spec.write_ninja()
        specs.append(spec)
    total = sum(len(spec.sources) + 1 for spec in specs)
    print(f"forge: {total} units in {len(specs)} modules", flush=True)
    done = 0
    for spec in specs:
        print(f"forge: module {spec.name}", flush=True)
        # %f of %t of this module, counted on over all modules by the reader
        env = os.environ | {"NINJA_STATUS": f"forge: unit {done}+%f of {total}: "}
        command = ["ninja", "-v", "-j", os.environ["MAX_JOBS"], "-C", str(spec.build_dir), "-f", str(spec.ninja_path)]
        status = subprocess.run(command, env=env, stderr=subprocess.STDOUT, check=False).returncode
        if status:
            return status
        done += len(spec.sources) + 1
        target = Path(out) / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True)
        shutil.copyfile(spec.jit_library_path, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
