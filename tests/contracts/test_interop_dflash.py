"""Published DFlash folders: names, keys, the same logits after a round trip, faults named (K12, K35)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_blocks import tiny_dflash
from fixtures_drafts import batch_of, random_rows, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.drafts.dflash import DFlash
from paceline.errors import CheckpointError, UnsupportedExport
from paceline.interop import dflash
from paceline.ops.vocab import DraftVocab
from paceline.store.checkpoint import DraftInfo, LoadedDraft, load_draft, save_draft
from paceline.store.fingerprint import identify_target
from paceline.targets.generic import Target
from paceline.training.paths import guided

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 5e5,
}  # fmt: skip


def published(folder: Path, *, dtype: str = "float32") -> tuple[LoadedDraft, Target, Path]:
    target = make_target(tiny_llama(layers=8, rope_parameters=LLAMA3))
    draft = tiny_dflash(target)
    info = DraftInfo("dflash", draft.config, identify_target(target))
    save_draft(folder / "ours", draft, info=info, dtype=dtype)
    loaded = load_draft(folder / "ours", target=target)
    dflash.write(loaded, folder / "out")
    return loaded, target, folder / "out"


def said(draft: object, target: Target) -> list[torch.Tensor]:
    assert isinstance(draft, DFlash)
    draft.borrow(target)
    batch = batch_of(target, random_rows(2), taps=draft.taps)
    return [draft.logits(step.hidden) for step in guided(draft, batch, target, steps=5)]


def assert_same_sizes(one: LoadedDraft, two: LoadedDraft) -> None:
    """The rotary settings may be written otherwise, as long as they say the same."""
    assert isinstance(one.draft, DFlash) and isinstance(two.draft, DFlash)
    mine, theirs = (draft.config.model_dump(exclude={"rope"}) for draft in (one.draft, two.draft))
    assert mine == theirs
    assert torch.equal(one.draft.rotary.inverse_frequencies(), two.draft.rotary.inverse_frequencies())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_gives_bit_equal_logits(tmp_path: Path, dtype: str) -> None:
    loaded, target, folder = published(tmp_path, dtype=dtype)
    again = dflash.read(folder, target)
    assert again.dtype == dtype
    assert_same_sizes(again, loaded)
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == getattr(torch, dtype)
    for one, two in zip(said(loaded.draft, target), said(again.draft, target), strict=True):
        assert torch.equal(one, two)


def test_the_keys_that_readers_look_for(tmp_path: Path) -> None:
    loaded, _, folder = published(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 6
    # Outputs of layers 1 and L - 3, counted from 0: the index of transformers' hidden_states is one more.
    assert config["dflash_config"]["target_layer_ids"] == [1, 5]
    assert config["dflash_config"]["mask_token_id"] == 63
    assert (config["num_target_layers"], config["num_hidden_layers"]) == (8, 2)
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["rope_type"] == "llama3"
    assert not {"lm_head.weight", "embed_tokens.weight"} & load_file(folder / "model.safetensors").keys()
    assert load_file(folder / "model.safetensors").keys() == loaded.draft.state_dict().keys()


@pytest.mark.parametrize(
    ("changes", "nested", "says"),
    [
        ({}, {"causal": True}, "causal is on"),
        ({}, {"use_swa": True}, "use_swa is on"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding_attention is on"),
        ({"architectures": ["DominoDraftModel"]}, {}, "DominoDraftModel is on"),
        ({"attention_bias": True}, {}, "attention_bias is on"),
        ({"block_size": 16}, {}, "block_size is 16 and dflash_config.block_size 6"),
        ({"block_size": None}, {"block_size": None}, "no block_size; expected one size"),
        ({"num_target_layers": 9}, {}, "and 9 layers"),
        ({"vocab_size": 72}, {}, "made for a target with vocabulary 72"),
        ({}, {"target_layer_ids": [1, 8]}, "layer ids [8] are not outputs"),
        ({}, {"mask_token_id": 64}, "an id below 64"),
        ({}, {"mask_token_id": "x"}, 'mask_token_id: found "x"'),
        ({"dflash_config": None}, None, "dflash_config: found null"),
        ({"rms_norm_eps": -1.0}, {}, "rms_norm_eps: found -1.0"),
    ],
)
def test_what_this_draft_is_not_is_named(
    tmp_path: Path, changes: dict[str, object], nested: dict[str, object] | None, says: str
) -> None:
    _, target, folder = published(tmp_path)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    if nested is not None:
        config["dflash_config"] = {**config["dflash_config"], **nested}
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        dflash.read(folder, target)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["top", "nested"])
def test_the_block_size_may_stand_in_either_place_and_taps_may_be_left_out(tmp_path: Path, place: str) -> None:
    loaded, target, folder = published(tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del (config["dflash_config"] if place == "top" else config)["block_size"]
    del config["dflash_config"]["target_layer_ids"]
    path.write_text(json.dumps(config))
    assert_same_sizes(dflash.read(folder, target), loaded)


@pytest.mark.parametrize("how", ["missing", "extra", "shape"])
def test_a_spoiled_file_is_refused_by_name(tmp_path: Path, how: str) -> None:
    _, target, folder = published(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "layers.1.mlp.up_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        name = "layers.2.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        dflash.read(folder, target)


def test_what_cannot_be_written_leaves_no_folder(tmp_path: Path) -> None:
    target = make_target(tiny_llama(layers=8))
    small, eagle = tiny_dflash(target, words=40), tiny_eagle3(target)
    identity = identify_target(target)
    with pytest.raises(UnsupportedExport, match="no reduced vocabulary; the draft has 40 of 64 words"):
        dflash.write(LoadedDraft(small, DraftInfo("dflash", small.config, identity)), tmp_path / "out")
    with pytest.raises(UnsupportedExport, match="holds dflash drafts; found eagle3"):
        dflash.write(LoadedDraft(eagle, DraftInfo("eagle3", eagle.config, identity)), tmp_path / "out")
    biased = DFlash(
        small.config.model_copy(update={"attention_bias": True, "draft_vocab_size": 64}), DraftVocab.full(64)
    )
    assert biased.state_dict()["layers.0.self_attn.q_proj.bias"].shape == (32,)
    with pytest.raises(UnsupportedExport, match="the draft has them on three"):
        dflash.write(LoadedDraft(biased, DraftInfo("dflash", biased.config, identity)), tmp_path / "out")
    whole = tiny_dflash(target)
    with torch.no_grad():
        whole.norm.weight[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        dflash.write(LoadedDraft(whole, DraftInfo("dflash", whole.config, identity)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["3", "[]", "null", "{", "{}"])
def test_a_configuration_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        dflash.check(tmp_path)
