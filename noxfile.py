"""One table of verbs and one loop, no logic: `nox -s VERB -- ARGS` is `python -m PACKAGE VERB ARGS`."""

import sys

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = True
nox.options.sessions = ["lint", "typing", "tests"]

VERBS = {
    "engine": ("forge_core", "start a container engine and a staging registry where none answers"),
    "lock": ("forge_build", "resolve a manifest to versions and sha256"),
    "build": ("forge_build", "from locked inputs to an image in staging and its record"),
    "validate": ("forge_validate", "judge a server by its answers; move the tag of a recorded image on a pass"),
    "power": ("forge_lab", "make a real server wrong in many ways and count what the gate sees"),
}
PYTEST = ["python", "-m", "pytest", "--color=auto"]
CHECKS = {
    "lint": [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        ["lint-imports"],
        ["check-jsonschema", "--builtin-schema", "vendor.github-workflows", "docs/examples/github-actions.yml"],
        ["check-jsonschema", "--builtin-schema", "vendor.gitlab-ci", "docs/examples/gitlab-ci.yml"],
        ["zizmor", "--offline", "--no-progress", "--persona=pedantic", "docs/examples/github-actions.yml"],
    ],
    "typing": [["mypy"]],
    # Many of them wait for processes: four at a time are faster than one for each of two cores.
    "tests": [[*PYTEST, "--numprocesses=4", "tests/unit"]],
    "integration": [[*PYTEST, "tests/integration"]],
}
TAKES_POSARGS = {"tests", "integration"}


def install(session):
    # The lock has exact versions and hashes, our own package is built by the locked backend: nothing is resolved here,
    # and a second call touches no network.
    session.install("--require-hashes", "-r", "requirements/forge.txt", silent=True)
    session.install("--no-deps", "--no-build-isolation", "-e", ".", silent=True)


def run(session, *argv):
    try:
        # A verb cleans up containers and half-written files when interrupted; nox would kill it after 0.3 s. And its
        # talk stays on stderr, which nox would mix into stdout.
        session.run(*argv, stderr=sys.stderr, interrupt_timeout=120, terminate_timeout=20)
    except CommandFailed as failure:
        # nox turns every failure into 1, but exit codes are our interface.
        code = failure.return_code or 1
        sys.exit(code if code > 0 else 128 - code)


def verb(name, package, summary):
    @nox.session(name=name, default=False)
    def walk(session):
        install(session)
        run(session, "python", "-m", package, name, *session.posargs)

    walk.__doc__ = summary


def check(name, commands):
    @nox.session(name=name, default=name in nox.options.sessions)
    def walk(session):
        install(session)
        for command in commands:
            run(session, *command, *(session.posargs if name in TAKES_POSARGS else ()))


for _name, (_package, _summary) in VERBS.items():
    verb(_name, _package, _summary)
for _name, _commands in CHECKS.items():
    check(_name, _commands)
