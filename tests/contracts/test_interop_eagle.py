"""Published EAGLE-3 folders: names, shapes, the same logits after a round trip, faults named (K09, K12, K35)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_drafts import batch_of, random_rows, tiny_eagle3
from fixtures_models import make_target, tiny_llama
from paceline.errors import CheckpointError, UnsupportedExport
from paceline.interop import eagle
from paceline.ops.rotary import RotarySpec
from paceline.store.checkpoint import DraftInfo, LoadedDraft, load_draft, save_draft
from paceline.store.fingerprint import identify_target
from paceline.training.unroll import unroll

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 5e5,
}  # fmt: skip


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}


def published(folder: Path, *, words: int | None = 40, **changes: object) -> tuple[LoadedDraft, object, Path]:
    target = make_target(tiny_llama(**{"rope_parameters": LLAMA3, **changes}))
    draft = tiny_eagle3(target, words=words).bfloat16().float()
    loaded = LoadedDraft(draft, DraftInfo("eagle3", draft.config, identify_target(target)))
    eagle.write(loaded, folder / "out")
    return loaded, target, folder / "out"


@pytest.mark.parametrize("words", [None, 40])
def test_round_trip_gives_the_same_logits_and_rotary_frequencies(tmp_path: Path, words: int | None) -> None:
    loaded, target, folder = published(tmp_path, words=words)
    again = eagle.read(folder, target)  # type: ignore[arg-type]
    one, two = loaded.draft, again.draft
    assert torch.equal(one.rotary.inverse_frequencies(), two.rotary.inverse_frequencies())
    own = target.model.model.rotary_emb.inv_freq  # type: ignore[attr-defined]
    assert torch.allclose(two.rotary.inverse_frequencies(), own, atol=1e-7)
    batch = batch_of(target, random_rows(2), taps=one.taps)  # type: ignore[arg-type]
    for left, right in zip(
        unroll(one, batch, target, steps=2),
        unroll(two, batch, target, steps=2),
        strict=True,  # type: ignore[arg-type]
    ):
        assert torch.equal(one.logits(left.hidden), two.logits(right.hidden))


@pytest.mark.parametrize("rope", [YARN, PARTIAL], ids=["yarn", "partial"])
def test_rotary_frequencies_survive_an_export(tmp_path: Path, rope: dict[str, object]) -> None:
    target = make_target(tiny_llama(hidden_size=64))
    draft = tiny_eagle3(target, words=40)
    config = draft.config.model_copy(update={"rope": {"rope_parameters": rope}})
    draft = eagle.eagle3.build(config, draft.vocab)
    eagle.write(LoadedDraft(draft, DraftInfo("eagle3", config, identify_target(target))), tmp_path / "out")  # type: ignore[arg-type]
    again = eagle.read(tmp_path / "out", target)
    expected = RotarySpec.from_settings(config.rope, head_dim=config.head_dim, max_positions=512)
    found = again.draft.rotary  # type: ignore[attr-defined]
    assert expected.kind == rope["rope_type"] and len(expected.inverse_frequencies()) == expected.width // 2
    assert torch.allclose(found.inverse_frequencies(), expected.inverse_frequencies(), rtol=0, atol=1e-7)
    assert found.attention_scaling() == expected.attention_scaling()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_gives_bit_equal_logits_in_the_dtype_on_disk(tmp_path: Path, dtype: str) -> None:
    target = make_target(tiny_llama(rope_parameters=LLAMA3))
    draft = tiny_eagle3(target, words=40)
    info = DraftInfo("eagle3", draft.config, identify_target(target))
    save_draft(tmp_path / "ours", draft, info=info, dtype=dtype)
    loaded = load_draft(tmp_path / "ours", target=target)
    eagle.write(loaded, tmp_path / "out")
    again = eagle.read(tmp_path / "out", target)
    assert (loaded.dtype, again.dtype) == (dtype, dtype)
    assert load_file(tmp_path / "out" / "model.safetensors")["fc.weight"].dtype == getattr(torch, dtype)
    batch = batch_of(target, random_rows(2), taps=draft.taps)
    left, right = (unroll(each.draft, batch, target, steps=2) for each in (loaded, again))  # type: ignore[arg-type]
    for one, two in zip(left, right, strict=True):
        assert torch.equal(loaded.draft.logits(one.hidden), again.draft.logits(two.hidden))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": "x"}, 'num_hidden_layers: found "x"'),
        ({"num_hidden_layers": None}, "num_hidden_layers: found null"),
        ({"num_hidden_layers": [1]}, "num_hidden_layers: found [1]"),
        ({"eagle_config": "x"}, 'eagle_config: found "x"'),
        ({"eagle_config": []}, "eagle_config: found []"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "abc"}}, "layer_ids: found"),
        ({"eagle_aux_hidden_state_layer_ids": ["a", 1, 2]}, 'layer_ids.0: found "a"'),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "taps: found [0, 0, 1]"),
        ({"vocab_size": None}, "vocab_size: found null"),
        ({"hidden_size": "x"}, 'hidden_size: found "x"'),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps: found -1.0"),
        ({"rope_theta": 0.0, "rope_parameters": None}, "rope: found"),
    ],
)
def test_a_key_of_another_kind_is_named(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    _, target, folder = published(tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError) as caught:
        eagle.read(folder, target)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["3", "[]", "null", "{", "[" * 100_000])
def test_a_configuration_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        eagle.check(tmp_path)


def test_a_published_weight_in_eight_bits_or_integers_is_refused(tmp_path: Path) -> None:
    _, target, folder = published(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for dtype in (torch.float8_e4m3fn, torch.int64):
        save_file({**tensors, "norm.weight": tensors["norm.weight"].to(dtype)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"norm.weight is {dtype}"):
            eagle.read(folder, target)  # type: ignore[arg-type]


def test_the_published_names(tmp_path: Path) -> None:
    _, _, folder = published(tmp_path)
    names = set(load_file(folder / "model.safetensors"))
    layer = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    layer += [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    expected = {f"midlayer.{name}.weight" for name in layer} | {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert names == expected
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]  # outputs 0, 2, 3 of four layers
    assert config["tie_word_embeddings"] is False
    assert config["rope_theta"] == 5e5 and config["rope_scaling"]["rope_type"] == "llama3"


def spoil(tensors: dict[str, torch.Tensor], how: str) -> None:
    if how == "missing":
        del tensors["midlayer.mlp.up_proj.weight"]
    elif how == "extra":
        tensors["midlayer.extra.weight"] = torch.zeros(2)
    elif how == "renamed":
        tensors["midlayer.mlp.upp_proj.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")
    elif how == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("missing", "midlayer.mlp.up_proj.weight"),
        ("extra", "midlayer.extra.weight"),
        ("renamed", "midlayer.mlp.upp_proj.weight"),
        ("shape", "fc.weight"),
    ],
)
def test_a_spoiled_file_is_refused_by_name_both_ways(tmp_path: Path, how: str, named: str) -> None:
    loaded, target, folder = published(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors, how)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        eagle.read(folder, target)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedExport, match=named):
        eagle.check_export(tensors, loaded.draft.config, where="x")  # type: ignore[arg-type]


def test_a_draft_with_nan_leaves_no_folder(tmp_path: Path) -> None:
    loaded, _, _ = published(tmp_path)
    with torch.no_grad():
        loaded.draft.norm.weight[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"norm\.weight"):
        eagle.write(loaded, tmp_path / "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_foreign_targets_variants_and_pickles_are_refused(tmp_path: Path) -> None:
    _, target, folder = published(tmp_path)
    other = make_target(tiny_llama(vocab=72))
    with pytest.raises(CheckpointError, match="vocabulary 64"):
        eagle.read(folder, other)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "norm_before_residual": True}))
    with pytest.raises(CheckpointError, match="norm_before_residual"):
        eagle.read(folder, target)  # type: ignore[arg-type]
    path.write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(CheckpointError, match="2 layers"):
        eagle.read(folder, target)  # type: ignore[arg-type]
    path.write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        eagle.read(folder, target)  # type: ignore[arg-type]


def test_absolute_ids_in_d2t_are_named(tmp_path: Path) -> None:
    _, target, folder = published(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="d2t"):
        eagle.read(folder, target)  # type: ignore[arg-type]


def test_tied_targets_keep_their_own_embedding(tmp_path: Path) -> None:
    """K09: the embedding is lent, never saved, so it cannot differ; the head is the draft's own."""
    loaded, target, folder = published(tmp_path, tie_word_embeddings=True)
    assert "embed_tokens.weight" not in load_file(folder / "model.safetensors")
    again = eagle.read(folder, target)  # type: ignore[arg-type]
    assert torch.equal(again.draft.lm_head.weight, loaded.draft.lm_head.weight)
