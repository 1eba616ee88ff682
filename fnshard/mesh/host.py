"""The memory that this process may use."""

from __future__ import annotations

from pathlib import Path


def control_groups(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (limit, used) bytes of all control groups around this process that have a limit.

    Both versions of cgroups are read, 2 and 1.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        # A line is "number:controllers:path"; the one hierarchy of version 2 names no controllers.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:
            top, limit_file, usage_file = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            top, limit_file, usage_file = "", "memory.max", "memory.current"

        # Every enclosing group limits this process too. A container may see its own group as the top.
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):
            folder = root / "sys/fs/cgroup" / top / each
            try:
                limit = int((folder / limit_file).read_text())
                limits.append((limit, int((folder / usage_file).read_text())))
            except (OSError, ValueError):  # not mounted here, or "max"
                continue
    return limits
