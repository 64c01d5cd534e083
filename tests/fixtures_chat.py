"""A target that answers as instruction-tuned ones do: a turn opened by the chat template, and nothing else.

After the line break that opens its turn it writes ANSWER and ends; after anything else it ends at once.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM

from fixtures_drafts import tiny_eagle3
from fixtures_models import bigram_model, make_target
from fixtures_text import tiny_tokenizer
from paceline.store.checkpoint import DraftInfo, save_draft
from paceline.store.embedded import RECORD
from paceline.store.fingerprint import identify_target
from paceline.targets.generic import Target

ANSWER = ["so", "we", "add", "one", "and", "two", ",", "it", "is", "three", ".", "bye"]


def chat_model() -> LlamaForCausalLM:
    """The model; its generation configuration knows the end token."""
    tokenizer = tiny_tokenizer()
    path = tokenizer.convert_tokens_to_ids(["\n", *ANSWER, "<eos>"])
    table = torch.zeros(64, 64)
    table[:, path[-1]] = 6.0
    for before, after in itertools.pairwise(path):
        table[before, after] = 12.0
    model = bigram_model(table)
    model.generation_config = GenerationConfig(eos_token_id=path[-1], pad_token_id=tokenizer.pad_token_id)
    return model


def chat_target() -> Target:
    """The model with its tokenizer."""
    return make_target(chat_model(), tokenizer=tiny_tokenizer(), name="chat")


def save_target(folder: Path) -> Path:
    """The target as a folder, of which the cache of fetched targets may be made."""
    chat_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / RECORD).write_text("{}")
    return folder


def save_chat_draft(folder: Path) -> Path:
    """A draft for the target, which guesses badly: the text must not depend on it."""
    target = chat_target()
    draft = tiny_eagle3(target, words=40)
    save_draft(folder, draft, info=DraftInfo("eagle3", draft.config, identify_target(target)))
    return folder
