"""Stands for a compiler: `fake_compiler.py -c UNIT -o OUT`. UNIT is JSON that says what compiling it takes.

`mb` of memory, grown over `seconds`; `spin` seconds of CPU time; `status` to end with; `once` to die by SIGKILL the first time.
Each run adds a line to `log` when it begins and one when it ends well: time, name, MB, `+` or `-`.
"""

import json
import os
import signal
import sys
import time

STEPS = 20


def main(argv):
    source, out = argv[argv.index("-c") + 1], argv[argv.index("-o") + 1]
    with open(source) as stream:
        unit = json.load(stream)

    def note(sign):
        if log := unit.get("log"):
            handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(handle, f"{time.monotonic()} {os.path.basename(source)} {unit['mb']} {sign}\n".encode())
            os.close(handle)

    note("+")
    print(f"compiling {os.path.basename(source)} in process {os.getpid()}", flush=True)
    began, held = time.monotonic(), []
    for step in range(1, STEPS + 1):
        held.append(b"x" * int(unit["mb"] * 1e6 / STEPS))
        while time.process_time() < unit.get("spin", 0) * step / STEPS:
            pass
        time.sleep(max(0, began + unit.get("seconds", 0) * step / STEPS - time.monotonic()))
    if unit.get("once") and not os.path.exists(unit["once"]):
        open(unit["once"], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if unit.get("status"):
        print(f"{source}:1:1: error: {os.path.basename(source)} is broken")
        return unit["status"]
    with open(out, "w") as stream:
        stream.write("object")
    note("-")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
