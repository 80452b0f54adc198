"""Makes a CUDA_HOME of links into the tool chain that the nvidia-* wheels installed. Runs once, while the image is built.

    link_cuda.py HOME

Whatever looks for CUDA wants `bin`, `include`, `lib64`, `nvvm` and library names without a version; the wheels have neither `lib64`
nor those names, and their folder must stay as their RECORDs say. nvcc looks beside the folder that it was called in; were that
folder a link, `..` would lead into the wheels, where there is no `lib64`: so `bin` is a real folder of links.
Standard library only.
"""

import re
import sys
import sysconfig
from pathlib import Path

DRIVER = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
"""Where the NVIDIA container runtime mounts the driver's library on Debian."""


def stop(message):
    """Say what does not fit, and end with 1."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)


def tool_chain(site):
    """The one folder of the wheels that has an nvcc."""
    found = sorted(path.parent.parent for path in site.glob("nvidia/cu*/bin/nvcc"))
    if len(found) != 1:
        stop(f"exactly one CUDA tool chain from wheels is needed, there are {len(found)}: {', '.join(map(str, found))}")
    return found[0]


def link(home, source, driver=DRIVER):
    """Make `home`; returns the link names that libraries got."""
    if home.exists() or home.is_symlink():
        stop(f"{home} is there already: the base brings another CUDA")
    for name in ("bin", "lib64"):
        (home / name).mkdir(parents=True)
    for tool in sorted((source / "bin").iterdir()):
        (home / "bin" / tool.name).symlink_to(tool)
    for name in ("include", "nvvm"):
        (home / name).symlink_to(source / name)
    (home / "lib").symlink_to("lib64")
    names = {}
    for library in sorted((source / "lib").iterdir()):
        (home / "lib64" / library.name).symlink_to(library)
        if match := re.fullmatch(r"(lib[\w+-]+\.so)\.[\d.]+", library.name):
            names[match[1]] = library.name
    for name, target in names.items():
        if not (source / "lib" / name).exists():
            (home / "lib64" / name).symlink_to(target)
    # The driver's link name; it leads nowhere until a container runtime mounts the driver.
    (home / "lib64" / "stubs").mkdir()
    (home / "lib64" / "stubs" / "libcuda.so").symlink_to(driver)
    return sorted(names)


def main(home):
    """Link, and tell what."""
    source = tool_chain(Path(sysconfig.get_path("purelib")))
    names = link(Path(home), source)
    print(f"{home} -> {source}, link names: {', '.join(names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
