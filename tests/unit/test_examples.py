"""Examples: what is cut, what is dropped and why; no data set without a supervised token reaches the trainer."""

import pytest
import torch

from fixtures_text import KEEPS, MARKS, STRIPS, tiny_tokenizer, words
from paceline.data.chat import ChatFormat
from paceline.data.examples import build_examples, count_supervised
from paceline.data.rows import parse_row
from paceline.errors import ConfigError, DataError
from paceline.store.features import row_digest

PROMPT = 8  # tokens before the answer of `row(0)`: bos, user, line break, hello, eot, line break, assistant, line break


def row(number, *, question="hello", answer="yes thanks bye"):
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return parse_row({"messages": messages, "category": f"c{number}"}, source=f"rows.jsonl:{number}")


def build(rows, **options):
    return build_examples(rows, chat=ChatFormat(tiny_tokenizer()), **{"max_length": 20, **options})


def test_an_example_ends_with_its_last_supervised_token():
    built = build([row(1)])
    (example,) = built.examples
    assert (
        words(tiny_tokenizer(), example.ids.tolist())
        == "<bos> user \n hello <eot> \n assistant \n yes thanks bye <eot>"
    )
    assert example.mask.tolist() == [False] * PROMPT + [True] * 4
    assert (example.ids.dtype, example.mask.dtype) == (torch.int64, torch.bool)
    assert (example.source, example.category, example.num_supervised) == ("rows.jsonl:1", "c1", 4)
    assert example.digest == row_digest(example.ids, example.mask)
    assert (built.num_cut, built.num_tokens, built.num_supervised) == (0, 12, 4)
    assert build([row(2)]).examples[0].digest == example.digest
    assert build([row(1, answer="yes thanks")]).examples[0].digest != example.digest


@pytest.mark.parametrize(("max_length", "kept"), [(12, 4), (11, 3), (10, 2), (9, None), (8, None), (3, None)])
def test_truncation_keeps_what_a_draft_can_learn_from(max_length, kept):
    """A draft predicts two tokens ahead: a single supervised token gives no loss."""
    rows = [row(1), row(2, question="a", answer="b")] if kept is None else [row(1)]
    if kept is None:
        with pytest.raises(DataError, match=f"answer lost by truncation at {max_length} tokens"):
            build(rows[:1], max_length=max_length)
    else:
        built = build(rows, max_length=max_length)
        assert built.examples[0].num_supervised == kept
        assert built.num_cut == (max_length < 12)


def test_three_of_ten_rows_lose_their_answer():
    rows = [row(n, question="one two three four five six" if n in (2, 5, 9) else "hello") for n in range(1, 11)]
    built = build(rows, max_length=14)
    assert len(built.examples) == 7
    assert [drop.source for drop in built.drops] == [f"rows.jsonl:{n}" for n in (2, 5, 9)]
    assert {drop.reason for drop in built.drops} == {"answer lost by truncation at 14 tokens: row has 17"}
    assert "3 dropped (3 x answer lost by truncation at 14 tokens)" in built.summary()
    assert all(example.num_supervised == 4 for example in built.examples)


def test_all_rows_lost_is_an_error_before_training():
    rows = [row(n, question="one two three four five six") for n in range(10)]
    with pytest.raises(DataError, match=r"no row is left to train on: 10 dropped \(10 x answer lost.*rows.jsonl:0"):
        build(rows, max_length=14)
    with pytest.raises(DataError, match="no row is left to train on: 0 dropped"):
        build([])


def test_refused_rows_are_dropped_with_their_reason_and_progress_counts_every_row():
    done = []
    built = build([row(1), row(2, answer="yes <eot> bye")], progress=done.append)
    assert [(drop.source, drop.reason) for drop in built.drops] == [
        ("rows.jsonl:2", "the answer holds an end token before its end: <eot>")
    ]
    assert done == [1, 2]
    assert len(built.examples) == 1


def test_a_single_supervised_token_is_too_short_and_says_so():
    template = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' \n ' }}{% endfor %}"
    chat = ChatFormat(tiny_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"))
    built = build_examples([row(1, answer="yes"), row(2)], chat=chat, max_length=20)
    assert [drop.reason.split(":")[0] for drop in built.drops] == ["answer too short"]
    assert built.examples[0].num_supervised == 3


def test_a_prompt_without_an_answer_is_dropped_by_name():
    built = build([row(1), parse_row({"prompt": "hello"}, source="rows.jsonl:2")])
    assert [drop.reason.split(":")[0] for drop in built.drops] == ["no assistant turn"]


def test_counts_are_of_supervised_tokens_only():
    tokenizer = tiny_tokenizer()
    counts = count_supervised(build([row(1), row(2)]).examples, vocab_size=70)
    expected = torch.zeros(70, dtype=torch.int64)
    expected[tokenizer.convert_tokens_to_ids(["yes", "thanks", "bye", "<eot>"])] = 2
    assert torch.equal(counts, expected)


def test_a_foreign_tokenizer_and_an_absurd_length_are_refused():
    with pytest.raises(DataError, match=r"rows.jsonl:1: token id .* the target has 12"):
        build([row(1)], vocab_size=12)
    assert build([row(1)], vocab_size=64).examples
    with pytest.raises(ConfigError, match="max_length is 2"):
        build([row(1)], max_length=2)


def test_a_cut_answer_has_no_end_of_turn():
    """Synth marks answers that reached the length limit: the target did not write the end token of those."""
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "name"},
        {"role": "assistant", "content": "one two three"},
    ]
    whole, cut = (parse_row({"messages": messages, "finish": finish}, source="r:1") for finish in ("stop", "length"))
    tokenizer = tiny_tokenizer()
    (full,), (short,) = build([whole], max_length=40).examples, build([cut], max_length=40).examples
    assert words(tokenizer, full.ids.tolist()).endswith("assistant \n one two three <eot>")
    assert words(tokenizer, short.ids.tolist()).endswith("assistant \n one two three")
    assert short.ids.tolist() == full.ids.tolist()[:-1]
    assert short.mask.tolist() == full.mask.tolist()[:-1]  # the first answer keeps its end token


@pytest.mark.parametrize("template", [STRIPS, MARKS])
def test_a_cut_answer_in_other_templates(template):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes thanks bye"}]
    cut = parse_row({"messages": messages, "finish": "length"}, source="r:1")
    tokenizer = tiny_tokenizer(template)
    (example,) = build_examples([cut], chat=ChatFormat(tokenizer), max_length=40).examples
    assert words(tokenizer, example.ids[example.mask].tolist()) == "yes thanks bye"
    assert bool(example.mask[-1])


@pytest.mark.parametrize("template", [KEEPS, STRIPS])
def test_only_the_last_answer(template):
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes thanks"},
        {"role": "user", "content": "name"},
        {"role": "assistant", "content": "one two"},
    ]
    chat = ChatFormat(tiny_tokenizer(template))
    (example,) = build_examples(
        [parse_row({"messages": messages}, source="r:1")], chat=chat, max_length=40, answers="last"
    ).examples
    assert words(chat.tokenizer, example.ids[example.mask].tolist()) == "one two <eot>"
    assert "yes thanks" in words(chat.tokenizer, example.ids.tolist())
