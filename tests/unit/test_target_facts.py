"""What a draft inherits from its target is what the target uses, not what its configuration merely mentions."""

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from paceline.drafts import eagle3
from paceline.targets._facts import facts_of


def base_of(kinds):
    """The rotary base of a draft for a Gemma3 with these kinds of layers."""
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=len(kinds), num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, max_position_embeddings=256, layer_types=kinds,
    )  # fmt: skip
    facts = facts_of(Gemma3ForCausalLM(config))
    rope = eagle3.configure(facts, {"taps": [0, 1, 2]}).rope
    entry = rope.get("rope_parameters", rope)
    assert isinstance(entry, dict)
    return entry["rope_theta"]


@pytest.mark.parametrize(
    ("kinds", "base"),
    [
        (["sliding_attention"] * 3, 1e4),
        (["sliding_attention", "full_attention", "sliding_attention"], 1e6),
        (["full_attention"] * 3, 1e6),
    ],
)
def test_a_draft_for_layers_that_all_slide_takes_the_base_that_they_use(kinds, base):
    assert base_of(kinds) == base
