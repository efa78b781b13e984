"""How much memory is available to this process."""

import os
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Available memory in bytes: what the system can provide without swapping, or less if the container has a lower limit."""
    free = _available_on_machine()
    try:
        limit, used = ((_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
    except (OSError, ValueError):  # no cgroup v2
        return free


def _available_on_machine() -> int:
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return 1024 * int(lines["MemAvailable"].split()[0])
    except (OSError, ValueError, KeyError):  # not Linux: total memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
