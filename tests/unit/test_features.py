"""Captured features: what is read is what was written, every fault names its file, a kill loses no shard."""

import errno
import json
import os
import signal
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.store import feature_index, features, files
from paceline.store.feature_index import INDEX, Fingerprint, checksum
from paceline.store.features import FeatureReader, FeatureWriter, row_digest

PRINT = Fingerprint(
    target="t" * 64, tokenizer="k" * 64, template="c" * 64, taps=(0, 2), hidden_size=4, dtype="float32", version="0.1.0"
)
SHARD = 800  # bytes: two or three rows


@dataclass(frozen=True)
class Row:
    ids: torch.Tensor
    mask: torch.Tensor
    digest: str


def make(number, *, length=None):
    """(example, taps, hidden) of row `number`; 5 to 9 tokens."""
    generator = torch.Generator().manual_seed(number)
    length = length or 5 + number % 5
    ids = torch.randint(0, 64, (length,), generator=generator)
    mask = torch.arange(length) >= 3
    states = torch.randn(length, 12, generator=generator)
    return Row(ids, mask, row_digest(ids, mask)), states[:, :8], states[:, 8:]


def write(folder, numbers, **options):
    with FeatureWriter(folder, **{"fingerprint": PRINT, "shard_bytes": SHARD, **options}) as writer:
        for number in numbers:
            example, taps, hidden = make(number)
            writer.append(example, taps=taps, hidden=hidden)
    return writer


def assert_holds(folder, numbers):
    reader = FeatureReader(folder, expected=PRINT)
    assert len(reader) == len(numbers)
    for position, number in enumerate(numbers):
        example, taps, hidden = make(number)
        for row in (reader[position], reader.row(example.digest)):
            assert torch.equal(row.ids, example.ids)
            assert torch.equal(row.mask, example.mask)
            assert row.mask.dtype == torch.bool
            assert torch.equal(row.taps, taps)
            assert torch.equal(row.hidden, hidden)
            assert row.digest == example.digest
    assert reader.lengths() == [len(make(number)[0].ids) for number in numbers]
    assert reader.verify() == len(numbers)
    names = {shard.file for shard in reader._shards}
    assert {path.name for path in folder.iterdir()} == {INDEX, *names}, "no temporary or stray files"


def test_rows_come_back_bit_for_bit_and_twice_is_once(tmp_path):
    write(tmp_path, [0, 1, 2, 3, 3, 4, 5, 6, 0])
    assert_holds(tmp_path, range(7))
    assert len(list(tmp_path.glob("shard-*"))) >= 3
    reader = FeatureReader(tmp_path)
    assert make(3)[0].digest in reader
    with pytest.raises(CheckpointError, match=r"no features for row .*run"):
        reader.row(make(99)[0].digest)


def test_bfloat16_is_rounded_once_and_takes_half_the_room(tmp_path):
    half = replace(PRINT, dtype="bfloat16")
    write(tmp_path, range(3), fingerprint=half)
    row = FeatureReader(tmp_path, expected=half)[1]
    assert row.taps.dtype == torch.bfloat16
    assert torch.equal(row.taps, make(1)[1].to(torch.bfloat16))
    assert (PRINT.bytes_per_token, half.bytes_per_token) == (12 * 4 + 9, 12 * 2 + 9)
    with pytest.raises(ConfigError, match="'float16'; expected one of float32, bfloat16"):
        replace(PRINT, dtype="float16")


def test_the_estimate_is_an_upper_bound_and_close(tmp_path):
    write(tmp_path, range(400), shard_bytes=10**9)
    tokens = sum(FeatureReader(tmp_path).lengths())
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size <= PRINT.estimate_bytes(num_tokens=tokens, num_rows=400) <= 1.1 * size


def flip(path, index):
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(bytes(content))


def shards(folder):
    return sorted(folder.glob("shard-*"))


def exchange(folder, first, second):
    one, two = shards(folder)[first], shards(folder)[second]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


FAULTS = {
    "flipped data": (lambda folder: flip(shards(folder)[1], -5), "shard-00001.* its sha256 is"),
    "flipped header": (lambda folder: flip(shards(folder)[1], 3), "shard-00001.* its sha256 is"),
    "truncated": (lambda folder: os.truncate(shards(folder)[1], 100), "shard-00001.* 100 bytes instead of"),
    "empty": (lambda folder: os.truncate(shards(folder)[0], 0), "shard-00000.* 0 bytes instead of"),
    "missing": (lambda folder: shards(folder)[1].unlink(), "shard-00001.* missing"),
    "exchanged": (lambda folder: exchange(folder, 0, 1), "shard-00000.* holds the content of shard-00001"),
    "no index": (lambda folder: (folder / "features.json").unlink(), "features.json is missing"),
    "index cut": (lambda folder: os.truncate(folder / "features.json", 90), "features.json is not JSON"),
    "index no object": (lambda folder: (folder / "features.json").write_text("[]"), "features.json was altered"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_the_file(tmp_path, fault):
    # Rows of one length: shards of one size, so that only the content can give an exchange away.
    with FeatureWriter(tmp_path, fingerprint=PRINT, shard_bytes=SHARD) as writer:
        for number in range(9):
            example, taps, hidden = make(number, length=6)
            writer.append(example, taps=taps, hidden=hidden)
    assert FeatureReader(tmp_path, expected=PRINT).verify() == 9
    assert len({path.stat().st_size for path in shards(tmp_path)[:2]}) == 1
    harm, message = FAULTS[fault]
    harm(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        FeatureReader(tmp_path, expected=PRINT).verify()


def test_an_edited_index_is_refused(tmp_path):
    write(tmp_path, range(4))
    text = (tmp_path / "features.json").read_text()
    (tmp_path / "features.json").write_text(text.replace('"hidden_size":4', '"hidden_size":5'))
    with pytest.raises(CheckpointError, match=r"features\.json was altered"):
        FeatureReader(tmp_path)


def test_a_shard_is_checked_before_its_first_row_is_handed_out(tmp_path):
    write(tmp_path, range(6))
    reader = FeatureReader(tmp_path)
    flip(shards(tmp_path)[1], -5)
    reader[0]
    with pytest.raises(CheckpointError, match="shard-00001"):
        reader[3]


def resign(folder, change):
    """Rewrite shard 0 with changed tensors and vouch for it in the index, as a faulty writer would."""
    path = shards(folder)[0]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    content = json.loads((folder / "features.json").read_text())
    content.pop("checksum")
    content["shards"][0].update(sha256=files.sha256_file(path), size=path.stat().st_size)
    content["checksum"] = checksum(content)
    (folder / "features.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("taps", float("nan"), "NaN or inf"), ("hidden", float("inf"), "NaN or inf"), ("ids", 63, "other tokens")],
)
def test_rows_that_no_writer_of_ours_wrote_are_refused(tmp_path, key, value, message):
    write(tmp_path, range(4))
    resign(tmp_path, lambda tensors: tensors[key][6].fill_(value))
    with pytest.raises(CheckpointError, match=f"shard-00000.*: row {make(1)[0].digest[:12]} holds {message}"):
        FeatureReader(tmp_path).verify()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_states_that_are_not_finite_as_stored_are_refused_when_written(tmp_path, value):
    example, taps, hidden = make(0)
    taps = taps.clone()
    taps[2, 1] = value
    with (
        FeatureWriter(tmp_path, fingerprint=replace(PRINT, dtype="bfloat16")) as writer,
        pytest.raises(DataError, match=f"row {example.digest[:12]}: .*NaN or infinity"),
    ):
        writer.append(example, taps=taps, hidden=hidden)
    assert len(FeatureReader(tmp_path)) == 0


@pytest.mark.parametrize("taps", [(2,), (2, 0), (9,), (9, 0)])
def test_a_draft_that_reads_less_of_the_target_takes_what_was_captured_for_more(tmp_path, taps):
    write(tmp_path, range(2))
    reader = FeatureReader(tmp_path, expected=replace(PRINT, taps=taps), last=9)
    example, stored, hidden = make(1)
    columns = {0: stored[:, :4], 2: stored[:, 4:], 9: hidden}
    assert torch.equal(reader.row(example.digest).taps, torch.cat([columns[tap] for tap in taps], dim=-1))
    assert torch.equal(reader.row(example.digest).hidden, hidden)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "x" * 64}, r"target tttttttttttt\.\. instead of xxxxxxxxxxxx\.\."),
        ({"tokenizer": "x"}, "tokenizer"),
        ({"template": "x"}, "template"),
        ({"taps": (0, 1)}, r"taps \(0, 2\) instead of \(0, 1\)"),
        ({"dtype": "bfloat16"}, "dtype float32 instead of bfloat16"),
        ({"version": "9"}, "version"),
    ],
)
def test_features_of_another_origin_are_refused_to_reader_and_writer(tmp_path, change, message):
    write(tmp_path, range(2))
    other = replace(PRINT, **change)
    with pytest.raises(CheckpointError, match=f"features.json is of another origin: {message}"):
        FeatureReader(tmp_path, expected=other)
    with pytest.raises(CheckpointError, match=message):
        FeatureWriter(tmp_path, fingerprint=other)


def test_the_disk_cap_stops_before_it_is_passed_and_a_higher_one_resumes(tmp_path):
    cap = 12_000
    with FeatureWriter(tmp_path, fingerprint=PRINT, max_disk=cap, shard_bytes=SHARD) as writer:
        stored = 0
        while writer.fits(len(make(stored)[0].ids)) and stored < 100:
            example, taps, hidden = make(stored)
            assert writer.append(example, taps=taps, hidden=hidden)
            stored += 1
        with pytest.raises(DataError, match=f"max_disk of {cap} bytes reached after {stored} rows"):
            writer.append(make(stored)[0], taps=make(stored)[1], hidden=make(stored)[2])
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.6 * cap < used <= cap
    assert_holds(tmp_path, range(stored))
    again = FeatureWriter(tmp_path, fingerprint=PRINT, max_disk=cap, shard_bytes=SHARD)
    assert not again.fits(9), "what is on disk counts"
    again.close()
    resumed = write(tmp_path, range(stored + 5), max_disk=2 * cap)
    assert len(resumed) == stored + 5
    assert_holds(tmp_path, range(stored + 5))


@pytest.mark.parametrize("failing", ["shard-00001", "features.json"])
def test_a_full_disk_leaves_finished_shards_and_nothing_else(tmp_path, monkeypatch, failing):
    write(tmp_path, range(2), shard_bytes=10)  # rows 0 and 1, a shard each
    (tmp_path / "shard-00001.safetensors").unlink()
    content = json.loads((tmp_path / "features.json").read_text())
    content.pop("checksum")
    content["shards"].pop()
    content["checksum"] = checksum(content)
    (tmp_path / "features.json").write_text(json.dumps(content))

    def full(path, data):
        if path.name.startswith(failing):
            raise OSError(errno.ENOSPC, "No space left on device")
        files.write_bytes(path, data)

    monkeypatch.setattr(features, "write_bytes", full)
    monkeypatch.setattr(feature_index, "write_bytes", full)
    with pytest.raises(DataError, match="No space left on device; 1 rows are kept; free space"):
        write(tmp_path, [0, 1])
    monkeypatch.undo()
    assert_holds(tmp_path, [0])
    write(tmp_path, range(3))
    assert_holds(tmp_path, range(3))


def test_an_exception_of_the_caller_keeps_the_rows_written_so_far(tmp_path):
    with pytest.raises(KeyboardInterrupt), FeatureWriter(tmp_path, fingerprint=PRINT) as writer:
        writer.append(make(0)[0], taps=make(0)[1], hidden=make(0)[2])
        raise KeyboardInterrupt
    assert_holds(tmp_path, [0])


def killed_after(folder, steps):
    """Run a capture of 6 rows in a child that is killed with SIGKILL at its n-th flush.  Returns True if it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def step(path):
            nonlocal count
            count += 1
            if count > steps:
                os.kill(os.getpid(), signal.SIGKILL)
            flush(path)

        flush, files._flush = files._flush, step
        write(folder, range(6))
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_is_resumed_to_the_same_rows(tmp_path):
    steps, kept = 0, set()
    while killed_after(folder := tmp_path / str(steps), steps):
        write(folder, [])  # opening alone removes what the kill left behind
        kept.add(len(FeatureReader(folder)))
        assert_holds(folder, range(len(FeatureReader(folder))))
        write(folder, range(6))
        assert_holds(folder, range(6))
        steps += 1
    assert steps >= 10, "the kills hit every shard and every index"
    assert len(kept) >= 3, "finished shards survive"


def test_two_captures_into_one_folder_are_not_both_let_in(tmp_path):
    with FeatureWriter(tmp_path, fingerprint=PRINT), pytest.raises(ConfigError, match="another process writes to"):
        FeatureWriter(tmp_path, fingerprint=PRINT)
    with pytest.raises(CheckpointError) as kept:  # what is refused lets go of the folder
        FeatureWriter(tmp_path, fingerprint=replace(PRINT, template="other"))
    write(tmp_path, range(2))
    assert kept
