"""Memory that a run has freed is the system's again."""

import ctypes
import sys
from pathlib import Path

import pytest

from paceline.machine import return_freed_memory

BLOCK, COUNT = 100_000, 1000  # below the size from which the C library maps each block for itself


def held() -> int:
    """Bytes of this process's own memory."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library"
)
def test_blocks_freed_between_living_ones_go_back_to_the_system() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes, library.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    blocks = [library.malloc(BLOCK) for _ in range(COUNT)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[: COUNT - 1]:  # the last one lives, so the heap cannot shrink from its end
        library.free(block)
    before = held()
    return_freed_memory()
    assert before - held() > 0.8 * BLOCK * COUNT
    library.free(blocks[-1])
