"""Runs in the runtime image, without network and without a GPU: prints as JSON what it sees; judging is done outside.

Usage: image_check.py REQUEST   (JSON: imports, command, modules, cuda)
Standard library and what the image holds only.
"""

import base64
import concurrent.futures
import csv
import hashlib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import traceback
from pathlib import Path


def main(request_file):
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    seen = {
        "user": [os.getuid(), os.getgid()],
        "python": sys.version.split()[0],
        "versions": versions(),
        "record": record(),
        "pip_check": pip_check(),
        "imports": {
            name: attempt(lambda name=name: importlib.import_module(name).__file__) for name in request["imports"]
        },
        "command": command(request["command"]),
        "modules": {
            name: attempt(lambda place=place: load(place, request["cuda"]))
            for name, place in request["modules"].items()
        },
    }
    print("forge-image-check " + json.dumps(seen))
    return 0


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def versions():
    return sorted([normal(d.metadata["Name"]), d.version] for d in importlib.metadata.distributions())


def record():
    """Every installed file against the RECORD of its wheel; two wheels that claim one file are seen here too."""
    site = Path(sysconfig.get_path("purelib"))
    jobs, owners, clashes = [], {}, []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = normal(distribution.metadata["Name"])
        text = distribution.read_text("RECORD")
        if text is None:
            jobs.append((name, "RECORD", None, None))
            continue
        for path, digest, _ in csv.reader(text.splitlines()):
            target = os.path.normpath(site / path)
            # a namespace package's empty __init__ is rightly in several wheels
            if target in owners and owners[target][1] != digest:
                clashes.append(f"{path}: {owners[target][0]} and {name}")
            owners[target] = (name, digest)
            if digest:
                jobs.append((name, path, target, digest))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [found for found in pool.map(verify, jobs) if found]
    return {"files": len(jobs), "wrong": wrong, "clashes": clashes}


def verify(job):
    name, path, target, digest = job
    if target is None:
        return f"{name}: no RECORD"
    algorithm, _, expected = digest.partition("=")
    try:
        with Path(target).open("rb") as stream:
            found = hashlib.file_digest(stream, algorithm).digest()
    except OSError as error:
        return f"{name}: {path}: {error.strerror}"
    if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != expected:
        return f"{name}: {path}: other bytes than its wheel's RECORD"
    return None


def pip_check():
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line and not line.startswith("No broken")]


def command(argv):
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    return {"status": done.returncode, "tail": (done.stderr or done.stdout)[-1500:]}


def load(place, cuda):
    """Where FlashInfer's own loader finds a module, after really loading it."""
    import torch

    if torch.version.cuda is None:
        # FlashInfer asks torch for the version of CUDA; a CPU build has none to tell.
        torch.version.cuda = cuda
    module, _, function = place.partition(":")
    spec = getattr(importlib.import_module(module), function)()
    if not spec.is_aot:
        raise RuntimeError(f"FlashInfer does not find {spec.name} compiled ahead; it would look in {spec.aot_path}")
    spec.build_and_load()
    return str(spec.get_library_path())


def attempt(action):
    try:
        return {"ok": True, "detail": str(action())}
    except BaseException as error:
        detail = "".join(traceback.format_exception_only(error)).strip()
        return {"ok": False, "detail": detail, "trace": traceback.format_exc()[-1500:]}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
