"""Rotary geometry against transformers' own modules, for every variant and both layouts of the keys."""

import pytest
import torch
from transformers import LlamaConfig, StableLmConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from paceline.errors import ConfigError
from paceline.ops.rotary import RotarySpec, apply_rotary, rotary_tables, section_rows

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, given attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.37},
    "yarn, mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7},
    "yarn, betas": {"rope_type": "yarn", "factor": 16.0, "beta_fast": 64.0, "beta_slow": 2.0, "truncate": False},
    "yarn, a step": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn, factor 1": {"rope_type": "yarn", "factor": 1.0},
}
SIZES = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
POSITIONS = torch.tensor([[0, 1, 2, 7, 100], [5, 4, 3, 4000, 90000]])


def old_layout(scaling, *, theta):
    return {**SIZES, "rope_theta": theta, "rope_scaling": dict(scaling) if scaling else None}


def new_layout(scaling, *, theta):
    return {**SIZES, "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta}}


def assert_same_geometry(spec, module, *, positions=POSITIONS):
    assert spec.inverse_frequencies().equal(module.inv_freq)
    assert spec.attention_scaling() == pytest.approx(module.attention_scaling, rel=1e-12)
    cos, sin = rotary_tables(spec, positions=positions)
    theirs_cos, theirs_sin = module(torch.zeros(1), positions)
    torch.testing.assert_close(cos, theirs_cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, theirs_sin, rtol=0, atol=1e-7)


@pytest.mark.parametrize("theta", [10_000.0, 5e5])
@pytest.mark.parametrize("layout", [old_layout, new_layout])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_tables_are_those_of_transformers(name, layout, theta):
    scaling = SCALINGS[name]
    module = LlamaRotaryEmbedding(LlamaConfig(**old_layout(scaling, theta=theta)))
    spec = RotarySpec.from_config(layout(scaling, theta=theta))
    assert spec.kind == name.split(",")[0]
    assert spec.width == 64
    assert_same_geometry(spec, module)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_layouts_name_one_spec_and_a_written_one_reads_back(name):
    old = RotarySpec.from_config(old_layout(SCALINGS[name], theta=7e4))
    new = RotarySpec.from_config(new_layout(SCALINGS[name], theta=7e4))
    assert old == new
    written = old.to_config()
    assert RotarySpec.from_config(written) == old
    for missing in ("rope_parameters", "rope_scaling"):
        assert RotarySpec.from_config({key: value for key, value in written.items() if key != missing}) == old
    theirs = LlamaConfig(**SIZES | written)
    assert LlamaRotaryEmbedding(theirs).inv_freq.equal(old.inverse_frequencies())
    assert RotarySpec.from_config(theirs.to_dict()) == old


@pytest.mark.parametrize("is_new", [False, True])
def test_partial_rotary_turns_the_first_quarter(is_new):
    values = {**SIZES, "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    module = StableLmRotaryEmbedding(StableLmConfig(**values))
    entry = {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}
    spec = RotarySpec.from_config({**SIZES, "rope_parameters": entry} if is_new else values)
    assert spec.width == 16
    assert_same_geometry(spec, module)
    assert RotarySpec.from_config(spec.to_config()) == spec
    x = torch.randn(2, 4, 5, 64)
    cos, sin = rotary_tables(spec, positions=POSITIONS)
    turned = apply_rotary(x, cos=cos, sin=sin)
    assert turned[..., 16:].equal(x[..., 16:])
    expected, _ = apply_rotary_pos_emb(x[..., :16], x[..., :16], cos, sin)
    torch.testing.assert_close(turned[..., :16], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_queries_are_those_of_transformers_and_keep_their_length(dtype):
    spec = RotarySpec(head_dim=64)
    x = torch.randn(2, 4, 5, 64).to(dtype)
    cos, sin = rotary_tables(spec, positions=POSITIONS)
    turned = apply_rotary(x, cos=cos, sin=sin)
    expected, _ = apply_rotary_pos_emb(x, x, cos.to(dtype), sin.to(dtype))
    assert turned.dtype == dtype
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-7)
    if dtype == torch.float32:
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        assert turned[0, :, 0].equal(x[0, :, 0])  # position 0


def test_scores_depend_only_on_the_distance():
    spec = RotarySpec.from_settings(old_layout(SCALINGS["llama3"], theta=5e5), head_dim=32)
    query, key = torch.randn(1, 1, 1, 32).expand(-1, -1, 5, -1), torch.randn(1, 1, 1, 32).expand(-1, -1, 5, -1)
    at = torch.tensor([[3, 10, 50, 51, 200]])

    def scores(shift):
        (query_cos, query_sin), (key_cos, key_sin) = (
            rotary_tables(spec, positions=positions + shift) for positions in (at, at - 3)
        )
        turned_key = apply_rotary(key, cos=key_cos, sin=key_sin)
        return (apply_rotary(query, cos=query_cos, sin=query_sin) * turned_key).sum(-1)

    torch.testing.assert_close(scores(0), scores(1000), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(scores(0), scores(0)[..., :1].expand(-1, -1, 5), rtol=1e-3, atol=1e-3)


THREE_ROWS = torch.stack(
    [torch.tensor([[0, 1, 2, 2, 9]]), torch.tensor([[0, 1, 2, 3, 9]]), torch.tensor([[0, 1, 4, 2, 9]])]
)
MROPE = {
    "sections": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, [4, 6, 6], False),
    "interleaved": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [6, 5, 5], True),
}


@pytest.mark.parametrize("name", MROPE)
def test_three_rows_of_positions_follow_their_sections(name):
    config_type, module_type, sections, is_interleaved = MROPE[name]
    entry = {"rope_type": "default", "mrope_section": sections}
    if is_interleaved:
        entry["mrope_interleaved"] = True
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    module = module_type(config_type(**sizes, rope_theta=1e6, rope_scaling=dict(entry)))
    spec = RotarySpec.from_config({**sizes, "rope_theta": 1e6, "rope_scaling": entry})
    assert spec.sections == tuple(sections)
    assert spec.is_interleaved == is_interleaved
    assert RotarySpec.from_config(spec.to_config()) == spec
    cos, sin = rotary_tables(spec, positions=THREE_ROWS)
    theirs_cos, theirs_sin = module(torch.zeros(1), THREE_ROWS.clone())
    torch.testing.assert_close(cos, theirs_cos, rtol=0, atol=1e-7)
    torch.testing.assert_close(sin, theirs_sin, rtol=0, atol=1e-7)
    # Three equal rows are one row, with or without sections.
    flat = rotary_tables(spec, positions=THREE_ROWS[:1].expand(3, -1, -1))
    for rows in (THREE_ROWS[:1], THREE_ROWS[0]):
        assert flat[0].equal(rotary_tables(spec, positions=rows)[0])


def test_the_older_name_of_sections_is_read():
    spec = RotarySpec.from_settings({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, head_dim=16)
    assert spec.kind == "default"
    assert section_rows((2, 3, 3), is_interleaved=False) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert section_rows((4, 2, 2), is_interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert spec.sections == (2, 3, 3)


def test_missing_rows_are_our_mistake():
    with pytest.raises(AssertionError):
        rotary_tables(RotarySpec(head_dim=16), positions=THREE_ROWS)


def test_one_entry_for_each_layer_type():
    entries = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert RotarySpec.from_settings({"rope_parameters": entries}, head_dim=8, layer_type="full_attention").theta == 1e6
    with pytest.raises(ConfigError, match=r"full_attention.*sliding_attention"):
        RotarySpec.from_settings({"rope_parameters": entries}, head_dim=8)


def test_no_theta_means_ten_thousand_and_the_longest_context_fills_in_for_the_original():
    assert RotarySpec.from_settings({}, head_dim=8).theta == 10_000.0
    outer = {"original_max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 2.0}}
    spec = RotarySpec.from_settings(outer, head_dim=8, max_positions=128)
    assert spec.scaling.original_max_position_embeddings == 64
    spec = RotarySpec.from_settings({"rope_scaling": {"type": "yarn", "factor": 2.0}}, head_dim=8, max_positions=128)
    assert spec.scaling.original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, r"'spiral'; expected one of default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"'dynamic' \(its frequencies change"),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"'longrope' \(its frequencies change"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "twist": 1}},
            r"'linear' has no twist; it takes factor",
        ),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, r"'default' has no factor; it takes no keys"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"'linear' lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, r"expected a number above 0|lacks"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"factor is '2'; expected a number"),
        ({"rope_theta": -1.0}, r"rope_theta is -1.0; expected a number"),
        ({"rope_scaling": "linear"}, r"rope_scaling is 'linear'; expected a table"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, r"two geometries"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}},
            r"two geometries",
        ),
        ({"partial_rotary_factor": 0.45}, r"rotary width is 3 "),
        ({"rope_scaling": {"mrope_section": [1, 1, 1]}}, r"mrope_section is \[1, 1, 1\]; expected three that sum to 4"),
        ({"rope_scaling": {"mrope_section": [2, 2]}}, r"mrope_section is \[2, 2\]; expected three"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(settings, text):
    with pytest.raises(ConfigError, match=text):
        RotarySpec.from_settings(settings, head_dim=8)
