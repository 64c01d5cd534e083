"""A draft's folder: what was saved comes back, and whatever is not exactly that is refused by name."""

import errno
import json
import signal
import tomllib

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures_drafts import tiny_eagle3
from fixtures_kill import die_at_flush, die_at_rename, in_child
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.config import parse_recipe
from paceline.errors import CheckpointError
from paceline.ops.rotary import RotarySpec
from paceline.store.checkpoint import DraftInfo, load_draft, read_info, save_draft, weights_sha256
from paceline.store.files import sha256_file
from paceline.store.fingerprint import identify_target, weights_digest
from paceline.store.manifest import open_manifest


def target_of(**options):
    return make_target(tiny_llama(layers=3, **options), tokenizer=tiny_tokenizer(), name="some/folder/tiny")


def info_of(draft, target):
    return DraftInfo(name="eagle3", config=draft.config, target=identify_target(target), notes={"step": 7})


@pytest.fixture
def saved(tmp_path):
    """(folder, draft, target) of a draft with 16 of 64 words."""
    target = target_of()
    draft = tiny_eagle3(target, words=16)
    recipe = parse_recipe("[training]\nsteps = 3", source="test")
    manifest = open_manifest(seed=3, command=["paceline"])
    save_draft(tmp_path / "draft", draft, info=info_of(draft, target), recipe=recipe, manifest=manifest)
    return tmp_path / "draft", draft, target


def rewrite(folder, change):
    """Change the weights and make draft.toml vouch for them, so that only the tensors are at fault."""
    tensors = load_file(folder / "draft.safetensors")
    change(tensors)
    old = sha256_file(folder / "draft.safetensors")
    save_file(tensors, folder / "draft.safetensors")
    facts = (folder / "draft.toml").read_text().replace(old, sha256_file(folder / "draft.safetensors"))
    (folder / "draft.toml").write_text(facts)


def test_what_was_saved_comes_back(saved):
    folder, draft, target = saved
    complaints = []
    loaded = load_draft(folder, target=target, warn=complaints.append)
    assert not complaints
    assert loaded.info == info_of(draft, target)
    assert loaded.draft.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.draft.state_dict()[name], tensor), name
    assert not loaded.draft.training
    assert weights_sha256(loaded.draft) == weights_sha256(draft)
    assert (folder / "recipe.toml").read_text().startswith("[target]")
    assert json.loads((folder / "manifest.json").read_text())["seed"] == 3
    assert tomllib.loads((folder / "draft.toml").read_text())["target"]["name"] == "some/folder/tiny"
    assert {path.name for path in folder.parent.iterdir()} == {"draft"}


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    target = target_of()
    draft = tiny_eagle3(target)
    save_draft(tmp_path / "d", draft, info=info_of(draft, target))
    assert not {"d2t", "t2d"} & load_file(tmp_path / "d" / "draft.safetensors").keys()
    assert load_draft(tmp_path / "d", target=target).draft.vocab.is_full


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                             "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ],
    ids=["llama3", "yarn", "partial"],
)  # fmt: skip
def test_rotary_settings_survive_the_round_trip(tmp_path, rope):
    target = target_of()
    draft = tiny_eagle3(target)
    config = draft.config.model_copy(update={"rope": rope})
    save_draft(tmp_path / "d", draft, info=DraftInfo("eagle3", config, identify_target(target)))
    loaded = load_draft(tmp_path / "d").draft
    expected = RotarySpec.from_settings(rope, head_dim=8, max_positions=512)
    assert torch.equal(loaded.rotary.inverse_frequencies(), expected.inverse_frequencies())


def test_dtype_on_disk_and_in_memory(tmp_path):
    target = target_of()
    draft = tiny_eagle3(target, words=16)
    save_draft(tmp_path / "d", draft, info=info_of(draft, target), dtype="bfloat16")
    raw = load_file(tmp_path / "d" / "draft.safetensors")
    assert (raw["fc.weight"].dtype, raw["d2t"].dtype, raw["t2d"].dtype) == (torch.bfloat16, torch.int64, torch.bool)
    wide = load_draft(tmp_path / "d").draft
    assert wide.fc.weight.dtype == torch.float32
    assert torch.equal(wide.fc.weight, draft.fc.weight.bfloat16().float())
    narrow = load_draft(tmp_path / "d", dtype=torch.bfloat16).draft
    assert (narrow.fc.weight.dtype, narrow.vocab.d2t.dtype) == (torch.bfloat16, torch.int64)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda t: t.pop("fc.weight"), "missing fc.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected extra"),
        (lambda t: t.update(renamed=t.pop("norm.weight")), "missing norm.weight; unexpected renamed"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \[3\], expected \[32\]"),
        (lambda t: t.update({"norm.weight": torch.ones(32).long()}), "norm.weight is torch.int64"),
        (lambda t: t["lm_head.weight"].fill_(torch.nan), "NaN or infinity in lm_head.weight"),
        (lambda t: t["fc.weight"][0, 0].fill_(torch.inf), "NaN or infinity in fc.weight"),
        (lambda t: t.pop("d2t"), "missing d2t, the map of its 16 words"),
        (lambda t: t["d2t"].add_(1), "d2t maps draft id 0"),
    ],
)
def test_a_wrong_tensor_is_named(saved, change, complaint):
    rewrite(saved[0], change)
    with pytest.raises(CheckpointError, match=complaint):
        load_draft(saved[0])


@pytest.mark.parametrize("name", ["draft.safetensors", "tokens.json.gz", "recipe.toml"])
def test_a_flipped_byte_and_a_missing_file_are_named(saved, name):
    path = saved[0] / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} is not the file that draft.toml describes"):
        load_draft(saved[0])
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_draft(saved[0])


def test_a_folder_that_is_no_draft(tmp_path):
    with pytest.raises(CheckpointError, match=r"no draft.toml in it; expected a folder written by `paceline train`"):
        load_draft(tmp_path)


def test_nan_weights_are_never_saved(saved):
    folder, draft, target = saved
    with torch.no_grad():
        draft.norm.weight[0] = torch.nan
    before = sha256_file(folder / "draft.safetensors")
    with pytest.raises(CheckpointError, match=r"not saved: NaN or infinity in norm\.weight"):
        save_draft(folder, draft, info=info_of(draft, target))
    assert sha256_file(folder / "draft.safetensors") == before


def test_a_weight_that_is_not_written_cannot_pass(saved, monkeypatch):
    """The sentinel: parameters are NaN before loading, so a loader that forgets one is caught."""
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: None)
    with pytest.raises(CheckpointError, match="after loading: NaN"):
        load_draft(saved[0])


def test_another_target_is_told_and_still_served(saved):
    folder, _, target = saved
    with torch.no_grad():
        target.model.model.layers[1].mlp.down_proj.weight[3, 5] += 0.5
    complaints = []
    load_draft(folder, target=target, warn=complaints.append)
    assert len(complaints) == 1
    assert "trained for another target" in complaints[0] and "\n" not in complaints[0]


def test_another_tokenizer_is_refused_by_its_first_differing_token(saved):
    folder, _, target = saved
    backend = json.loads(target.tokenizer.backend_tokenizer.to_str())
    words = backend["model"]["vocab"]
    words["six"], words["seven"] = words["seven"], words["six"]
    other = make_target(target.model, tokenizer=tiny_tokenizer(), name="other")
    other.tokenizer._tokenizer = type(target.tokenizer.backend_tokenizer).from_str(json.dumps(backend))
    first = words["seven"]
    with pytest.raises(CheckpointError, match=f"token {first} is 'six' for the draft and 'seven' in the tokenizer"):
        load_draft(folder, target=other)


@pytest.mark.parametrize("words", [16, None])
def test_padded_rows_are_accepted_and_never_proposed(tmp_path, words):
    """K10: a draft of 64 tokens for a target with 72 rows, of which the same 64 are used."""
    small, large = target_of(), target_of(vocab=72)
    draft = tiny_eagle3(small, words=words)
    save_draft(tmp_path / "d", draft, info=info_of(draft, small))
    loaded = load_draft(tmp_path / "d", target=large, warn=lambda text: None).draft
    assert (loaded.vocab.size, loaded.vocab.target_size) == (words or 64, 72)
    assert torch.equal(loaded.vocab.ids, draft.vocab.ids)
    assert torch.equal(loaded.lm_head.weight, draft.lm_head.weight)


def test_a_draft_that_can_say_more_than_the_target_is_refused(tmp_path):
    large, small = target_of(vocab=72), target_of()
    draft = tiny_eagle3(large)
    save_draft(tmp_path / "d", draft, info=info_of(draft, large))
    with pytest.raises(CheckpointError, match="can propose token 71"):
        load_draft(tmp_path / "d", target=small)


def test_other_sizes_are_refused(saved):
    other = make_target(tiny_llama(layers=4), tokenizer=tiny_tokenizer())
    with pytest.raises(CheckpointError, match="made for a target of 3 layers of width 32"):
        load_draft(saved[0], target=other)


def test_the_fingerprint_sees_weights_and_not_their_type():
    model = tiny_llama(layers=3).bfloat16()
    digest = weights_digest(model)
    assert weights_digest(model.float()) == digest
    with torch.no_grad():
        model.lm_head.weight[33, 7] += 0.125
    assert weights_digest(model) != digest


@pytest.mark.parametrize("kill_at", [1, 4, 6])
def test_a_kill_while_saving_leaves_a_whole_folder(saved, kill_at):
    folder, draft, target = saved
    newer = tiny_eagle3(target, words=16, seed=1)

    def save_and_die():
        die_at_flush(kill_at)
        save_draft(folder, newer, info=info_of(newer, target))

    assert in_child(save_and_die) == -signal.SIGKILL
    assert [path for path in folder.parent.iterdir() if path.name != "draft"]
    assert torch.equal(load_draft(folder).draft.fc.weight, draft.fc.weight)
    save_draft(folder, draft, info=read_info(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]


def test_a_kill_between_the_two_renames_is_healed_by_the_next_reader(saved):
    folder, draft, target = saved

    def save_and_die():
        die_at_rename(2)
        save_draft(folder, tiny_eagle3(target, words=16, seed=1), info=info_of(draft, target))

    assert in_child(save_and_die) == -signal.SIGKILL
    assert not folder.exists()
    assert torch.equal(load_draft(folder).draft.fc.weight, draft.fc.weight)


def test_a_full_disk_is_one_line_and_leaves_the_old_folder(saved, monkeypatch):
    folder, draft, target = saved
    before = sha256_file(folder / "draft.safetensors")

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("paceline.store.files._flush", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*draft: No space left on device; what was there"):
        save_draft(folder, draft, info=info_of(draft, target))
    assert sha256_file(folder / "draft.safetensors") == before
    assert [path.name for path in folder.parent.iterdir()] == ["draft"]
