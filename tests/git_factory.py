"""Makes real git repositories, and clones of them that serve as mirrors."""

import os
import subprocess

from forge_build.manifest import GitSource

IDENTITY = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


class Origin:
    """A repository with a work tree."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir(parents=True)
        self.git("init", "-q", "-b", "main")
        with (folder / ".git/config").open("a") as config:
            config.write(
                "[uploadpack]\n\tallowFilter = true\n[core]\n\tprotectNTFS = false\n[maintenance]\n\tauto = false\n"
            )
        (folder / ".git/info/attributes").write_text("* -text\n")

    @property
    def url(self):
        return self.folder.as_uri()

    def git(self, *argv, stdin=None):
        done = subprocess.run(
            ["git", *argv], cwd=self.folder, env=os.environ | IDENTITY, input=stdin, check=True, capture_output=True
        )
        return done.stdout.decode().strip()

    def commit(self, files=None):
        for name, text in (files or {}).items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(text.encode())
        self.git("add", "--all", "--force")
        self.git("commit", "-qm", "x", "--allow-empty")
        return self.git("rev-parse", "HEAD")

    def tree(self, commit, path=""):
        return self.git("rev-parse", f"{commit}:{path}")

    def mirror(self, place):
        """A bare clone, which knows nothing of where it came from."""
        subprocess.run(["git", "clone", "-q", "--bare", self.folder, place], check=True, capture_output=True)
        subprocess.run(["git", "--git-dir", place, "remote", "remove", "origin"], check=True, capture_output=True)
        return place

    def gone(self):
        """Nobody answers at its address from now on."""
        self.folder.rename(self.folder.with_name(f"{self.folder.name}-gone"))

    def source(self, commit, subfolder=None, **more):
        return GitSource(url=self.url, commit=commit, version="1.0", subfolder=subfolder, **more)
