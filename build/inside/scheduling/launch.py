"""Starts a compiler once the scheduler has memory for it: `launch.py COMPILER ARGS...`. One of these runs per unit.

Started by ninja in front of every compiler, with `python3 -I -S`: small, and quick to start. Without a scheduler in the
environment, below another launcher, or for what is no compile, it becomes the compiler at once. The compiler's output is kept
until its end, so that an attempt that is given up leaves none. Ends as the compiler did, or with 75 when this unit was not
compiled because another had failed.
"""

import itertools
import json
import os
import re
import select
import signal
import socket
import sys

NOT_COMPILED = 75
_SOURCES = {".cu": "cuda", ".c": "c", ".cc": "c++", ".cpp": "c++", ".cxx": "c++", ".C": "c++", ".S": "c", ".s": "c"}
_WITH_VALUE = {
    "-o",
    "-MF",
    "-MT",
    "-MQ",
    "-I",
    "-isystem",
    "-x",
    "-include",
    "-Xcompiler",
    "--dependency-output",
    "-odir",
}
_COMPILE = {"-c", "-dc", "-dw", "--compile", "--device-c"}
_KILLED = re.compile(rb"died due to signal 9\b|Killed signal terminated program|^Killed$", re.MULTILINE)


def unit(argv):
    """What is compiled, as the scheduler wants to know it; None for what needs no memory to speak of (`--version`)."""
    source = output = None
    skip = False
    for before, word in itertools.pairwise(argv):
        if before == "-o":
            output = word
        skip = before in _WITH_VALUE
        if not skip and not word.startswith("-") and source is None and os.path.splitext(word)[1] in _SOURCES:
            source = word
    compiler = os.path.basename(argv[0])
    architectures = sorted(set(re.findall(r"\bsm_(\d+[af]?)\b", " ".join(argv))))
    asked = {"compiler": compiler, "architecture": "+".join(f"sm_{found}" for found in architectures)}
    if source is not None and _COMPILE.intersection(argv):
        # two parts tell units apart; the folders above them differ from place to place
        name = "/".join(source.split("/")[-2:])
        return asked | {"name": name, "kind": _SOURCES[os.path.splitext(source)[1]]}
    if output is not None:
        return asked | {"name": os.path.basename(output), "kind": "link"}
    return None


def spawn(argv, mark, sink):
    """Start the compiler in a process group of its own, marked, writing to `sink`."""
    actions = [(os.POSIX_SPAWN_DUP2, sink, 1), (os.POSIX_SPAWN_DUP2, sink, 2)]
    environ = os.environ | {"FORGE_UNIT": mark}
    try:
        return os.posix_spawnp(argv[0], argv, environ, file_actions=actions, setpgroup=0)
    except OSError as error:
        print(f"forge: {argv[0]} cannot be run: {error.strerror}", file=sys.stderr)
        sys.exit(127)


def attempt(argv, mark, link, sink):
    """Run the compiler to its end; returns wait status and resource use. Takes it down with the scheduler."""
    awake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = spawn(argv, mark, sink)

    def stop(number, _frame):
        os.killpg(child, signal.SIGKILL)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    while True:
        pid, status, use = os.wait4(child, os.WNOHANG)
        if pid:
            return status, use
        ready, _, _ = select.select([awake, link], [], [])
        if awake in ready:
            os.read(awake, 4096)
        if link in ready and not link.recv(1, socket.MSG_PEEK):
            os.killpg(child, signal.SIGKILL)
            sys.exit("forge: the scheduler is gone")


def output(sink):
    """What the compiler has written."""
    os.lseek(sink, 0, os.SEEK_SET)
    with os.fdopen(os.dup(sink), "rb") as stream:
        return stream.read()


def main(argv):
    """Ask, wait, compile, report."""
    address = os.environ.get("FORGE_SCHEDULER")
    asked = unit(argv) if address and "FORGE_UNIT" not in os.environ else None
    if asked is None:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is what is wanted
    command = [*json.loads(os.environ.get("FORGE_COMPILER_CACHE", "[]")), *argv] if asked["kind"] != "link" else argv
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(address)
    except OSError as error:
        sys.exit(f"forge: no scheduler answers at {address}: {error.strerror}")
    answers = link.makefile("r")

    def tell(message):
        link.sendall(json.dumps(message).encode() + b"\n")

    tell(asked)
    sink = os.memfd_create("output")
    while True:
        answer = json.loads(answers.readline() or '{"gone": true}')
        if "mark" not in answer:
            break
        os.ftruncate(sink, 0)
        os.lseek(sink, 0, os.SEEK_SET)
        status, use = attempt(command, answer["mark"], link, sink)
        said = output(sink)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        killed = killed or (status != 0 and _KILLED.search(said) is not None)
        tell({"status": status, "killed": killed, "rss": use.ru_maxrss * 1024, "cpu": use.ru_utime + use.ru_stime})
        answer = json.loads(answers.readline() or '{"end": true}')
        if "end" in answer:
            sys.stdout.buffer.write(said)
            sys.stdout.flush()
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
    print("forge: the scheduler is gone" if "gone" in answer else "forge: not compiled, another unit failed")
    return NOT_COMPILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
