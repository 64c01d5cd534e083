"""The index of captured features: where every row stands, what each shard must be, and where it all comes from.

This module reads no shard and knows no tensor but its type; `store.features` writes and reads the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CheckpointError, ConfigError
from paceline.store.files import write_bytes

FORMAT = 1
INDEX = "features.json"
SHARDS = "shard-*.safetensors"  # what `shard_name` makes
SHARD_BYTES = 256 * 2**20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Upper bounds in bytes.
ROW_BYTES = 110  # one row of the index
ENTRY_BYTES = 200  # one shard of the index, its rows apart
FILE_BYTES = 600  # the header of a shard and its entry
INDEX_BYTES = 700  # fingerprint and checksum


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Where features come from; rows of two different fingerprints never share a folder.

    target, tokenizer, template: digests.  taps: tapped layers (tap k = output of decoder layer k).
    hidden_size: H.  dtype: "float32" or "bfloat16", as stored.  version: of paceline.
    """

    target: str
    tokenizer: str
    template: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    version: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"features in {self.dtype!r}; expected one of {', '.join(DTYPES)}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on disk, file headers apart."""
        return (len(self.taps) + 1) * self.hidden_size * DTYPES[self.dtype].itemsize + 8 + 1

    def estimate_bytes(self, *, num_tokens: int, num_rows: int) -> int:
        """Bytes on disk for so many tokens in so many rows, index included."""
        shards = 1 + num_tokens * self.bytes_per_token // SHARD_BYTES
        return num_tokens * self.bytes_per_token + num_rows * ROW_BYTES + shards * FILE_BYTES + INDEX_BYTES


@dataclass(frozen=True, slots=True)
class Shard:
    """One line of the index: a file, its checksum and its rows as (digest, length), in order."""

    file: str
    sha256: str
    size: int
    rows: tuple[tuple[str, int], ...]

    @property
    def disk_bytes(self) -> int:
        """Upper bound of the bytes that the shard takes: its file, and its part of the index."""
        return self.size + len(self.rows) * ROW_BYTES + ENTRY_BYTES

    def places(self) -> Iterator[tuple[str, int, int]]:
        """(digest, first token, length) of each row."""
        start = 0
        for digest, length in self.rows:
            yield digest, start, length
            start += length


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def write_index(folder: Path, *, fingerprint: Fingerprint, shards: list[Shard]) -> None:
    """Write the index, whole or not at all."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": asdict(fingerprint),
        "shards": [asdict(shard) for shard in shards],
    }
    content["checksum"] = checksum(content)
    write_bytes(folder / INDEX, json.dumps(content, separators=(",", ":")).encode())


def read_index(folder: Path) -> tuple[Fingerprint, list[Shard]]:
    """Read the index and check it against its own checksum.  Raises CheckpointError naming the file."""
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{path} is missing; expected a folder written by `paceline capture`") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; name another folder") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; capture again into an empty folder") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != checksum(content):
        raise CheckpointError(f"{path} was altered: its checksum does not match; capture again into an empty folder")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads {FORMAT}; capture again")
    origin: dict[str, Any] = dict(content["fingerprint"])
    entries: list[dict[str, Any]] = content["shards"]
    shards = [
        Shard(entry["file"], entry["sha256"], entry["size"], tuple(map(tuple, entry["rows"]))) for entry in entries
    ]
    origin["taps"] = tuple(origin["taps"])
    return Fingerprint(**origin), shards


def check_origin(folder: Path, *, found: Fingerprint, expected: Fingerprint) -> None:
    """Raises CheckpointError naming every field in which two fingerprints differ."""
    have, want = asdict(found), asdict(expected)
    differing = [f"{key} {_short(have[key])} instead of {_short(want[key])}" for key in have if have[key] != want[key]]
    if differing:
        raise CheckpointError(
            f"{folder / INDEX} is of another origin: {', '.join(differing)}; capture into another folder"
        )


def check_size(folder: Path, shard: Shard) -> None:
    """Raises CheckpointError when a shard is missing or has another size than the index says."""
    path = folder / shard.file
    size = path.stat().st_size if path.is_file() else None
    if size != shard.size:
        found = "missing" if size is None else f"{size} bytes instead of {shard.size}"
        raise CheckpointError(f"{path} is not what was captured: {found}; restore it or capture again")


def _short(value: object) -> str:
    return f"{value[:12]}.." if isinstance(value, str) and len(value) > 20 else str(value)


def checksum(content: dict[str, Any]) -> str:
    """sha256 (hex) of the index without its own checksum."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()
