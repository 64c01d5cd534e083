"""`paceline convert` from the command line: a mistake leaves no folder, names every fault, and costs no target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_drafts import tiny_eagle3
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.cli.__main__ import MISTAKE, run
from paceline.interop import eagle
from paceline.store.checkpoint import DraftInfo, LoadedDraft
from paceline.store.fingerprint import identify_target


def folders(place: Path) -> tuple[Path, Path]:
    """A target's folder, and a published draft for it."""
    model = tiny_llama(layers=3)
    model.save_pretrained(place / "target")
    tiny_tokenizer().save_pretrained(place / "target")
    target = make_target(model, tokenizer=tiny_tokenizer())
    draft = tiny_eagle3(target, words=40)
    eagle.write(LoadedDraft(draft, DraftInfo("eagle3", draft.config, identify_target(target))), place / "published")
    return place / "target", place / "published"


def spoil(path: Path) -> None:
    tensors = load_file(path)
    del tensors["midlayer.mlp.up_proj.weight"]
    tensors["midlayer.extra.weight"] = torch.zeros(2)
    tensors["midlayer.mlp.dawn_proj.weight"] = tensors.pop("midlayer.mlp.down_proj.weight")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, path)


def test_every_fault_of_a_file_is_named_and_no_folder_is_left(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target, source = folders(tmp_path)
    spoil(source / "model.safetensors")
    before = {path.name for path in tmp_path.iterdir()}
    arguments = ["convert", str(source), str(tmp_path / "out"), "--target", str(target), "--from", "eagle"]
    capsys.readouterr()  # what transformers said while it saved the target
    assert run(arguments) == MISTAKE
    said = capsys.readouterr().err
    for named in (
        "missing midlayer.mlp.down_proj.weight, midlayer.mlp.up_proj.weight",
        "unexpected midlayer.extra.weight, midlayer.mlp.dawn_proj.weight",
        "fc.weight has shape [32, 95], expected [32, 96]",
    ):
        assert named in said, said
    assert said.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_there_and_back_from_the_command_line(tmp_path: Path) -> None:
    target, source = folders(tmp_path)
    ours, again = str(tmp_path / "ours"), str(tmp_path / "again")
    assert run(["convert", str(source), ours, "--target", str(target), "--from", "eagle"]) == 0
    assert run(["convert", ours, again, "--target", str(target), "--to", "eagle"]) == 0
    one, two = load_file(source / "model.safetensors"), load_file(Path(again) / "model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("way", ["--from", "--to"])
def test_a_missing_source_is_refused_before_the_target_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("paceline.store.hub.load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    arguments = ["convert", str(tmp_path / "none"), str(tmp_path / "out"), "--target", "smollm2", way, "eagle"]
    assert run(arguments) == MISTAKE
    said = capsys.readouterr().err
    assert "SOURCE: no folder" in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()
