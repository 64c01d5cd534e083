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

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from paceline.errors import CheckpointError, DataError, PacelineError
from paceline.store.faults import fault_advice
from paceline.store.feature_index import (
    DTYPES,
    FILE_BYTES,
    INDEX,
    INDEX_BYTES,
    ROW_BYTES,
    SHARD_BYTES,
    SHARDS,
    Fingerprint,
    Shard,
    check_origin,
    check_size,
    read_index,
    shard_name,
    write_index,
)
from paceline.store.files import Claim, remove_partial, sha256_file, write_bytes


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


def row_digest(ids: Tensor, mask: Tensor) -> str:
    """sha256 (hex) of a row.  ids: [T] int64.  mask: [T] bool."""
    content = ids.to(torch.int64).numpy().astype("<i8").tobytes() + mask.to(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()


class FeatureWriter:
    """Appends rows to a folder; opening a folder of the same fingerprint resumes it.

    max_disk: cap in bytes on all files of the folder.  Use as a context manager: leaving it, also by an exception,
    writes the rows that are still in memory.  damaged: names of the shards that were not what was captured; they are
    dropped, so that their rows are captured again.  Raises CheckpointError when the folder holds features of another
    origin or shards without an index, ConfigError when another writer has it open.
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
        self._shards: list[Shard] = []
        self._claim = Claim(self.folder)
        try:
            self._open_folder()
        except (PacelineError, OSError):
            self._claim.release()
            raise

    def _open_folder(self) -> None:
        """Keep what is whole of what is there, and remove the rest."""
        if (self.folder / INDEX).exists():
            found, self._shards = read_index(self.folder)
            check_origin(self.folder, found=found, expected=self.fingerprint)
        elif foreign := sorted(self.folder.glob(SHARDS)):  # the index is written before the first shard
            raise CheckpointError(f"{foreign[0]} is there without {INDEX}; move it, or capture into another folder")
        self.damaged = [shard.file for shard in self._shards if not self._is_whole(shard)]
        self._shards = [shard for shard in self._shards if shard.file not in self.damaged]
        if self.damaged:
            write_index(self.folder, fingerprint=self.fingerprint, shards=self._shards)
        self._remove_strays()
        self._digests = {digest for shard in self._shards for digest, _ in shard.rows}
        self._written = INDEX_BYTES + sum(shard.disk_bytes for shard in self._shards)
        self._open_tokens = 0
        if not (self.folder / INDEX).exists():
            write_index(self.folder, fingerprint=self.fingerprint, shards=self._shards)

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
        tokens, rows = self._open_tokens + num_tokens, len(self._pending) + 1
        opened = tokens * self.fingerprint.bytes_per_token + rows * ROW_BYTES + FILE_BYTES
        return self._written + opened <= self._max_disk

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
        dtype = DTYPES[self.fingerprint.dtype]
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
        self._open_tokens += length
        self._pending.append((example.digest, tensors))
        self._digests.add(example.digest)
        if self._open_tokens * self.fingerprint.bytes_per_token >= self._shard_bytes:
            self.flush()
        return True

    def flush(self) -> None:
        """Write the open shard.  Raises DataError when the disk is full: finished shards stay, no other file."""
        if not self._pending:
            return
        name = self._next_name()
        columns = {key: torch.cat([row[key] for _, row in self._pending]) for key in ("ids", "mask", "taps", "hidden")}
        content = save(columns)
        rows = tuple((digest, len(row["ids"])) for digest, row in self._pending)
        shard = Shard(file=name, sha256=hashlib.sha256(content).hexdigest(), size=len(content), rows=rows)
        self._pending, self._open_tokens = [], 0
        try:
            write_bytes(self.folder / name, content)
            self._shards.append(shard)
            write_index(self.folder, fingerprint=self.fingerprint, shards=self._shards)
        except OSError as error:
            self._shards = [kept for kept in self._shards if kept is not shard]
            self._digests -= {digest for digest, _ in rows}
            (self.folder / name).unlink(missing_ok=True)
            raise DataError(
                f"cannot write {self.folder / name}: {error.strerror}; {len(self)} rows are kept; {fault_advice(error)}"
            ) from error
        self._written += shard.disk_bytes

    def _next_name(self) -> str:
        """The first name that no listed shard has."""
        listed = {shard.file for shard in self._shards}
        return next(name for name in map(shard_name, range(len(listed) + 1)) if name not in listed)

    def close(self) -> None:
        """Write what is still in memory, and let others write."""
        try:
            self.flush()
        finally:
            self._claim.release()

    def _is_whole(self, shard: Shard) -> bool:
        path = self.folder / shard.file
        return path.is_file() and path.stat().st_size == shard.size and sha256_file(path) == shard.sha256

    def _remove_strays(self) -> None:
        listed = {shard.file for shard in self._shards}
        for path in self.folder.glob(SHARDS):
            if path.name not in listed:
                path.unlink()
        remove_partial(self.folder / INDEX)
        remove_partial(self.folder / self._next_name())


class FeatureReader:
    """Rows of a folder by position or digest; a shard's checksum is verified before its first row is handed out.

    expected: the fingerprint that the features must have, or None to accept any (see `fingerprint`).  Of the stored
    taps it may name some, in any order; its taps are what rows then hold.  last: the tap that stands for the last
    hidden state, which every folder has.
    Raises CheckpointError naming the file that is missing, torn, altered, exchanged or of another origin.
    """

    def __init__(self, folder: Path | str, *, expected: Fingerprint | None = None, last: int | None = None) -> None:
        self.folder = Path(folder)
        self.fingerprint, self._shards = read_index(self.folder)
        stored = self.fingerprint.taps
        self._taps, self._last = stored if expected is None else expected.taps, last
        if expected is not None:
            known = replace(expected, taps=stored) if {*self._taps} <= {*stored, last} else expected
            check_origin(self.folder, found=self.fingerprint, expected=known)
        for shard in self._shards:
            check_size(self.folder, shard)
        self._places = [
            (shard, start, length, digest) for shard in self._shards for digest, start, length in shard.places()
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
        row = FeatureRow(rows["ids"], rows["mask"].bool(), self._wanted(rows), rows["hidden"], digest)
        if not _is_finite(rows):
            raise CheckpointError(
                f"{self.folder / shard.file}: row {digest[:12]} holds NaN or infinity; capture it again"
            )
        if row_digest(row.ids, row.mask) != digest:
            raise CheckpointError(f"{self.folder / shard.file}: row {digest[:12]} holds other tokens; capture it again")
        return row

    def _wanted(self, rows: dict[str, Tensor]) -> Tensor:
        """The taps that were asked for, side by side: [T, K*H]."""
        stored = self.fingerprint.taps
        if self._taps == stored:
            return rows["taps"]
        columns = dict(zip(stored, rows["taps"].split(self.fingerprint.hidden_size, dim=-1), strict=True))
        return torch.cat([rows["hidden"] if tap == self._last else columns[tap] for tap in self._taps], dim=-1)

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

    def _shard(self, shard: Shard) -> Any:
        if shard.file not in self._open:
            path = self.folder / shard.file
            check_size(self.folder, shard)
            found = sha256_file(path)
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


def _is_finite(tensors: dict[str, Tensor]) -> bool:
    return bool(tensors["taps"].isfinite().all()) and bool(tensors["hidden"].isfinite().all())
