"""Conversations, a chat template, and a model directory with a small BPE tokenizer."""

from __future__ import annotations

import json

import pytest

from experiments.data.tokenizer import FILE

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": " Yes.\n"},
    {"role": "user", "content": "Thanks."},
]
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
MARKED = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}
{%- endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


EVERY_BYTE = "".join(
    map(chr, [*range(0x801), *range(0x1000, 0xD000, 0x1000), *range(0x10000, 0x110000, 0x4000)])
)


def learned_text(tokenizer, sample):
    """Every learned stretch of a sample, with its control tokens, and all ids."""
    ids, learned = sample
    return tokenizer.decode(ids[learned.astype(bool)].tolist(), control=True), ids.tolist()


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory):
    """A model directory with a small BPE, as `transformers` would save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("made")
    file = Tokenizer(models.BPE())
    file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    file.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    file.train_from_iterator(["the assistant and the user say yes to the other"] * 9, trainer)
    file.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    file.enable_truncation(5)  # some directories come with this
    file.save(str(folder / FILE))
    return folder


@pytest.fixture
def directory(bpe_folder, tmp_path):
    """`directory(**files)`: a copy of it with files next to `tokenizer.json`."""

    def make(**files):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_bytes((bpe_folder / FILE).read_bytes())
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"{name}.json").write_text(text)
        return folder

    return make
