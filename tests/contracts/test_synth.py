"""The target's own data: answers are what plain decoding gives, a killed run goes on, foreign folders are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import paceline
from fixtures_models import make_target, tiny_llama
from fixtures_text import tiny_tokenizer
from paceline.data.answering import SynthOptions
from paceline.data.synth import finish_prompt, load_seeds, make_job
from paceline.data.synth_run import run_synth
from paceline.decoding.continuous import ContinuousBatch, Request, sample_rows
from paceline.errors import DataError
from paceline.targets.generic import Target

OPTIONS = SynthOptions(max_prompt_tokens=12, max_answer_tokens=10, slots=5, sampled_share=0.5)
SEEDS = """
[[category]]
name = "talk"
weight = 1
systems = [""]
openers = ["", "the "]
"""


def synth_target() -> Target:
    model = tiny_llama(initializer_range=0.15)
    tokenizer = tiny_tokenizer()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.decoder = None  # words joined by spaces, so that prompts have words
    return make_target(model, tokenizer=tokenizer)


def write(folder: Path, tokens: int, *, options: SynthOptions = OPTIONS) -> list[dict[str, object]]:
    seeds = folder.parent / "seeds.toml"
    seeds.write_text(SEEDS, "utf-8")
    run_synth(
        synth_target(),
        folder=folder,
        options=options,
        answer_tokens=tokens,
        fingerprint={"target": "tiny"},
        seeds=seeds,
    )
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text("utf-8").splitlines()]


def test_greedy_answers_are_what_plain_decoding_gives(tmp_path: Path) -> None:
    target = synth_target()
    rows = [row for row in write(tmp_path / "out", 120) if row["temperature"] == 0.0]
    assert len(rows) >= 3
    for row in rows:
        messages = row["messages"]
        assert isinstance(messages, list)
        plain = paceline.generate(target, messages[:-1], max_new_tokens=OPTIONS.max_answer_tokens)
        assert plain.rows[0].text == messages[-1]["content"]
        assert len(plain.rows[0].tokens) == row["answer_tokens"]


def test_rows_do_not_depend_on_the_number_of_slots(tmp_path: Path) -> None:
    few = {row["index"]: row for row in write(tmp_path / "few", 100)}
    options = SynthOptions(**{**vars_of(OPTIONS), "slots": 2})
    many = {row["index"]: row for row in write(tmp_path / "many", 100, options=options)}
    shared = few.keys() & many.keys()
    assert len(shared) >= 5
    assert all(few[index] == many[index] for index in shared)


def vars_of(options: SynthOptions) -> dict[str, object]:
    return {name: getattr(options, name) for name in SynthOptions.__dataclass_fields__}


def test_a_run_that_is_killed_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    script = textwrap.dedent(
        f"""
        import sys, torch
        torch.set_num_threads(1)
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from pathlib import Path
        from contracts.test_synth import write
        write(Path({str(folder)!r}), 10**9)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "rows.jsonl").exists() and (folder / "rows.jsonl").read_bytes().count(b"\n") >= 5:
            break
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with (folder / "rows.jsonl").open("ab") as file:
        file.write(b'{"index": 7, "messa')  # a torn line
    before = (folder / "rows.jsonl").read_bytes().splitlines()[:-1]
    tokens = sum(json.loads(line)["answer_tokens"] for line in before)
    after = write(folder, tokens + 60)
    assert [json.dumps(row, ensure_ascii=False).encode() for row in after[: len(before)]] == before
    indices = [row["index"] for row in after]
    assert len(indices) == len(set(indices)) > len(before)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "out", 10)
    other = SynthOptions(**{**vars_of(OPTIONS), "seed": 9})
    with pytest.raises(DataError, match=r"written with seed = 0, now 9"):
        write(tmp_path / "out", 20, options=other)


def test_refilled_slots_give_what_each_request_gets_alone() -> None:
    target = synth_target()
    requests = [
        Request(i, list(range(3, 5 + i % 4)), 4 + i % 5, stop_ids=frozenset(), temperature=i % 2, seed=i)
        for i in range(11)
    ]
    together = ContinuousBatch(target, slots=3, capacity=32, refill=1)
    together.submit(requests)
    crowd = {item.request.key: item.tokens for step in together.run() for item in step}
    for request in requests:
        alone = ContinuousBatch(target, slots=1, capacity=32)
        alone.submit([request])
        assert [item.tokens for step in alone.run() for item in step] == [crowd[request.key]]


def test_sampling_by_rows_follows_each_rows_law() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20_000, -1)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    hot = torch.ones(20_000)
    drawn = sample_rows(logits, temperature=hot, top_k=3, top_p=hot, uniforms=uniforms)
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), dim=0)
    share = torch.bincount(drawn, minlength=4) / 20_000
    assert float((share[:3] - expected).abs().max()) < 0.015
    assert float(share[3]) == 0.0
    nucleus = sample_rows(logits, temperature=hot, top_k=4, top_p=hot * 0.5, uniforms=uniforms)
    assert set(nucleus.tolist()) == {0}
    cold = sample_rows(logits, temperature=hot * 0, top_k=4, top_p=hot, uniforms=uniforms)
    assert set(cold.tolist()) == {0}


def test_prompts_cut_by_length_end_at_a_sentence_and_babble_is_dropped() -> None:
    assert finish_prompt("Tell me why this is so. And then", reason="length") == ("Tell me why this is so.", "")
    assert finish_prompt("no end in sight here", reason="length")[1] == "too short"
    assert finish_prompt("again and " * 30, reason="stop")[1] == "repeats itself"


def test_jobs_follow_from_seed_and_index_alone() -> None:
    seeds = load_seeds()
    one = [make_job(i, options=OPTIONS, categories=seeds) for i in range(50)]
    assert one == [make_job(i, options=OPTIONS, categories=seeds) for i in range(50)]
    assert {job.category for job in one} == {"chat", "writing", "mathematics", "code", "rewriting", "lists"}


def test_a_target_that_writes_no_prompt_is_refused_instead_of_asked_for_ever(tmp_path: Path) -> None:
    options = SynthOptions(**{**vars_of(OPTIONS), "max_prompt_tokens": 2})
    with pytest.raises(DataError, match="prompts were all dropped"):
        write(tmp_path / "out", 50, options=options)


def test_a_seeds_file_without_openers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "seeds.toml"
    path.write_text('[[category]]\nname = "a"\nweight = 1\nsystems = [""]\n', "utf-8")
    with pytest.raises(DataError, match=r"seeds\.toml: category\.0\.openers: missing"):
        load_seeds(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xe9", "byte 0 is not UTF-8"),
        (b"category = 3", "category: found 3"),
        (b'[[category]]\nname = "a"\nweight = nan\nsystems = [""]\nopeners = [""]\n', "weight: found NaN"),
        (b'[[category]]\nname = "a"\nweight = 1\nsystems = []\nopeners = [""]\n', "systems: found"),
    ],
)
def test_a_seeds_file_that_is_none_is_one_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "seeds.toml"
    path.write_bytes(data)
    with pytest.raises(DataError, match=said) as caught:
        load_seeds(path)
    assert "seeds.toml" in str(caught.value) and "\n" not in str(caught.value)
