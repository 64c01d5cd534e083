"""Options of a draft that would fail in the middle of a run, or never be told: refused by key, in one line."""

import pytest

from fixtures_models import make_target, tiny_llama
from paceline.drafts import eagle3, ngram
from paceline.errors import ConfigError
from paceline.ops.rotary import RotarySpec
from paceline.targets._facts import facts_of


def configure(options):
    return eagle3.configure(facts_of(make_target(tiny_llama(layers=3)).model), options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"intermediate_size": 0}, "draft.options.intermediate_size: found 0"),
        ({"intermediate_size": -1}, "draft.options.intermediate_size: found -1"),
        ({"num_attention_heads": -4}, "draft.options.num_attention_heads: found -4"),
        ({"num_key_value_heads": 0}, "draft.options.num_key_value_heads: found 0"),
        ({"num_key_value_heads": 3}, "a number that divides the 4 heads"),
        ({"taps": []}, "draft.options.taps: found []"),
        ({"taps": [0, 0, 1]}, "draft.options.taps: found [0, 0, 1], expected every layer once"),
        ({"taps": [0, 9]}, "draft.options.taps: [9] are not decoder layers"),
        ({"target_hidden_size": 31}, "draft.options.target_hidden_size is 31"),
        ({"vocab_size": 63}, "draft.options.vocab_size is 63"),
        ({"rms_norm_eps": float("nan")}, "draft.options.rms_norm_eps: found NaN"),
        ({"rope": {"rope_theta": 0.0}}, "rope_theta is 0.0"),
        ({"rope": {"rope_theta": float("inf")}}, "rope_theta is inf"),
        ({"rope": {"rope_theta": "x"}}, 'rope_theta is "x"'),
        ({"rope": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor is 0.0"),
        ({"rope": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor is 2.0"),
        ({"rope": {"rope_type": "yarn", "rope_theta": 1e4}}, "draft.options.rope: found"),
        ({"rope": {"rope_thetta": 1e4}}, "rotary settings without rope_thetta"),
        ({"hidden_sizes": 3}, "draft.options.hidden_sizes: unknown key; did you mean 'hidden_size'"),
    ],
)
def test_an_option_that_no_draft_can_have(options, said):
    with pytest.raises(ConfigError) as caught:
        configure(options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_that_a_draft_can_have():
    config = configure({"taps": [2, 0], "intermediate_size": 7, "rope": {"rope_theta": 5e5}})
    assert (config.taps, config.intermediate_size, config.rope) == ((2, 0), 7, {"rope_theta": 5e5})


def test_a_huge_number_is_no_rotary_base():
    with pytest.raises(ConfigError, match="rope_theta is 10000"):
        RotarySpec.from_settings({"rope_theta": 10**400}, head_dim=8)


def test_lookup_lengths():
    facts = facts_of(make_target(tiny_llama(layers=3)).model)
    with pytest.raises(ConfigError, match=r"draft\.options\.shortest: found 0"):
        ngram.configure(facts, {"shortest": 0})
    with pytest.raises(ConfigError, match="needs shortest <= longest, found 4 and 3"):
        ngram.configure(facts, {"shortest": 4})
