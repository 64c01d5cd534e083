"""Memory that a run has freed is the system's again."""

import ctypes
from pathlib import Path

from paceline.machine import return_freed_memory

BLOCK, COUNT = 100_000, 1000  # below the size from which the C library maps each block for itself


def held() -> int:
    """Bytes of this process's own memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_blocks_freed_between_living_ones_go_back_to_the_system() -> None:
    return_freed_memory()  # everywhere, also where it can do nothing
    library = ctypes.CDLL(None)
    if not has_trim(library):
        return
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[: COUNT - 1]:  # the last one lives, so the heap cannot shrink from its end
        library.free(block)
    before = held()
    return_freed_memory()
    assert before - held() > 0.8 * BLOCK * COUNT
    library.free(blocks[-1])


def has_trim(library: ctypes.CDLL) -> bool:
    """Whether the C library is one that keeps freed blocks and can give them back."""
    try:
        return bool(library.malloc_trim)
    except AttributeError:
        return False
