"""How much memory is left: of the machine, and in every control group that holds us, version 1 or 2."""

from pathlib import Path

_NO_LIMIT = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


class Group:
    """A control group with a limit: its folder, limit, and use without what can be dropped (bytes)."""

    def __init__(self, folder, limit, used):
        self.folder = folder
        self.limit = limit
        self.used = used


def free(root="/"):
    """Bytes that can still be taken: the least of the machine's MemAvailable and what each limiting group leaves."""
    return min([machine(root), *(group.limit - group.used for group in groups(root))])


def headroom(floor, group_floor, root="/"):
    """Bytes that can still be taken with `floor` left to the machine and `group_floor` to each group; may be negative."""
    rooms = (group.limit - group.used - group_floor for group in groups(root))
    return min([machine(root) - floor, *rooms])


def machine(root="/"):
    """MemAvailable (bytes): what the kernel thinks can be had without swapping."""
    for line in Path(root, "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("the kernel tells no MemAvailable")


def groups(root="/"):
    """Our own control group and its parents, as far as they are visible and limit memory."""
    found = []
    for version, mount_root, mount_point, path in _mounts(root):
        top = Path(root, mount_point.lstrip("/"))
        folder = top / _below(mount_root, path)
        for place in (folder, *folder.parents):
            group = (_second if version == 2 else _first)(place)
            if group is not None:
                found.append(group)
            if place == top:
                break
    return found


def _mounts(root):
    """(version, root of the mount, mount point, our path) of each hierarchy that may count memory."""
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
        mounted = Path(root, "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in mounted:
        left, _, right = line.partition(" - ")
        kind, _, options = [*right.split(" ", 2), "", ""][:3]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version not in paths or (version == 1 and "memory" not in options.split(",")):
            continue
        fields = left.split(" ")
        yield version, fields[3], fields[4].replace("\\040", " "), paths[version]


def _below(mount_root, path):
    """Our group relative to the mount; the mount itself where it shows only a part that we cannot place."""
    if mount_root != "/":
        if path != mount_root and not path.startswith(mount_root + "/"):
            return ""
        path = path[len(mount_root) :]
    # a path with /.. lies outside of our namespace
    return "" if path.startswith("/..") else path.lstrip("/")


def _second(folder):
    """A group of version 2; None without a limit. `memory.high` throttles before `memory.max` kills."""
    limits = [
        int(text) for name in ("memory.max", "memory.high") if (text := _text(folder / name)) not in (None, "max")
    ]
    current = _text(folder / "memory.current")
    if not limits or current is None:
        return None
    return Group(folder, min(limits), int(current) - _droppable(_stat(folder), ""))


def _first(folder):
    """A group of version 1; None without a limit. Its statistics know limits of parents that we cannot see."""
    limit, current, stat = (
        _text(folder / "memory.limit_in_bytes"),
        _text(folder / "memory.usage_in_bytes"),
        _stat(folder),
    )
    if limit is None or current is None:
        return None
    least = min(int(limit), stat.get("hierarchical_memory_limit", _NO_LIMIT))
    if least >= _NO_LIMIT:
        return None
    return Group(folder, least, int(current) - _droppable(stat, "total_"))


def _droppable(stat, prefix):
    """File pages that a group gives back when asked; half of the active ones, as MemAvailable counts them."""
    return stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0) // 2


def _stat(folder):
    lines = (_text(folder / "memory.stat") or "").splitlines()
    return {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}


def _text(path):
    try:
        return path.read_text().strip()
    except OSError:
        return None
