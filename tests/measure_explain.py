"""Measures the log classifier: prints the table of docs/explain.md.

    python tests/measure_explain.py [MB]

Each log is written to a temporary folder and explained in a process of its own, which tells its time and the most memory it held.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from logs import facts, healthy, joined

from forge_core.explain import read_file

FATAL = [fact["sample"] for fact in facts() if fact["severity"] == "fatal"]

TRACE = [
    "Traceback (most recent call last):",
    *(line for n in range(15) for line in (f'  File "a{n}.py", line {n}, in run', "    return self.go()")),
    "ValueError: a request that was refused",
]


def kinds() -> dict[str, bytes]:
    """A piece of each kind of log; it is repeated."""
    serving = healthy(4000)[66:]
    return {
        "healthy serving lines": joined(serving),
        "the same with colours": joined([f"\x1b[32mINFO\x1b[0m: {line}" for line in serving]),
        "every tenth line has a word that is looked at": joined(
            [f"{line} it was not found" if number % 10 == 0 else line for number, line in enumerate(serving)]
        ),
        "every line has such a word": joined([f"{line} it was not found" for line in serving]),
        "a traceback after every hundredth line": joined(
            [line for number, one in enumerate(serving) for line in ([one, *TRACE] if number % 100 == 0 else [one])]
        ),
        "every line is fatal": joined(FATAL * 40),
        "one line without an end": b"x" * 1_000_000,
        "progress bars": b"".join(b"Loading: %3d%%|####| %d/47\r" % (n % 100, n % 47) for n in range(20_000)),
    }


def chunks(piece: bytes, total: int) -> Iterator[bytes]:
    """The piece again and again."""
    for _ in range(total // len(piece)):
        yield piece


def one(path: Path) -> None:
    """Explain a log, and say what it took: MB/s of CPU time, MB/s of wall time, MB held at most."""
    began, cpu = time.perf_counter(), time.process_time()
    reading = read_file(path)
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    kind = reading.finding.kind if reading.finding else "none"
    print(
        f"{reading.size / 1e6 / used:.0f} | {reading.size / 1e6 / wall:.0f} | {peak:.0f} | {reading.lines:,} | {kind}"
    )


def main() -> None:
    """Measure every kind."""
    if sys.argv[1:2] == ["one"]:
        one(Path(sys.argv[2]))
        return
    total = int(sys.argv[1]) * 1_000_000 if len(sys.argv) > 1 else 300_000_000
    print("| log | MB/s of CPU time | MB/s | MB held | lines | finding |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        for name, piece in kinds().items():
            with path.open("wb") as stream:
                if name.startswith("healthy"):
                    stream.write(joined(healthy(66)))
                stream.writelines(chunks(piece, total))
            told = subprocess.run([sys.executable, __file__, "one", path], capture_output=True, text=True, check=True)
            print(f"| {name} | {told.stdout.strip()} |", flush=True)


main()
