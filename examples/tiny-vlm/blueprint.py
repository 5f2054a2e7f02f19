"""The untrained model: its tokenizer, processor, chat template and configuration.

`train.py` calls this once before the first step. Only standard transformers classes are used, so
the saved folder loads anywhere. Never touches weights beyond their seeded initialisation.
"""

from __future__ import annotations

import random

from questions import FAMILIES, Asker
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from wording import corpus

SIDE = 48
PATCH = 8
IMAGE_TOKENS = (SIDE // PATCH) ** 2
VOCABULARY = 1024
CONTEXT = 8192
SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<|system|>", "<|user|>", "<|assistant|>")

# Tools by name and parameters alone; a call as in Hermes; its result is a message of role 'tool'.
CHAT_TEMPLATE = """\
{{- '<s>' -}}
{%- if tools -%}
{{- '<|system|>tools: ' -}}
{%- for tool in tools -%}
{%- set parameters = (tool['function']['parameters'] or {})['properties'] or {} -%}
{{- tool['function']['name'] + '(' + parameters | join(', ') + ')' -}}
{{- ', ' if not loop.last -}}
{%- endfor -%}
{{- '</s>' -}}
{%- endif -%}
{%- for message in messages -%}
{#- Roles are 'system', 'user', 'assistant' and 'tool'. -#}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '\\n' if not loop.first -}}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '</s>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE over the generated language: its words are single tokens, any text lives."""
    asker = Asker(random.Random(seed))
    texts = corpus() * 20
    for index in range(12_000):
        sample = asker.sample(FAMILIES[index % len(FAMILIES)])
        texts.append(sample.answer)
        last = sample.messages[-1]["content"]
        parts = [last] if isinstance(last, str) else [part.get("text", "") for part in last]
        texts.extend(parts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            min_frequency=2,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=["<image>", "<|system|>", "<|user|>", "<|assistant|>"],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def build_processor(seed: int) -> LlavaProcessor:
    """The standard processor: every image is squeezed to 48 by 48 and becomes 36 placeholders."""
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            do_center_crop=False,
            size={"height": SIDE, "width": SIDE},
            crop_size={"height": SIDE, "width": SIDE},
        ),
        tokenizer=build_tokenizer(seed),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: AutoTokenizer) -> LlavaForConditionalGeneration:
    """The randomly initialised model; the caller has seeded torch."""
    ids = dict(
        zip(
            ("pad_token_id", "bos_token_id", "eos_token_id"),
            tokenizer.convert_tokens_to_ids(list(SPECIAL[:3])),
            strict=True,
        )
    )
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=128,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **ids,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_seq_length=IMAGE_TOKENS,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        **ids,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.update(do_sample=False, max_new_tokens=160, **ids)
    return model
