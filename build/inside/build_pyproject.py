"""Builds a wheel by the backend that the source's pyproject.toml names. Runs in the builder container, without a network.

    build_pyproject.py PLAN OUT

PLAN is JSON: `source` is the patched tree, `environment` what the backend is told. OUT receives `built.whl` and `tools.json`. Ends
with 1 when the backend fails.
"""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def main(plan_file, out):
    """Run the backend through pip, and say what it was."""
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    out = Path(out).absolute()
    project = tomllib.loads((Path(plan["source"]) / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [Requirement(text).name for text in project["build-system"]["requires"]]
    try:
        tools = {name: version(name) for name in sorted({"pip", *wanted})}
    except PackageNotFoundError as error:
        print(f"forge: error: pyproject.toml asks for {error.name}, which the builder does not have", flush=True)
        return 3
    print(f"forge: {', '.join(f'{name} {found}' for name, found in tools.items())}", flush=True)
    folder = out / "wheel"
    folder.mkdir(parents=True)
    flags = [
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--check-build-dependencies",
        "--wheel-dir",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "wheel", *flags, plan["source"]]
    if subprocess.run(command, env={**os.environ, **plan["environment"]}, check=False).returncode != 0:
        return 1
    (built,) = folder.glob("*.whl")
    shutil.move(built, out / "built.whl")
    folder.rmdir()
    (out / "tools.json").write_text(json.dumps(tools, sort_keys=True), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
