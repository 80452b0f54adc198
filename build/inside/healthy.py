"""The image's health check: asks the server of this container, ends with 0 when it says it is healthy, else with 1.

The port is the one on the server's command line, which the container's first process has too.
Standard library only; an answer is only a sign of life, never a verdict.
"""

import http.client
import sys
import urllib.request
from pathlib import Path

DEFAULT = "30000"


def port(argv):
    """What `--port` says, the last one as in argparse; else SGLang's default."""
    found = DEFAULT
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--port":
            found = following
        elif word.startswith("--port="):
            found = word.partition("=")[2]
    return found


def main(command_line="/proc/1/cmdline"):
    """Ask once."""
    argv = Path(command_line).read_bytes().decode(errors="replace").split("\0")
    address = f"http://127.0.0.1:{port(argv)}/health"
    try:
        # no proxy of the environment: the server is in this container
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=8) as answer:
            print(f"{address}: {answer.status}")
            return 0 if answer.status == 200 else 1
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{address}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
