"""How git is called for sources: in a scratch repository, without prompts, its words as they can be read here."""

from __future__ import annotations

from pathlib import Path

from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.process import Completed, run

# The user's own git settings count here (proxy, credentials, `insteadOf`): whatever way a commit comes, its id names its
# bytes. Only these are fixed: no prompt, no transport that runs a command, no hint in another language to read.
ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:git:http:file", "LC_ALL": "C"}
TIMEOUT_S = 1800
"""For one command; a repository's first fetch may be large."""


class NoSuchCommit(UsageError):
    """The repository answers, and does not have the commit."""


class Unanswered(EnvironmentFailure):
    """The repository does not answer, or does not give what it has."""


def init(folder: Path) -> None:
    """Make an empty bare repository."""
    run(["git", "init", "--quiet", "--bare", "--object-format=sha1", "--template=", folder], env=ENVIRONMENT)


def git(
    folder: Path,
    *argv: str | Path,
    check: bool = True,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
) -> Completed:
    """Run git on the bare repository `folder`; raises CommandFailed as `run` does."""
    environment = ENVIRONMENT | {"GIT_DIR": str(folder)} | (env or {})
    # names in the output are plain ASCII then, whatever they are in the tree
    command = ["git", "-c", "core.quotePath=true", *argv]
    return run(command, env=environment, cwd=cwd, check=check, stdin=stdin, timeout=TIMEOUT_S)


def commit_of_tag(url: str, tag: str) -> str:
    """Commit that a tag of the repository at `url` names now; a mirror is not asked, its tags may be its own.

    Raises NoSuchCommit when there is no such tag, Unanswered when the repository does not answer.
    """
    names = (f"refs/tags/{tag}", f"refs/tags/{tag}^{{}}")
    done = run(["git", "ls-remote", url, *names], env=ENVIRONMENT, check=False, timeout=TIMEOUT_S)
    if done.returncode:
        raise Unanswered(
            f"{url} does not say what its tag {tag} is",
            details=tuple(done.stderr.strip().splitlines()[-4:]),
            hint="name its `commit` beside the `tag`: then no tag is looked up",
        )
    found = {name: oid for oid, name in (line.split("\t", 1) for line in done.stdout.splitlines())}
    if not found:
        raise NoSuchCommit(f"{url} has no tag {tag}")
    # an annotated tag is an object of its own, and the second name what it points to
    return found.get(names[1]) or found[names[0]]
