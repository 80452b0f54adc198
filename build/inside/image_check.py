"""Runs in the runtime image, read-only, without network and without a GPU: prints as JSON what it sees; judging is done outside.

Usage: python -c THIS_TEXT REQUEST   (JSON: imports, command, modules, cuda, tool_chain); a read-only image takes no files, so the
text of tool_chain.py comes in the request and lies in /tmp, which is in memory.
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


def main(request_text):
    """Look at everything once, files first, and print it."""
    request = json.loads(request_text)
    site = Path(sysconfig.get_path("purelib"))
    # Files first: nothing was imported yet that could write any.
    installed = files(site)
    chain = tool_chain(request["tool_chain"], site)
    seen = {
        "user": [os.getuid(), os.getgid()],
        "python": sys.version.split()[0],
        "versions": versions(),
        "record": installed,
        "copies": {name: copies(site, name) for name in request["modules"]},
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
    if chain is not None:
        # after the imports: the first one to load CUDA's runtime shall be torch, as in the server
        seen["tool_chain"] = chain()
    text = json.dumps(seen)
    # In short lines: an engine splits long ones, and what else is written may come in between.
    for start in range(0, len(text), 4000):
        print("\nforge-image-check " + text[start : start + 4000], flush=True)
    print("forge-image-check-end", flush=True)
    return 0


def tool_chain(wanted, site):
    """Stand the stub of the driver in, where the image should have a tool chain; returns what looks at that one later."""
    if wanted is None:
        return None
    temporary = Path("/tmp")  # noqa: S108 - in memory, in a container of its own
    (temporary / "forge_tool_chain.py").write_text(wanted["script"])
    sys.path.insert(0, str(temporary))
    import forge_tool_chain as chain

    (needed, sonames), stub = chain.needs(site), temporary / "stub-driver"
    functions = chain.stub_driver(needed, stub)

    def look():
        return {
            "stub": functions,
            **chain.look(wanted["home"], wanted["architecture"], wanted["folders"], needed, sonames, stub),
        }

    return look


def normal(name):
    """A name as an index normalises it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def versions():
    """Every installed distribution: name and version."""
    return sorted([normal(d.metadata["Name"]), d.version] for d in importlib.metadata.distributions())


def files(site):
    """Every installed file against its distribution's RECORD, the RECORDs in short, and the files that are in none.

    Two wheels that claim one file with other bytes are seen here too.
    """
    jobs, owners, clashes, records = [], {}, [], {}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        name = normal(distribution.metadata["Name"])
        text = distribution.read_text("RECORD")
        if text is None:
            jobs.append((name, "RECORD", None, None))
            continue
        rows = list(csv.reader(text.splitlines()))
        records[name] = digest(rows)
        for path, recorded, _ in rows:
            target = os.path.normpath(site / path)
            # a namespace package's empty __init__ is rightly in several wheels
            if target in owners and owners[target][1] != recorded:
                clashes.append(f"{path}: {owners[target][0]} and {name}")
            owners[target] = (name, recorded)
            if recorded:
                jobs.append((name, path, target, recorded))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = [found for found in pool.map(verify, jobs) if found]
    found = (Path(folder, name) for folder, _, names in os.walk(site) for name in names)
    unowned = {p.relative_to(site).as_posix(): sha256(p).hex() for p in found if str(p) not in owners}
    return {"files": len(jobs), "wrong": wrong, "clashes": clashes, "records": records, "unowned": unowned}


def digest(rows):
    """Sha256 over a RECORD's rows, save those that an installer makes: it writes scripts and its own notes anew."""
    own = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")
    kept = []
    for path, recorded, _ in rows:
        made = path.count("/") == 1 and path.partition("/")[0].endswith(".dist-info") and path.partition("/")[2] in own
        if recorded and not made and not path.startswith(".."):
            kept.append(f"{path},{recorded}")
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()


def sha256(path):
    """Sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def verify(job):
    """What is wrong with one installed file; none: nothing."""
    name, path, target, recorded = job
    if target is None:
        return f"{name}: no RECORD"
    algorithm, _, expected = recorded.partition("=")
    try:
        with Path(target).open("rb") as stream:
            found = hashlib.file_digest(stream, algorithm).digest()
    except OSError as error:
        return f"{name}: {path}: {error.strerror}"
    if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != expected.rstrip("="):
        return f"{name}: {path}: other bytes than its wheel's RECORD"
    return None


def copies(site, name):
    """Where shared objects of that name lie: a second one could be loaded in place of ours."""
    return sorted(p.relative_to(site).as_posix() for p in site.rglob(f"{name}.so"))


def pip_check():
    """The lines in which pip complains about dependencies."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line and not line.startswith("No broken")]
    if done.returncode and not lines:
        lines = [f"pip check ended with {done.returncode}: {done.stderr[-300:]}"]
    return lines


def command(argv):
    """Exit status and last words of a command."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    return {"status": done.returncode, "tail": (done.stderr or done.stdout)[-1500:]}


def load(place, cuda):
    """Where FlashInfer's own loader finds a module, after really loading it."""
    import torch

    if torch.version.cuda is None:
        # FlashInfer asks torch for the version of CUDA; a CPU build has none to tell.
        torch.version.cuda = cuda
    spec = call(place)
    if not spec.is_aot:
        raise RuntimeError(f"FlashInfer does not find {spec.name} compiled ahead; it would look in {spec.aot_path}")
    spec.build_and_load()
    # what the process has mapped is what was loaded, whatever the loader says
    found = Path(spec.get_library_path()).resolve()
    if str(found) not in Path("/proc/self/maps").read_text():
        raise RuntimeError(f"{found} is not among what the process has loaded")
    return str(found)


def call(text):
    """What `package.module:function JSON` gives; an argument `torch.X` stands for that type."""
    place, _, given = text.partition(" ")
    module, _, function = place.partition(":")
    arguments = json.loads(given or "{}")
    for key, value in arguments.items():
        if isinstance(value, str) and value.startswith("torch."):
            arguments[key] = getattr(importlib.import_module("torch"), value.removeprefix("torch."))
    return getattr(importlib.import_module(module), function)(**arguments)


def attempt(action):
    """What came of an action, or how it failed."""
    try:
        return {"ok": True, "detail": str(action())}
    except BaseException as error:
        detail = "".join(traceback.format_exception_only(error)).strip()
        return {"ok": False, "detail": detail, "trace": traceback.format_exc()[-1500:]}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
