"""Tokenizers: bytes, files of model directories, chat templates; transformers is the judge."""

from __future__ import annotations

import json
import os
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_files import CHATML, EVERY_BYTE, TALK, learned_text

from experiments.configs.train import ConfigError
from experiments.data.bytelevel import ByteTokenizer
from experiments.data.pieces import TextPiece, encode_all
from experiments.data.template import Template
from experiments.data.tokenizer import FILE, byte_tokenizer, load_tokenizer, save_tokenizer
from fnshard.errors import MissingExtraError

# ------------------------------------------------------------------ bytes


@given(st.text())
def test_bytes_round_trip_and_no_text_spells_a_control_token(text):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(f"{text}<|end|>")
    assert tokenizer.decode(ids) == f"{text}<|end|>"
    assert max(ids) < 256
    assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)


def test_a_byte_conversation_is_marked_and_only_the_assistant_is_learned():
    tokenizer = byte_tokenizer()
    text, ids = learned_text(tokenizer, tokenizer.conversation(TALK))
    assert text == "4 Yes.\n"
    assert ids[:2] == [tokenizer.bos, 259] and ids.count(tokenizer.eos) == len(TALK)
    later, _ = learned_text(tokenizer, tokenizer.conversation(TALK, first=3))
    assert later == " Yes.\n"
    _, learned = encode_all(tokenizer, [tokenizer.conversation(TALK[:3])])[0]
    assert learned[-2:].tolist() == [1, 1] and learned.sum() == 2  # "4" and the end of the turn
    _, opening = learned_text(tokenizer, tokenizer.opening(TALK[:2]))
    assert opening == encode_all(tokenizer, [tokenizer.conversation(TALK[:3])])[0][0].tolist()[:-2]
    with pytest.raises(ValueError, match=r"role 'tool': the byte tokenizer knows system, user, assistant"):
        tokenizer.conversation([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("kind", [None, "llama", "gpt2", "qwen2"])
def test_transformers_opens_the_saved_byte_tokenizer(tmp_path, kind):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer()
    save_tokenizer(tokenizer, tmp_path / "new" / "model")
    folder = tmp_path / "new" / "model"
    if kind:
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "vocab_size": tokenizer.vocab}))
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n    return 'é\0 ☃'  # 🜁\r\n", "  two  spaces ", "I 'm . It 's", "", EVERY_BYTE):
        if kind == "qwen2":  # whose class composes characters first, whatever the file says
            text = unicodedata.normalize("NFC", text)
        assert theirs(text, add_special_tokens=False).input_ids == tokenizer.encode(text)
        assert theirs(text).input_ids == [tokenizer.bos, *tokenizer.encode(text)]
        assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)
    talk = [{**m, "content": m["content"].replace("<|im_end|>", "")} for m in TALK]
    _, ids = learned_text(tokenizer, tokenizer.conversation(talk))
    assert theirs.apply_chat_template(talk, return_dict=False) == ids
    _, ids = learned_text(tokenizer, tokenizer.opening(talk))
    assert theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == ids
    assert load_tokenizer(folder) == tokenizer


# ------------------------------------------------------------------ files


def test_a_directory_s_tokenizer_is_the_library_s(directory):
    from tokenizers import Tokenizer

    folder = directory(tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    tokenizer, file = load_tokenizer(folder), Tokenizer.from_file(str(folder / FILE))
    file.no_truncation()
    text = "the other says yes to the assistant, é"
    assert tokenizer.encode(text) == file.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab) == (0, 1, 1, file.get_vocab_size())
    assert file.token_to_id("</s>") not in tokenizer.encode("a</s>b")  # what people write is text
    assert tokenizer.encode_many(["a</s>b"], control=True)[0].tolist()[1] == 1
    assert tokenizer.decode([1, *tokenizer.encode("a"), 10**6]) == "a"


def test_saved_files_open_as_the_same_tokenizer(directory, tmp_path):
    folder = directory(tokenizer_config={"eos_token": "</s>"})
    (folder / "chat_template.jinja").write_text(CHATML)
    tokenizer = load_tokenizer(folder)
    save_tokenizer(tokenizer, tmp_path / "copy")
    copy = load_tokenizer(tmp_path / "copy")
    assert copy.key == tokenizer.key and copy.chat == tokenizer.chat
    (folder / "chat_template.jinja").write_text(CHATML + " ")
    assert load_tokenizer(folder).key != tokenizer.key


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        ({"bos_token": "<s>"}, 0),  # its own post-processor adds it
        ({"bos_token": "<s>", "add_bos_token": False}, None),
        ({"bos_token": "</s>"}, None),  # only defined, as GPT-2's
        ({"bos_token": "</s>", "add_bos_token": True}, 1),
        ({}, None),
    ],
)
def test_texts_begin_as_this_model_s_do(directory, config, bos):
    assert load_tokenizer(directory(tokenizer_config={"eos_token": "</s>", **config})).bos == bos


def test_end_tokens_come_from_any_of_the_files(directory):
    folder = directory(generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 1})
    assert load_tokenizer(folder).stops == (3, 1)
    folder = directory(special_tokens_map={"eos_token": "</s>", "pad_token": {"content": "<s>"}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stops == (1, 3) and tokenizer.eos == 1 and tokenizer.pad == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"model: no end token in tokenizer_config\.json, .* Fix: write \"eos_token\""),
        ({"tokenizer_config": {"eos_token": "<none>"}}, r"eos_token='<none>' is none of its tokens"),
        ({"config": {"eos_token_id": 5000}}, "no end token"),
        ({"config": "{"}, r"config\.json is no JSON"),
        ({"config": "[1]"}, r"config\.json holds a list, not an object"),
        ({"tokenizer": "{}"}, r"tokenizer\.json is no tokenizer"),
        (
            {"tokenizer_config": {"eos_token": "</s>", "chat_template": 3}},
            "chat_template is a int, not a text",
        ),
        (
            {"tokenizer_config": {"eos_token": "</s>", "chat_template": "{% if %}"}},
            "template is broken, line 1",
        ),
        ({"tokenizer_config": {"eos_token": "</s>"}, "chat_template": "[]"}, "holds no template"),
    ],
)
def test_directories_that_say_too_little_or_nonsense_are_refused(directory, files, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(directory(**files))


def test_directories_without_a_tokenizer_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere holds no tokenizer\.json; it is no folder"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"(?s)it holds:\n  vocab\.txt\nFix: name a model directory"):
        load_tokenizer(tmp_path)
    (tmp_path / FILE).touch()
    os.truncate(tmp_path / FILE, 2**40)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: .*has 1099511627776 bytes"):
        load_tokenizer(tmp_path)


def test_a_missing_library_names_its_extra(directory, monkeypatch):
    folder = directory(tokenizer_config={"eos_token": "</s>", "chat_template": "{{ 'another' }}"})
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match=r"need jinja2\. Fix: pip install fnshard\[finetune\]"):
        load_tokenizer(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"needs the tokenizers library\. Fix: pip install fnshard\["):
        load_tokenizer(folder)
    save_tokenizer(byte_tokenizer(), folder)  # which needs neither
    assert load_tokenizer(folder) == ByteTokenizer()


# ------------------------------------------------------------------ tokenizers that put a space in front

LLAMA = """{% for m in messages %}{% if m.role == 'user' %}{{ '<s> [INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"""
SPOKEN = [{"role": "user", "content": "say  hi"}, {"role": "assistant", "content": "fine"}] * 2


def spaced(normalizer, pre_tokenizer, strips):
    """A SentencePiece-like BPE, with control tokens as Llama's, or as Phi-3's, which swallow spaces."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    file = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    file.pre_tokenizer = pre_tokenizers.Metaspace()  # no token goes on behind a word
    file.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    words = ["say hi fine user assistant [INST] [/INST] : say hi"] * 9
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    file.train_from_iterator(words, trainer)
    file.normalizer, file.pre_tokenizer = normalizer, pre_tokenizer
    file.add_special_tokens(
        [AddedToken(t, normalized=False, rstrip=strips, special=True) for t in ("<s>", "</s>")]
    )
    return file


def kinds():
    from tokenizers import normalizers, pre_tokenizers

    legacy = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return {
        "prepend": (legacy, None),
        "always": (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
        "first": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "never": (None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
        "words": (None, pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first")])),
    }


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("kind", ["prepend", "always", "first", "never", "words"])
def test_spaces_stand_where_the_text_has_them(tmp_path, kind, strips):
    from transformers import PreTrainedTokenizerFast

    file = spaced(*kinds()[kind], strips)
    file.save(str(tmp_path / FILE))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": True}))
    (tmp_path / "chat_template.jinja").write_text(LLAMA)
    tokenizer = load_tokenizer(tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / FILE), chat_template=LLAMA)
    judged = theirs.apply_chat_template(SPOKEN, return_dict=False)
    asked, learned = encode_all(tokenizer, [tokenizer.conversation(SPOKEN)])[0]
    assert theirs.decode(asked, skip_special_tokens=False) == theirs.decode(judged, skip_special_tokens=False)
    assert asked.tolist() == judged and learned.sum() == 2 * len(
        [*tokenizer.encode_many([" fine"], behind="text")[0], tokenizer.eos]
    )
    assert encode_all(tokenizer, [tokenizer.opening(SPOKEN[:3])])[0][
        0
    ].tolist() == theirs.apply_chat_template(SPOKEN[:3], add_generation_prompt=True, return_dict=False)
    pieces = [
        TextPiece(tokenizer.bos, False),
        TextPiece("say: ", False),
        TextPiece("fine", True),
        TextPiece(tokenizer.eos, True),
    ]
    ids, _ = encode_all(tokenizer, [pieces])[0]
    assert tokenizer.decode(ids.tolist()) == "say: fine"
    prompt = theirs("say: ", add_special_tokens=False).input_ids
    assert ids[1 : 1 + len(prompt)].tolist() == prompt == tokenizer.encode("say: ")


def test_what_is_written_neither_ends_an_answer_nor_looks_like_a_sign():
    lines = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    talk = [{"role": "user", "content": "<e>"}, {"role": "assistant", "content": "a<e>b"}]
    template = Template(lines, ends=("<e>",), control=("<e>",))
    assert [p.content for p in template.conversation(talk) if p.learned] == ["a<e>b", "\n"]
    talk[1]["content"] = "\U000f00000\U000f0000"
    assert "".join(p.content for p in template.opening(talk)) == template.render(talk, ask=True)
