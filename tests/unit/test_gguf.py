"""A GGUF file becomes a folder that transformers loads by itself, with the very weights that went in."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from safetensors.torch import load_file

from paceline.errors import TargetError
from paceline.store import gguf as gguf_door
from paceline.store.hub import load_model, load_tokenizer

VOCAB = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijkl", "ab"]
H, HEADS, KV, MLP = 8, 2, 1, 16
WIDTH = H // HEADS


@pytest.fixture(scope="module")
def weights():
    """Float32 tensors of a one-layer Llama under GGUF's names."""
    shapes = {
        "token_embd": (len(VOCAB), H), "output_norm": (H,), "blk.0.attn_norm": (H,), "blk.0.ffn_norm": (H,),
        "blk.0.attn_q": (HEADS * WIDTH, H), "blk.0.attn_k": (KV * WIDTH, H), "blk.0.attn_v": (KV * WIDTH, H),
        "blk.0.attn_output": (H, H), "blk.0.ffn_gate": (MLP, H), "blk.0.ffn_up": (MLP, H), "blk.0.ffn_down": (H, MLP),
    }  # fmt: skip
    random = np.random.default_rng(0)
    return {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    place = tmp_path_factory.mktemp("gguf")
    writer = GGUFWriter(place / "tiny.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(H)
    writer.add_block_count(1)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(VOCAB) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (place / "out").mkdir()
    command = [sys.executable, "-m", "paceline.store.gguf", str(place / "tiny.gguf"), str(place / "out")]
    subprocess.run(command, check=True, capture_output=True)
    return place / "out"


def test_weights_are_the_ones_that_went_in(folder, weights):
    saved = load_file(folder / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        assert torch.equal(saved[ours], torch.from_numpy(weights[theirs]))


def test_model_and_tokenizer_load_without_gguf(folder):
    model = load_model(str(folder))
    assert "quantization_config" not in model.config.to_dict()
    assert torch.equal(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == (
        "<|im_start|>abc<|im_end|>"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_no_trace_of_the_machine(folder):
    for file in folder.glob("*.json"):
        assert str(folder.parent) not in file.read_text()


def test_missing_package(monkeypatch, tmp_path):
    monkeypatch.setattr(gguf_door, "find_spec", lambda _: None)
    with pytest.raises(TargetError, match="needs the package `gguf`"):
        gguf_door.dequantise(tmp_path / "x.gguf", folder=tmp_path)
