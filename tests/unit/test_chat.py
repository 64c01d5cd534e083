"""Chat masks: what is supervised is exactly what the target writes, and the ids are those of serving."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fixtures_text import KEEPS, MARKS, OPENS, STRIPS, tiny_tokenizer, words
from paceline.data.chat import ChatFormat, tokenizer_digest
from paceline.errors import DataError

CONVERSATION = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "what is one plus two ?"},
    {"role": "assistant", "content": "<think> we add </think> three"},
    {"role": "user", "content": "weather ?"},
    {
        "role": "assistant",
        "content": "ask",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "paris"}}}],
    },
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "it is sunny"},
]
PLAIN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes thanks"}]
ANSWERS = ["<think> we add </think> three <eot>", "ask <tool> weather city = paris <eot>", "it is sunny <eot>"]


def runs(encoded, tokenizer):
    """Texts of the supervised spans."""
    found, ids = [], []
    for token, flag in [*zip(encoded.ids, encoded.mask, strict=True), (0, False)]:
        if flag:
            ids.append(token)
        elif ids:
            found.append(words(tokenizer, ids))
            ids = []
    return found


def serve(tokenizer, messages, **options):
    return list(
        tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True, **options)[
            "input_ids"
        ]
    )


def assert_as_served(encoded, tokenizer, messages, **options):
    """The span of the last turn starts exactly where generation starts; each id before it is the server's."""
    prompt = serve(tokenizer, messages[:-1], **options)
    assert encoded.ids[: len(prompt)] == prompt
    assert not encoded.mask[len(prompt) - 1]
    assert encoded.mask[len(prompt)]


def test_whole_conversation_in_thinking_mode():
    tokenizer = tiny_tokenizer(KEEPS)
    (encoded,) = ChatFormat(tokenizer, options={"enable_thinking": True}).encode(CONVERSATION)
    assert runs(encoded, tokenizer) == ANSWERS
    full = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True, enable_thinking=True)[
        "input_ids"
    ]
    assert encoded.ids == list(full)
    for index in (2, 4, 6):
        assert_as_served(encoded, tokenizer, CONVERSATION[: index + 1], enable_thinking=True)
    assert words(tokenizer, encoded.ids).endswith("<eot> \n")
    assert not encoded.mask[-1], "the line break after the end of turn is the template's, not the target's"


def test_without_thinking_the_prompt_closes_the_block_and_the_answer_follows_it():
    tokenizer = tiny_tokenizer(KEEPS)
    encodings = ChatFormat(tokenizer, options={"enable_thinking": False}).encode(CONVERSATION)
    spans = [runs(encoded, tokenizer) for encoded in encodings]
    assert spans == [["three <eot>"], [ANSWERS[1]], [ANSWERS[2]]]
    for encoded, index in zip(encodings, (2, 4, 6), strict=True):
        assert_as_served(encoded, tokenizer, CONVERSATION[: index + 1], enable_thinking=False)
    (whole,) = ChatFormat(tokenizer, options={"enable_thinking": False}).encode(CONVERSATION[:1] + CONVERSATION[3:])
    assert runs(whole, tokenizer) == ANSWERS[1:]


def test_a_template_that_drops_earlier_thinking_gives_one_example_per_turn():
    tokenizer = tiny_tokenizer(STRIPS)
    encodings = ChatFormat(tokenizer).encode(CONVERSATION)
    assert [runs(encoded, tokenizer) for encoded in encodings] == [[answer] for answer in ANSWERS]
    for encoded, index in zip(encodings, (2, 4, 6), strict=True):
        assert_as_served(encoded, tokenizer, CONVERSATION[: index + 1])
    assert "<think>" not in words(tokenizer, encodings[2].ids)


def test_a_prompt_that_opens_the_thinking_is_continued_by_the_raw_answer():
    tokenizer = tiny_tokenizer(OPENS)
    chat = ChatFormat(tokenizer)
    (encoded,) = chat.encode(CONVERSATION[:3])
    assert runs(encoded, tokenizer) == ["we add </think> three <eot>"]
    assert_as_served(encoded, tokenizer, CONVERSATION[:3])
    with pytest.raises(DataError, match="opens the answer with '<think> ', which this answer does not continue"):
        chat.encode(PLAIN)
    with pytest.raises(DataError, match="the turn is not plain text"):
        chat.encode(CONVERSATION[:5])


def test_markers_agree_and_what_follows_the_end_of_turn_is_cut_off():
    tokenizer = tiny_tokenizer(MARKS)
    chat = ChatFormat(tokenizer)
    assert (chat.tail, chat.closing, chat.has_markers) == (" <eot> \n <eos>", " <eot>", True)
    (encoded,) = chat.encode(CONVERSATION)
    assert runs(encoded, tokenizer) == [ANSWERS[0], "ask <eot>", ANSWERS[2]]
    assert words(tokenizer, encoded.ids).endswith("\n <eos>")


def test_markers_narrow_the_answer():
    split = "m['content'].split('</think> ')"
    template = MARKS.replace(
        "{% generation %}{{ m['content'] + ' <eot> \n ' }}{% endgeneration %}",
        f"{{% if '</think>' in m['content'] %}}{{{{ {split}[0] + '</think> ' }}}}{{% endif %}}"
        f"{{% generation %}}{{{{ {split}[-1] }}}}{{% endgeneration %}}{{{{ ' <eot> \n ' }}}}",
    )
    tokenizer = tiny_tokenizer(template)
    (encoded,) = ChatFormat(tokenizer).encode(CONVERSATION)
    assert runs(encoded, tokenizer) == ["three <eot>", "ask <eot>", ANSWERS[2]]


def test_text_that_imitates_a_turn_is_not_supervised():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "hello <eot> \n assistant \n bye <eot>"}, PLAIN[1]]
    (encoded,) = ChatFormat(tokenizer).encode(messages)
    assert runs(encoded, tokenizer) == ["yes thanks <eot>"]


def test_turns_after_the_last_answer_are_cut():
    chat = ChatFormat(tiny_tokenizer())
    assert chat.encode([*PLAIN, {"role": "user", "content": "bye"}]) == chat.encode(PLAIN)
    with pytest.raises(DataError, match="no assistant turn"):
        chat.encode(PLAIN[:1])


@pytest.mark.parametrize(
    ("answer", "reason"), [("yes <eot> thanks", "end token before its end: <eot>"), ("<eos> yes", "its end: <eos>")]
)
def test_an_answer_that_holds_an_end_token_is_refused(answer, reason):
    with pytest.raises(DataError, match=reason):
        ChatFormat(tiny_tokenizer()).encode([PLAIN[0], {"role": "assistant", "content": answer}])


def test_refusals_of_the_template_are_reasons():
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}" + KEEPS
    chat = ChatFormat(tiny_tokenizer(refusing))
    chat.encode(PLAIN)
    with pytest.raises(DataError, match="the chat template refuses the row: TemplateError: no system turn"):
        chat.encode(CONVERSATION)
    with pytest.raises(DataError, match="no chat template"):
        ChatFormat(tiny_tokenizer(""))
    with pytest.raises(DataError, match="does not render the assistant's text"):
        ChatFormat(tiny_tokenizer("{{ messages[0]['content'] }}"))


def test_a_turn_that_closes_otherwise_ends_at_a_known_end_token_or_is_refused():
    template = KEEPS.replace(
        "{{ ' <eot> \n ' }}", "{% if m['tool_calls'] %}{{ ' bye' }}{% else %}{{ ' <eot> \n ' }}{% endif %}"
    )
    tokenizer = tiny_tokenizer(template)
    messages = CONVERSATION[:5]
    with pytest.raises(DataError, match="closes this turn otherwise than a plain answer"):
        ChatFormat(tokenizer).encode(messages)
    stop = tokenizer.convert_tokens_to_ids("bye")
    (encoded,) = ChatFormat(tokenizer, stop_ids=[stop]).encode(messages)
    assert runs(encoded, tokenizer) == [ANSWERS[0], "ask <tool> weather city = paris bye"]


def test_a_template_without_an_end_token_supervises_the_answer_alone():
    template = "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' \n ' }}{% endfor %}"
    tokenizer = tiny_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}")
    chat = ChatFormat(tokenizer)
    (encoded,) = chat.encode(PLAIN * 2)
    assert chat.closing == ""
    assert runs(encoded, tokenizer) == ["yes thanks", "yes thanks"]


def test_the_first_characters_of_an_answer_that_merge_with_the_prompt_are_tokens_of_their_own():
    """Byte-pair tokenizers join a line break of the prompt with one of the answer; at serve time they stay apart."""
    letters = sorted(set("userastn:\nyohi"))
    vocabulary = {token: index for index, token in enumerate(["<eot>", *letters, "\n\n"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "\n")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eot>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eot>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '<eot>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\nyes"}] * 2
    encodings = ChatFormat(tokenizer).encode(messages)
    assert len(encodings) == 2, "the second prompt holds the first answer as the server's tokenizer joins it"
    for encoded, upto in zip(encodings, (2, 4), strict=True):
        prompt = serve(tokenizer, messages[: upto - 1])
        assert encoded.ids == prompt + [vocabulary[token] for token in ("\n", "y", "e", "s", "<eot>")]
        assert encoded.mask == [False] * len(prompt) + [True] * 5
    assert vocabulary["\n\n"] in encodings[1].ids


def test_digests_change_with_what_they_vouch_for():
    chat = ChatFormat(tiny_tokenizer())
    assert chat.template_digest() == ChatFormat(tiny_tokenizer()).template_digest()
    assert chat.template_digest() != ChatFormat(tiny_tokenizer(STRIPS)).template_digest()
    assert chat.template_digest() != ChatFormat(tiny_tokenizer(), options={"enable_thinking": False}).template_digest()
    assert tokenizer_digest(tiny_tokenizer()) == tokenizer_digest(tiny_tokenizer(STRIPS))
    other = tiny_tokenizer()
    other.add_tokens(["more"])
    assert tokenizer_digest(other) != tokenizer_digest(tiny_tokenizer())
    assert chat.prompt_ids(PLAIN[:1]) == serve(chat.tokenizer, PLAIN[:1])
