"""A draft or a recipe that cannot be used is refused in one line before a target is loaded for it."""

import pytest

from fixtures_models import tiny_llama
from fixtures_text import tiny_tokenizer
from fixtures_training import RECIPE, write_rows
from paceline.cli import __main__ as cli


@pytest.fixture
def place(tmp_path, capsys):
    """A target's folder, rows, a recipe and prompts."""
    tiny_llama(layers=3).save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    rows = write_rows(tmp_path / "rows.jsonl", count=20)
    (tmp_path / "recipe.toml").write_text(f'[target]\nname = "{tmp_path / "target"}"\n' + RECIPE.format(rows=rows))
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}\n')
    capsys.readouterr()  # what transformers said while it saved the target
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """Names of what was loaded since: every way to a model or a tokenizer ends at one of these two."""
    seen = []

    def spy(kind):
        original = kind.from_pretrained

        def load(name, *arguments, **options):
            seen.append(name)
            return original(name, *arguments, **options)

        monkeypatch.setattr(kind, "from_pretrained", load)

    import transformers

    spy(transformers.AutoModelForCausalLM)
    spy(transformers.AutoTokenizer)
    return seen


def commands(place, draft):
    target, recipe, out = place / "target", place / "recipe.toml", place / "out"
    return {
        "generate": ["generate", "hello", "--target", target, "--draft", draft],
        "bench": ["bench", "-t", target, "--draft", draft, "-w", place / "prompts.jsonl", "--out", out],
        "diagnose": ["diagnose", "-t", target, "--draft", draft, "-w", place / "prompts.jsonl", "--out", out],
        "train": ["train", recipe, "--out", out, "--init-from", draft],
    }


def refused(arguments, capsys):
    assert cli.run([str(argument) for argument in arguments]) == cli.MISTAKE
    said = capsys.readouterr().err
    assert said.startswith("paceline: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", ["generate", "bench", "diagnose", "train"])
@pytest.mark.parametrize(("draft", "complaint"), [("absent", "no folder"), ("target", "no draft.toml in it")])
def test_what_is_no_draft_is_refused_before_a_target_is_loaded(name, draft, complaint, place, loads, capsys):
    said = refused(commands(place, place / draft)[name], capsys)
    assert ("--init-from: " if name == "train" else "--draft: ") in said
    assert str(place / draft) in said and complaint in said
    assert not loads and not (place / "out").exists()


@pytest.mark.parametrize("name", ["train", "capture", "train-cost"])
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("draft.name=medusa", "drafts: no 'medusa'; "),
        ("draft.name=ngram", "draft.name is ngram, which has no weights to train"),
        ("draft.options={taps = 3}", "draft.options.taps: found 3"),
        ("draft.options={intermediate_sise = 3}", "unknown key; did you mean 'intermediate_size'"),
        ("objective.name=tttt", "training.objectives: no 'tttt'; did you mean 'ttt'"),
        ("objective.options={stepz = 3}", "objective.options.stepz: unknown key"),
    ],
)
def test_a_plugin_that_is_not_there_is_refused_before_a_target_is_loaded(name, change, complaint, place, loads, capsys):
    said = refused([name, place / "recipe.toml", "--out", place / "out", "-s", change], capsys)
    assert complaint in said
    assert not loads and not (place / "out").exists()


def test_the_spy_sees_a_target_that_is_loaded(place, loads):
    assert cli.run([*map(str, commands(place, "ngram")["generate"]), "--max-new-tokens", "2"]) == 0
    assert len(loads) == 2
