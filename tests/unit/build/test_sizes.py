from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from rich.console import Console
from wheel_factory import make_wheel

from forge_build.image import sizes
from forge_core.errors import IntegrityError
from forge_core.model import ImageRef

IMAGE = ImageRef(repository="127.0.0.1:5120/x", digest=f"sha256:{'1' * 64}")


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    files = {
        "./usr/bin/tini": 1000,
        "./usr/lib/libc.so": 500,
        "./etc/machine-id": 7,
        "./var/lib/dpkg/info/tini.list": "/.\n/usr/bin/tini\n",
        "./var/lib/dpkg/info/libc6:amd64.list": "/lib/libc.so\n",
    }
    with tarfile.open(tmp_path / "rootfs.tar", "w") as tar:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else b"x" * content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("./usr/bin/again")
        link.type, link.linkname = tarfile.LNKTYPE, "./usr/bin/tini"
        tar.addfile(link)
    return tmp_path / "rootfs.tar"


def test_files_count_for_the_package_that_brings_them(rootfs: Path) -> None:
    """Merged /usr: the package names /lib/libc.so, the file lies in /usr/lib."""
    assert sizes.packages(rootfs) == {"tini": 1000, "libc6": 500, "": 7 + 18 + 12}


def test_components_are_sorted_and_add_up(rootfs: Path, tmp_path: Path) -> None:
    one = make_wheel(tmp_path, {"a.so": b"x" * 9000}, name="one")
    own = make_wheel(tmp_path, {"b.so": b"x" * 4000}, name="own")
    found = sizes.measure(
        IMAGE, 321, [("ADD", 300), ("RUN", 21)], {("one", "1.0"): one}, {("own", "1.0"): own}, rootfs, {"tini": "0.19"}
    )
    assert [(part.kind, part.name, part.version) for part in found.parts] == [
        ("wheel", "one", "1.0"),
        ("built", "own", "1.0"),
        ("deb", "tini", "0.19"),
        ("deb", "libc6", ""),
        ("rest", "files of no package", ""),
    ]
    assert 9000 < found.parts[0].size < 9600
    assert found.uncompressed == sum(part.size for part in found.parts)
    sizes.write(found, tmp_path / "sizes.json")
    data = json.loads((tmp_path / "sizes.json").read_text())
    assert sizes.Sizes.model_validate(data) == found
    assert data["layers"] == [{"step": "ADD", "size": 300}, {"step": "RUN", "size": 21}]
    assert sizes.largest(found, 2).startswith("one 9 kB, ")


def test_the_table_ends_with_what_it_left_out(rootfs: Path) -> None:
    found = sizes.measure(IMAGE, 1, [], {}, {}, rootfs, {})
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(sizes.table(found, most=1))
    text = console.export_text()
    assert "tini" in text
    assert "2 others" in text
    assert "65.1%" in text


def test_what_cannot_be_read_is_an_integrity_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(IntegrityError, match="no wheel"):
        sizes.measure(IMAGE, 1, [], {("x", "1"): tmp_path / "x"}, {}, None, {})
    with pytest.raises(IntegrityError, match="no root file system"):
        sizes.packages(tmp_path / "x")
