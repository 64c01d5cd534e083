"""What this machine says of itself: its processor, how busy that is, and the folder that Paceline may fill.

It knows neither what is kept there nor why somebody asks.
"""

import ctypes
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError

THREADS_PER_CORE = 4  # more only slow a machine down, and thousands cannot be started at all


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


def return_freed_memory() -> None:
    """Give freed memory back to the system where the C library keeps it (glibc); elsewhere nothing.

    Batches differ in size, so freed blocks between living ones add up: a run of 2400 steps held 6.6 GB of them for each
    process, which the captured states would have had for their pages.
    """
    if sys.platform != "linux":
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:  # another C library, which has no such function
        return


def check_threads(count: int, *, option: str) -> None:
    """Raises ConfigError that names the option when there are far more threads than cores."""
    cores = os.cpu_count() or 1
    if not 1 <= count <= THREADS_PER_CORE * cores:
        raise ConfigError(
            f"{option}: found {count}, expected 1 to {THREADS_PER_CORE * cores}: "
            f"{THREADS_PER_CORE} for each of the {cores} cores of this machine"
        )


def check_device(device: object) -> None:
    """Refuse a device that torch cannot spell or that is not there, before anything is loaded for it.

    device: as torch spells it, or a torch.device.  Raises ConfigError.
    """
    import torch  # whoever only asks for a folder need not wait for it

    if str(device) == "cpu":
        return
    try:
        place = torch.device(device)  # pyright: ignore[reportArgumentType, reportCallIssue] - checked by torch itself
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # a build without it; no device at all
        found = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "no CUDA device"
        raise ConfigError(f"found device '{device}', expected one that torch has here: cpu; it sees {found}") from error
    if place.type == "meta":
        raise ConfigError("found device 'meta', expected one that holds numbers, such as cpu")


def set_threads(count: int | None, *, option: str) -> None:
    """Let torch compute on so many threads; None leaves its choice.  Raises ConfigError that names the option."""
    if count is None:
        return
    check_threads(count, option=option)
    import torch  # whoever only asks for a folder need not wait for it

    torch.set_num_threads(count)


def cpu_lines(*keys: str) -> list[str]:
    """Values of the lines of /proc/cpuinfo with one of these keys, in order; none where there is no such file."""
    listing = Path("/proc/cpuinfo")
    if not listing.is_file():
        return []
    lines = (line.partition(":") for line in listing.read_text("utf-8", errors="replace").splitlines())
    return [value.strip() for key, _, value in lines if key.strip() in keys]


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """At one moment: seconds by the clock, and of processor time that all processes and that ours have used so far."""

    clock: float
    everybody: float
    ours: float


def cpu_times() -> CpuTimes | None:
    """The times now; None where the system does not say what the other processes use (it is read from /proc/stat)."""
    listing = Path("/proc/stat")
    if not listing.is_file():
        return None
    whole, _, _ = listing.read_text("ascii").partition("\n")  # cpu user nice system idle iowait irq softirq steal ...
    figures = [int(part) for part in whole.split()[1:9] if part.isdigit()]
    if len(figures) < 5:  # some containers show another table, or an empty one
        return None
    user, nice, system, _idle, _waiting, *interrupts = figures
    ticks = user + nice + system + sum(interrupts)  # with what a host has taken from a virtual machine
    mine = os.times()
    ours = mine.user + mine.system + mine.children_user + mine.children_system
    return CpuTimes(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), ours)


def cores_of_others(before: CpuTimes, after: CpuTimes) -> float:
    """How many cores other processes kept busy between two moments, on average."""
    used = (after.everybody - before.everybody) - (after.ours - before.ours)
    return max(used, 0.0) / max(after.clock - before.clock, 1e-9)
