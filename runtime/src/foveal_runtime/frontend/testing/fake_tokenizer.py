"""A tokenizer of 256 bytes and a few special tokens, built in memory: for tests and demos.

Every text is exactly its UTF-8 bytes, so tests can say what tokens mean. Ships beside fake.py.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foveal_runtime.frontend.text.tokenizer import byte_of_char

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<image>", "<video>", "<audio>")
EOS, IMAGE, VIDEO, AUDIO = 256, 260, 261, 262

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}"
    "{% endfor %}"
    "{% if not (continue_final_message and loop.last) %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STRING_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are the bytes of the same value, then SPECIAL from 256 on."""
    vocab = dict(byte_of_char())
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer
