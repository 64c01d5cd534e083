"""A draft's folder that somebody edited: every fault is one line that names file and key."""

import gzip
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_drafts import tiny_eagle3
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.errors import CheckpointError
from paceline.plugins import plugin_names
from paceline.store.checkpoint import DraftInfo, load_draft, read_info, save_draft
from paceline.store.files import sha256_file
from paceline.store.fingerprint import identify_target


@pytest.fixture
def folder(tmp_path):
    """A saved draft with 16 of 64 words."""
    target = make_target(tiny_llama(layers=3), tokenizer=tiny_tokenizer(), name="tiny")
    draft = tiny_eagle3(target, words=16)
    info = DraftInfo("eagle3", draft.config, identify_target(target), {"step": 7})
    save_draft(tmp_path / "d", draft, info=info)
    return tmp_path / "d"


def edit(folder, pattern, text):
    facts = (folder / "draft.toml").read_text("utf-8")
    changed, count = re.subn(pattern, text, facts, count=1, flags=re.MULTILINE | re.DOTALL)
    assert count == 1, pattern
    (folder / "draft.toml").write_text(changed, "utf-8")


def exchange(folder, name, data):
    """Another file, and a draft.toml that vouches for it."""
    old = sha256_file(folder / name)
    (folder / name).write_bytes(data)
    edit(folder, old, sha256_file(folder / name))


def complaint(folder):
    with pytest.raises(CheckpointError) as caught:
        load_draft(folder)
    text = str(caught.value)
    assert "\n" not in text
    return text


def section(name):
    return rf"^\[{name}\]\n.*?(?=^\[|\Z)"


@pytest.mark.parametrize(
    ("pattern", "text", "key"),
    [
        (section("sha256"), "", "sha256: missing"),
        (section("target"), "", "target: missing"),
        (section("training"), "", "training: missing"),
        (section("vocabulary"), "", "vocabulary: missing"),
        (r"^\[target\]\n", "[target]\nextra = 1\n", "target.extra: unknown key"),
        (r"^num_layers = 3", 'num_layers = "3"', 'target.num_layers: found "3"'),
        (r"^draft = .*?$", "draft = 3", "draft: found 3"),
        (r"^draft = .*?$", 'draft = "eagle4"', "draft: drafts: no 'eagle4'; did you mean 'eagle3'"),
        (r"^draft = .*?$", 'draft = "ngram"', "draft: found 'ngram', expected a draft with weights"),
        (r"^draft = .*?$", 'draft = ".x"', "draft: found '.x'"),
        (r"^format = 1", 'format = "1"', "format: found '1', expected the number 1"),
        (r"^format = 1", "format = 2", "format: found 2, expected the number 1"),
        (r"^dtype = .*?$", 'dtype = "int4"', 'dtype: found "int4"'),
        (r"^rms_norm_eps = .*?$", "rms_norm_eps = nan", "config.rms_norm_eps: found NaN"),
        (r"^rms_norm_eps = .*?$", "rms_norm_eps = -1.0", "config.rms_norm_eps: found -1.0"),
        (r"^num_key_value_heads = .*?$", "num_key_value_heads = 0", "config.num_key_value_heads: found 0"),
        (r"^taps = .*?$", "taps = [0, 1, 9]", "config: it reads layers 0, 1, 9 of width 32; the target has layers"),
        (r"^taps = .*?$", "taps = [0, 0, 1]", "config.taps: found [0, 0, 1]"),
        (r"^draft_vocab_size = .*?$", "draft_vocab_size = 17", "config: draft vocabulary of 16 of 64 words"),
        (r"^rope_theta = .*?$", "rope_theta = 0.0", "config.rope: found"),
        (r'^"tokens.json.gz" = .*?\n', "", "sha256: found"),
        (r'^"tokens.json.gz" = ', '"../tokens.json.gz" = "0"\n"tokens.json.gz" = ', "names of files in this folder"),
    ],
)
def test_an_edited_fact_is_one_line_that_names_file_and_key(folder, pattern, text, key):
    edit(folder, pattern, text)
    said = complaint(folder)
    assert said.startswith(f"{folder / 'draft.toml'}: "), said
    assert key in said, said


@pytest.mark.parametrize("data", [b"\xff\xfe", b"format = = 1", b"a = " + b"[" * 50_000])
def test_a_draft_toml_that_is_none(folder, data):
    (folder / "draft.toml").write_bytes(data)
    assert complaint(folder).startswith(str(folder / "draft.toml"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"hello", "is not a gzip file"),
        (gzip.compress(b"hello")[:-9], "is not a gzip file"),
        (gzip.compress(b"hello"), "holds no JSON"),
        (gzip.compress(b"\xff"), "holds no JSON"),
        (gzip.compress(b"3"), "holds a int; expected a list"),
        (gzip.compress(b'["a", 3]'), "token 1 is 3"),
    ],
)
def test_token_names_that_are_none(folder, data, said):
    exchange(folder, "tokens.json.gz", data)
    assert f"{folder / 'tokens.json.gz'}" in complaint(folder)
    assert said in complaint(folder)


def spoil(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "draft.safetensors").items()}
    change(tensors)
    old = sha256_file(folder / "draft.safetensors")
    save_file(tensors, folder / "draft.safetensors")
    edit(folder, old, sha256_file(folder / "draft.safetensors"))


def test_a_weight_in_eight_bits_is_refused_by_name(folder):
    spoil(folder, lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)}))
    assert "norm.weight is torch.float8_e4m3fn" in complaint(folder)


@pytest.mark.parametrize("change", [lambda t: t["d2t"].add_(1), lambda t: t.update(t2d=t["t2d"].float())])
def test_a_broken_map_names_its_file(folder, change):
    spoil(folder, change)
    assert complaint(folder).startswith(f"{folder / 'draft.safetensors'}: d2t")


def test_a_folder_never_chooses_what_is_imported(folder, tmp_path, monkeypatch):
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "wave.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    edit(folder, r"^draft = .*?$", 'draft = "trap.wave"')
    known = ", ".join(plugin_names("drafts"))
    assert f"draft: found 'trap.wave', expected one of {known}: a file never chooses" in complaint(folder)
    assert not {"trap", "trap.wave"} & sys.modules.keys()


def test_a_module_that_the_program_imported_may_be_named(folder):
    edit(folder, r"^draft = .*?$", 'draft = "paceline.drafts.eagle3"')
    assert read_info(folder).name == "paceline.drafts.eagle3"
    edit(folder, r"^draft = .*?$", 'draft = "gzip"')
    assert "draft: found 'gzip'" in complaint(folder) or "drafts: no 'gzip'" in complaint(folder)
    edit(folder, r"^draft = .*?$", 'draft = "os.path"')
    assert "exports no PLUGIN" in complaint(folder)
