"""Captured target features on disk: shards of rows, an index that vouches for each byte, a fingerprint of the origin.

This module knows no target and no tokenizer: it stores what it is handed, keyed by the digest of ids and mask, and
refuses to read anything that is not exactly what it wrote.

A folder holds `features.json` (the index) and `shard-00000.safetensors` ... Each shard concatenates rows: ids [S]
int64, mask [S] uint8, taps [S, K*H] and hidden [S, H] (the last hidden state after the target's final norm; the
target's logits are its head applied to it). Files are written aside and renamed, shard first, index second. A shard
counts once the index lists it, so a kill at any moment loses at most the rows of the open shard; whatever the index
does not list is removed on resume.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.errors import CheckpointError, ConfigError, DataError

FORMAT = 1
INDEX = "features.json"
SHARD_BYTES = 256 * 2**20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROW_BYTES = 110  # one row of the index
_FILE_BYTES = 1500  # the header of a shard and its lines in the index, and the fingerprint


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Where features come from; rows of two different fingerprints never share a folder.

    target, tokenizer, template: digests.  taps: tapped layers (tap k = output of decoder layer k).
    dtype: "float32" or "bfloat16", as stored.  num_taps, hidden_size: K and H.  version: of paceline.
    """

    target: str
    tokenizer: str
    template: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    version: str

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigError(f"features in {self.dtype!r}; expected one of {', '.join(_DTYPES)}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes on disk, file headers apart."""
        return (len(self.taps) + 1) * self.hidden_size * _DTYPES[self.dtype].itemsize + 8 + 1

    def estimate_bytes(self, *, num_tokens: int, num_rows: int) -> int:
        """Bytes on disk for so many tokens in so many rows, index included."""
        shards = 1 + num_tokens * self.bytes_per_token // SHARD_BYTES
        return num_tokens * self.bytes_per_token + num_rows * _ROW_BYTES + shards * _FILE_BYTES


class TokenRow(Protocol):
    """What the writer needs of an example.  ids: [T] int64.  mask: [T] bool.  digest: of both."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def mask(self) -> Tensor: ...
    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRow:
    """One row read back.  ids: [T] int64.  mask: [T] bool.  taps: [T, K*H].  hidden: [T, H].  digest: of both."""

    ids: Tensor
    mask: Tensor
    taps: Tensor
    hidden: Tensor
    digest: str


@dataclass(frozen=True, slots=True)
class _Shard:
    """One line of the index: a file, its checksum and its rows as (digest, length), in order."""

    file: str
    sha256: str
    size: int
    rows: tuple[tuple[str, int], ...]


def row_digest(ids: Tensor, mask: Tensor) -> str:
    """sha256 (hex) of a row.  ids: [T] int64.  mask: [T] bool."""
    content = ids.to(torch.int64).numpy().astype("<i8").tobytes() + mask.to(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


class FeatureWriter:
    """Appends rows to a folder; opening a folder of the same fingerprint resumes it.

    max_disk: cap in bytes on all files of the folder.  Use as a context manager: leaving it, also by an exception,
    writes the rows that are still in memory.  Raises CheckpointError when the folder holds features of another origin.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        fingerprint: Fingerprint,
        max_disk: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder, self.fingerprint = Path(folder), fingerprint
        self._max_disk, self._shard_bytes = max_disk, shard_bytes
        self._pending: list[tuple[str, dict[str, Tensor]]] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        self._shards: list[_Shard] = []
        if (self.folder / INDEX).exists():
            found, self._shards = _read_index(self.folder)
            _check_origin(self.folder, found=found, expected=fingerprint)
        for shard in self._shards:
            _check_size(self.folder, shard)
        self._remove_strays()
        self._digests = {digest for shard in self._shards for digest, _ in shard.rows}
        self._written = sum(shard.size + len(shard.rows) * _ROW_BYTES + _FILE_BYTES for shard in self._shards)
        self._open_bytes = 0
        if not (self.folder / INDEX).exists():
            self._write_index()

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fits(self, num_tokens: int) -> bool:
        """Whether a row of so many tokens stays below `max_disk`; ask before running the target, and stop if not."""
        if self._max_disk is None:
            return True
        opening = 0 if self._pending else _FILE_BYTES
        return self._written + self._open_bytes + opening + self._row_bytes(num_tokens) <= self._max_disk

    def append(self, example: TokenRow, *, taps: Tensor, hidden: Tensor) -> bool:
        """Store one row.  taps: [T, K*H].  hidden: [T, H].  Returns False when the row is there already.

        Raises DataError when a state is NaN or infinite, or when the row does not fit below `max_disk`.
        """
        if example.digest in self._digests:
            return False
        length, width = len(example.ids), self.fingerprint.hidden_size
        expected = ((length, len(self.fingerprint.taps) * width), (length, width))
        assert (tuple(taps.shape), tuple(hidden.shape)) == expected, f"shapes {taps.shape}, {hidden.shape}; {expected}"
        if not self.fits(length):
            raise DataError(
                f"max_disk of {self._max_disk} bytes reached after {len(self)} rows; raise it and run again"
            )
        dtype = _DTYPES[self.fingerprint.dtype]
        tensors = {
            "ids": example.ids.to(torch.int64),
            "mask": example.mask.to(torch.uint8),
            "taps": taps.detach().to("cpu", dtype, copy=True),
            "hidden": hidden.detach().to("cpu", dtype, copy=True),
        }
        if not _is_finite(tensors):
            raise DataError(
                f"row {example.digest[:12]}: the target's states hold NaN or infinity; check its weights and dtype"
            )
        self._open_bytes += self._row_bytes(length) + (0 if self._pending else _FILE_BYTES)
        self._pending.append((example.digest, tensors))
        self._digests.add(example.digest)
        if self._open_bytes >= self._shard_bytes:
            self.flush()
        return True

    def flush(self) -> None:
        """Write the open shard.  Raises DataError when the disk is full: finished shards stay, no other file."""
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        columns = {key: torch.cat([row[key] for _, row in self._pending]) for key in ("ids", "mask", "taps", "hidden")}
        content = save(columns)
        rows = tuple((digest, len(row["ids"])) for digest, row in self._pending)
        shard = _Shard(file=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content), rows=rows)
        self._pending, opened, self._open_bytes = [], self._open_bytes, 0
        try:
            _write_aside(self.folder / name, content)
            self._shards.append(shard)
            self._write_index()
        except OSError as error:
            self._shards = [kept for kept in self._shards if kept is not shard]
            self._digests -= {digest for digest, _ in rows}
            (self.folder / name).unlink(missing_ok=True)
            raise DataError(
                f"cannot write {self.folder / name}: {error.strerror}; {len(self)} rows are kept; free space, run again"
            ) from error
        self._written += opened

    def close(self) -> None:
        """Write what is still in memory."""
        self.flush()

    def _row_bytes(self, num_tokens: int) -> int:
        return num_tokens * self.fingerprint.bytes_per_token + _ROW_BYTES

    def _write_index(self) -> None:
        content = {
            "format": FORMAT,
            "fingerprint": asdict(self.fingerprint),
            "shards": [asdict(shard) for shard in self._shards],
        }
        content["checksum"] = _checksum(content)
        _write_aside(self.folder / INDEX, json.dumps(content, separators=(",", ":")).encode())

    def _remove_strays(self) -> None:
        listed = {shard.file for shard in self._shards}
        for path in [*self.folder.glob("shard-*.safetensors"), *self.folder.glob("*.part")]:
            if path.name not in listed:
                path.unlink()


class FeatureReader:
    """Rows of a folder by position or digest; a shard's checksum is verified before its first row is handed out.

    expected: the fingerprint that the features must have, or None to accept any (see `fingerprint`).
    Raises CheckpointError naming the file that is missing, torn, altered, exchanged or of another origin.
    """

    def __init__(self, folder: Path | str, *, expected: Fingerprint | None = None) -> None:
        self.folder = Path(folder)
        self.fingerprint, self._shards = _read_index(self.folder)
        if expected is not None:
            _check_origin(self.folder, found=self.fingerprint, expected=expected)
        for shard in self._shards:
            _check_size(self.folder, shard)
        self._places = [
            (shard, start, length, digest) for shard in self._shards for digest, start, length in _starts(shard)
        ]
        self._positions = {digest: position for position, (_, _, _, digest) in enumerate(self._places)}
        self._open: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: str) -> bool:
        return digest in self._positions

    def __getitem__(self, position: int) -> FeatureRow:
        shard, start, length, digest = self._places[position]
        file = self._shard(shard)
        rows = {key: file.get_slice(key)[start : start + length] for key in ("ids", "mask", "taps", "hidden")}
        row = FeatureRow(rows["ids"], rows["mask"].bool(), rows["taps"], rows["hidden"], digest)
        if not _is_finite(rows):
            raise CheckpointError(
                f"{self.folder / shard.file}: row {digest[:12]} holds NaN or infinity; capture it again"
            )
        if row_digest(row.ids, row.mask) != digest:
            raise CheckpointError(f"{self.folder / shard.file}: row {digest[:12]} holds other tokens; capture it again")
        return row

    def row(self, digest: str) -> FeatureRow:
        """The row with this digest.  Raises CheckpointError when it was not captured."""
        if digest not in self._positions:
            raise CheckpointError(
                f"{self.folder}: no features for row {digest[:12]}; finish the capture by running it again"
            )
        return self[self._positions[digest]]

    def lengths(self) -> list[int]:
        """Tokens of each row, in order."""
        return [length for _, _, length, _ in self._places]

    def verify(self) -> int:
        """Read every byte and every row.  Returns the number of rows; raises CheckpointError naming a bad file."""
        self._open.clear()
        return sum(1 for position in range(len(self)) if self[position].digest)

    def _shard(self, shard: _Shard) -> Any:
        if shard.file not in self._open:
            path = self.folder / shard.file
            _check_size(self.folder, shard)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != shard.sha256:
                twin = next((other.file for other in self._shards if other.sha256 == found), None)
                what = (
                    f"it holds the content of {twin}"
                    if twin
                    else f"its sha256 is {found[:12]}, not {shard.sha256[:12]}"
                )
                raise CheckpointError(f"{path} is not what was captured: {what}; restore it or capture again")
            try:
                self._open[shard.file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is no safetensors file: {error}; capture again") from error
        return self._open[shard.file]


def _starts(shard: _Shard) -> Iterator[tuple[str, int, int]]:
    start = 0
    for digest, length in shard.rows:
        yield digest, start, length
        start += length


def _read_index(folder: Path) -> tuple[Fingerprint, list[_Shard]]:
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; expected a folder written by `paceline capture`") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; capture again into an empty folder") from error
    if not isinstance(content, dict) or content.pop("checksum", None) != _checksum(content):
        raise CheckpointError(f"{path} was altered: its checksum does not match; capture again into an empty folder")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {content['format']}, this version reads {FORMAT}; capture again")
    origin = {**content["fingerprint"], "taps": tuple(content["fingerprint"]["taps"])}
    shards = [_Shard(**{**entry, "rows": tuple(map(tuple, entry["rows"]))}) for entry in content["shards"]]
    return Fingerprint(**origin), shards


def _check_origin(folder: Path, *, found: Fingerprint, expected: Fingerprint) -> None:
    have, want = asdict(found), asdict(expected)
    differing = [f"{key} {_short(have[key])} instead of {_short(want[key])}" for key in have if have[key] != want[key]]
    if differing:
        raise CheckpointError(
            f"{folder / INDEX} is of another origin: {', '.join(differing)}; capture into another folder"
        )


def _check_size(folder: Path, shard: _Shard) -> None:
    path = folder / shard.file
    size = path.stat().st_size if path.is_file() else None
    if size != shard.size:
        found = "missing" if size is None else f"{size} bytes instead of {shard.size}"
        raise CheckpointError(f"{path} is not what was captured: {found}; restore it or capture again")


def _short(value: object) -> str:
    return f"{value[:12]}.." if isinstance(value, str) and len(value) > 20 else str(value)


def _is_finite(tensors: dict[str, Tensor]) -> bool:
    return bool(tensors["taps"].isfinite().all()) and bool(tensors["hidden"].isfinite().all())


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=list).encode()).hexdigest()


def _write_aside(path: Path, content: bytes) -> None:
    """Write, flush to the disk, rename, and flush the rename; on failure the temporary file is removed."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        raise
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
