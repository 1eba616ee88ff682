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
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, most, used = (
            ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if controllers
            else ("", "memory.max", "memory.current")
        )
        inside = Path(group.lstrip("/"))
        for folder in (inside, *inside.parents):  # a container may see its own group as the top
            place = root / "sys/fs/cgroup" / top / folder
            try:
                found.append((int((place / most).read_text()), int((place / used).read_text())))
            except (OSError, ValueError):  # not mounted here, or "max"
                continue
    return found
