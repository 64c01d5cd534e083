"""A draft by name: Python and the command line find the same folders, and say what to do about the others."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaModel

import paceline
from fixtures_chat import chat_model, chat_target, save_chat_draft, save_target
from paceline.cli import __main__ as cli
from paceline.cli._opening import check_draft, open_draft
from paceline.errors import CheckpointError, ConfigError
from paceline.interop import eagle
from paceline.shipped import shipped_drafts
from paceline.store.checkpoint import read_info
from paceline.store.draft_names import find_draft


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a shipped draft `tiny`; the working directory is empty."""
    monkeypatch.setattr("paceline.shipped.ROOT", tmp_path / "shipped")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return save_chat_draft(tmp_path / "shipped" / "tiny")


def test_a_shipped_draft_is_loaded_by_its_name_in_python_as_on_the_command_line(shipped: Path) -> None:
    target = chat_target()
    loaded = paceline.load_draft("tiny", target=target)
    assert read_info("tiny") == loaded.info
    check_draft("tiny")
    opened: Any = open_draft("tiny", target=target)
    assert torch.equal(opened.fc.weight, loaded.draft.fc.weight)  # type: ignore[attr-defined]


def test_every_draft_that_is_shipped_is_found() -> None:
    assert shipped_drafts()
    for name, folder in shipped_drafts().items():
        assert find_draft(name) == folder
        assert read_info(name).target.name


def test_a_folder_named_like_a_shipped_draft_is_a_path(shipped: Path) -> None:
    own = save_chat_draft(Path("tiny"))
    assert find_draft("tiny") == shipped
    assert find_draft("./tiny") == find_draft(own) == own


@pytest.mark.parametrize("name", ["tinny", "", "a**[b", "x" * 5000, "~nobody_at_all/x", "ngram"])
def test_a_name_that_is_none_is_one_line_that_lists_the_drafts(name: str, shipped: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no folder '.*'; expected a draft folder, or one of tiny$") as caught:
        paceline.load_draft(name)
    assert "\n" not in str(caught.value)
    if name != "ngram":
        with pytest.raises(ConfigError, match=r"^--draft: no folder '.*one of tiny, ngram, none$"):
            check_draft(name)


def test_convert_offers_no_draft_without_weights(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["convert", "none", "out", "--target", "nowhere", "--to", "eagle"]) == cli.MISTAKE
    assert capsys.readouterr().err.endswith("SOURCE: no folder 'none'; expected a draft folder, or one of tiny\n")


def test_the_folder_of_a_run_leads_to_its_best_draft(shipped: Path) -> None:
    save_chat_draft(Path("run/best"))
    with pytest.raises(CheckpointError, match=r"no draft.toml in it; did you mean run/best\?"):
        paceline.load_draft("run")


def test_a_published_draft_is_answered_by_the_command_that_converts_it(
    shipped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(Path("target"))
    eagle.write(paceline.load_draft("tiny"), Path("a folder"))
    capsys.readouterr()  # what transformers said while it saved the target
    assert cli.run(["generate", "hello", "--target", "target", "--draft", "a folder"]) == cli.MISTAKE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    named = re.search(r"run: paceline (.*)$", said.strip())
    assert named is not None, said
    command = ["target" if word == "TARGET" else word for word in shlex.split(named[1])]
    assert cli.run(command) == 0
    assert cli.run(["generate", "hello", "--target", "target", "--draft", "OUT"]) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"folder": 3}, "found a int, expected the name or the folder of a draft"),
        ({"target": "smollm2"}, r"target is a str; expected a paceline\.Target"),
        ({"target": LlamaModel(chat_model().config)}, "target is a LlamaModel; expected .* causal language model"),
        ({"dtype": "bfloat16"}, r"dtype is 'bfloat16'; expected one of torch's, such as torch\.bfloat16"),
        ({"device": "cuda:99"}, "found device 'cuda:99'"),
        ({"device": 1.5}, "found device '1.5'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_kind_of_argument_is_one_line(shipped: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=words) as caught:
        paceline.load_draft(**{"folder": "tiny", **given})
    assert "\n" not in str(caught.value)


def test_a_model_of_transformers_is_a_target_to_load_for(shipped: Path) -> None:
    loaded = paceline.load_draft("tiny", target=chat_model().bfloat16(), warn=pytest.fail)
    assert loaded.draft.head_weight.dtype == torch.bfloat16


def test_a_target_folder_may_be_given_as_a_path(shipped: Path) -> None:
    folder = save_target(Path("smollm2"))  # never the embedded target of that name
    assert paceline.load_target(folder).vocab_size == 64
