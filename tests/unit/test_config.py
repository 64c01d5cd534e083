"""Recipes: TOML in and out without loss, and one line for every mistake."""

import pytest
from pydantic import Field

from paceline.config import (
    DataSection,
    Recipe,
    Section,
    TrainingSection,
    dump_recipe,
    load_recipe,
    parse_recipe,
    parse_section,
)
from paceline.errors import ConfigError

SMALLEST = "[training]\nsteps = 10\n"

FULL = """
[target]
name = "org/model"
revision = "abc"
dtype = "bfloat16"

[draft]
name = "eagle3"
vocab_size = 4096

[draft.options]
layers = 1
taps = [1, 14, 26]
nested = {a = "b"}

[data]
train = ["a.jsonl", "b.jsonl.gz"]
max_length = 512
answers = "last"

[objective.options]
decay = 0.8

[training]
epochs = 2
learning_rate = 1
betas = [0.9, 0.99]
trackers = ["tensorboard"]

[validation]
prompts = 8
"""


def parse(text, *overrides):
    return parse_recipe(text, source="r.toml", overrides=overrides)


def complaint(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_smallest_recipe_has_defaults():
    recipe = parse(SMALLEST)
    assert recipe == Recipe(training=TrainingSection(steps=10))
    assert not recipe.target.trust_remote_code


def test_full_recipe():
    recipe = parse(FULL)
    assert recipe.data.train == ("a.jsonl", "b.jsonl.gz")
    assert recipe.training.betas == (0.9, 0.99)
    assert recipe.training.learning_rate == 1.0
    assert recipe.draft.options == {"layers": 1, "taps": [1, 14, 26], "nested": {"a": "b"}}


@pytest.mark.parametrize("text", [SMALLEST, FULL])
def test_dump_reads_back_equal(text):
    recipe = parse(text)
    assert parse(dump_recipe(recipe)) == recipe


def test_none_is_always_the_default():
    """TOML has no null, so a field whose None differs from its default could not be written down."""

    def walk(schema):
        for name, field in schema.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                walk(field.annotation)
            elif type(None) in getattr(field.annotation, "__args__", ()):
                assert field.default is None, name

    walk(Recipe)


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        parse(SMALLEST).training.steps = 3


def test_unknown_key_names_file_key_and_near_miss():
    message = complaint("[training]\nsteps = 1\nlerning_rate = 0.1\n")
    assert message.startswith("r.toml: training.lerning_rate: unknown key; did you mean 'learning_rate'?")


def test_unknown_section():
    message = complaint(SMALLEST + "[drafts]\nname = 'x'\n")
    assert message.startswith("r.toml: drafts: unknown key; did you mean 'draft'?")


@pytest.mark.parametrize(
    ("line", "key", "found", "expected"),
    [
        ("steps = '100'", "training.steps", '"100"', "a valid integer"),
        ("steps = 1.5", "training.steps", "1.5", "a valid integer"),
        ("steps = true", "training.steps", "true", "a valid integer"),
        ("steps = 0", "training.steps", "0", "greater than or equal to 1"),
        ("steps = 1\nprecision = 'fp16'", "training.precision", '"fp16"', '"fp32" or "bf16"'),
        ("steps = 1\nbetas = [0.9]", "training.betas.1", "missing", "a value"),
        ("steps = 1\nlearning_rate = 1979-05-27", "training.learning_rate", '"1979-05-27"', "a valid number"),
    ],
)
def test_wrong_value_names_found_and_expected(line, key, found, expected):
    message = complaint(f"[training]\n{line}\n")
    assert message.startswith(f"r.toml: {key}")
    assert found in message
    assert expected in message


def test_steps_and_epochs_exclude_each_other():
    assert complaint("[training]\nsteps = 1\nepochs = 1.0\n") == (
        "r.toml: training: found steps = 1, epochs = 1.0, expected exactly one of steps and epochs "
        "(`--set training.epochs=` takes it out)"
    )
    assert "found an empty section, expected exactly one of steps and epochs" in complaint("[training]\n")


def test_missing_section_says_what_goes_in():
    assert complaint("[data]\ntrain = []\n").startswith(
        "r.toml: training: missing; expected a section with some of: accumulation, betas"
    )


def test_several_faults_are_counted():
    assert complaint("[training]\nsteps = 1\na = 1\nb = 2\n").endswith("(and 1 more)")


def test_broken_toml_names_file_and_line():
    message = complaint("[training]\nsteps = = 3\n")
    assert message.startswith("r.toml: not valid TOML")
    assert "line 2" in message


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="no such recipe"):
        load_recipe(tmp_path / "none.toml")


def test_file_with_byte_order_mark_and_crlf(tmp_path):
    file = tmp_path / "r.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\nsteps = 7\r\n")
    assert load_recipe(file).training.steps == 7


def test_overrides_are_typed_and_later_ones_win():
    recipe = parse(
        SMALLEST,
        "training.steps=20",
        "training.steps=30",
        "training.learning_rate=3e-4",
        "target.name=123",
        "target.revision=true",
        "data.answers=last",
        'data.train=["x.jsonl"]',
        "draft.options.layers=2",
        "draft.options.kind=plain",
        "draft.options.on=true",
    )
    assert recipe.training.steps == 30
    assert recipe.training.learning_rate == 3e-4
    assert recipe.target.name == "123"
    assert recipe.target.revision == "true"
    assert recipe.data == DataSection(train=("x.jsonl",), answers="last")
    assert recipe.draft.options == {"layers": 2, "kind": "plain", "on": True}


def test_override_may_open_a_section():
    assert parse("", "training.steps=3").training.steps == 3


@pytest.mark.parametrize("override", ["training.steps", "=3", "training.=3", ".steps=3"])
def test_malformed_override(override):
    assert "expected section.field=value" in complaint(SMALLEST, override)


def test_override_through_a_value():
    assert "'steps' is a value, not a section" in complaint(SMALLEST, "training.steps.more=3")


def test_override_with_unknown_key_suggests():
    assert "did you mean 'steps'?" in complaint(SMALLEST, "training.step=3")


def test_plugin_options_are_parsed_by_their_own_section():
    class Options(Section):
        layers: int = Field(default=1, ge=1)

    assert parse_section(Options, table={"layers": 2}, source="r.toml").layers == 2
    with pytest.raises(ConfigError, match=r"r\.toml: draft\.options\.layer: unknown key; did you mean 'layers'\?"):
        parse_section(Options, table={"layer": 2}, source="r.toml", prefix=("draft", "options"))


def test_an_empty_override_takes_a_key_out():
    text = "[training]\nepochs = 2.5\nthreads = 1"
    recipe = parse_recipe(text, source="r", overrides=["training.epochs=", "training.steps=7", "training.threads= "])
    assert (recipe.training.steps, recipe.training.epochs, recipe.training.threads) == (7, None, None)


@pytest.mark.parametrize("data", [b"[training]\nsteps = 3 # \xe9\n", "[training]\nsteps = 3\n".encode("utf-16")])
def test_a_recipe_in_another_encoding_is_one_line(tmp_path, data):
    (tmp_path / "r.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=r"r\.toml: byte \d+ is not UTF-8; expected a TOML file in UTF-8"):
        load_recipe(tmp_path / "r.toml")


def test_a_name_that_is_too_long_for_the_system():
    with pytest.raises(ConfigError, match="no such recipe"):
        load_recipe("a" * 5000)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.betas=[2.0, 0.9]", "training.betas.0: found 2.0, expected less than 1"),
        ("training.betas=[-1.0, 0.9]", "training.betas.0: found -1.0"),
        ("training.betas=[0.9, 1.0]", "training.betas.1: found 1.0"),
        ("training.epochs=inf", "training.epochs: found Infinity"),
        ("training.epochs=1e300", "training.epochs: found 1e+300"),
        ("training.learning_rate=nan", "training.learning_rate: found NaN, expected a finite number"),
        ("training.learning_rate=inf", "training.learning_rate: found Infinity, expected a finite number"),
        ("training.weight_decay=inf", "training.weight_decay: found Infinity"),
        ("training.clip_norm=nan", "training.clip_norm: found NaN"),
        ("training.seed=99999999999999999999999", "training.seed: found 99999999999999999999999"),
    ],
)
def test_a_number_that_no_run_can_use(override, said):
    assert said in complaint(SMALLEST, override)
