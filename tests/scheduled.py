"""A compile with the scheduler, run as a process of its own as in the builder: `scheduled.py FOLDER [NINJA ARGS]`.

FOLDER holds `plan.json` (the scheduler's plan) and `units.json` (name -> what fake_compiler takes).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "build" / "inside"))  # in a container `scheduling` lies beside

from scheduling import Scheduler  # noqa: E402

FAKE = [sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_compiler.py"))]


def write(folder, units, command):
    """The build files: one unit per file, all into one target."""
    lines = [
        "rule cc",
        f"  command = {command} -gencode=arch=compute_120a,code=sm_120a -c $in -o $out",
        "  description = CC $out",
    ]
    for name, unit in units.items():
        folder.joinpath(f"{name}.cu").write_text(json.dumps(unit))
        lines.append(f"build {name}.o: cc {folder / name}.cu")
    folder.joinpath("build.ninja").write_text("\n".join(lines) + "\n")


def main(folder, *options):
    folder = Path(folder)
    plan = json.loads((folder / "plan.json").read_text())
    units = json.loads((folder / "units.json").read_text())
    fake = folder / "fakecc"
    fake.write_text(f'#!/bin/sh\nexec {" ".join(FAKE)} "$@"\n')
    fake.chmod(0o755)
    with Scheduler(plan, {"fakecc": "1.0"}) as scheduler:
        write(folder, units, scheduler.launched(fake))
        ninja = ["ninja", "-C", str(folder), f"-j{scheduler.window}", *options]
        return subprocess.run(ninja, env=os.environ | scheduler.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
