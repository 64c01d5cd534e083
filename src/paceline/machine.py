"""What this machine says of itself: its processor, and the folder that Paceline may fill.

It knows neither what is kept there nor why somebody asks.
"""

import os
import platform
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Where Paceline keeps what it fetches: $PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    own, shared = os.environ.get("PACELINE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "paceline"


def cpu_name() -> str:
    """The processor as its maker calls it, or the architecture where the system does not say."""
    named = cpu_lines("model name", "Model", "Hardware")
    return named[0] if named else platform.processor() or platform.machine()


def cpu_features() -> str:
    """The instruction sets that the system lists for its first core; "" where it lists none.

    A virtual machine may hide some, and many processors share a name, so code made for one machine needs both.
    """
    found = cpu_lines("flags", "Features")
    return found[0] if found else ""


def peak_memory() -> int:
    """Most bytes of memory that this process has held at once, files that it has mapped included."""
    import resource  # Windows has none, and nothing else here needs it

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # kilobytes elsewhere


def cpu_lines(*keys: str) -> list[str]:
    """Values of the lines of /proc/cpuinfo with one of these keys, in order; none where there is no such file."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return []
    lines = (line.partition(":") for line in listing.read_text("utf-8", errors="replace").splitlines())
    return [value.strip() for key, _, value in lines if key.strip() in keys]
