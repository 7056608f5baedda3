"""Conversations of environments in the chat templates of supported families.

Each template keeps what distinguishes a published one: how a turn ends, which roles exist, and what
must precede the result of a tool.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.data.chat import ChatTokenizer
from mcore_rl.environments.conversation import ConversationTokens

SPECIAL = (
    "<|start|> <|end|> <|return|> <|call|> <|message|> <|channel|> <|user|> <|assistant|> "
    "<|observation|> <|endoftext|> <|im_start|> <|im_end|> <s> </s> <eos>"
).split()
GPT_OSS = """{{ '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- set ns = namespace(called='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set ns.called = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
{%- if not ns.called %}{{ raise_exception('no previous call') }}{% endif %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GLM = """{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\\n<think></think>\\n' + m.content.strip() }}
{%- elif m.role == 'tool' %}
{{- '<|observation|>\\n<tool_response>' + m.content + '</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
MIXTRAL = """{{ bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}
{%- endif %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}
{%- endif %}
{%- endfor %}"""
DEEPSEEK = """{%- set ns = namespace(system='', tool=false) %}
{%- for m in messages if m.role == 'system' %}
{%- set ns.system = ns.system + m.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>' + m.content }}{% set ns.tool = false %}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- elif m.role == 'tool' %}{{ '<output>' + m.content + '</output>' }}{% set ns.tool = true %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.tool %}<|assistant|>{% endif %}"""
OLMOE = """{{ bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content + eos_token }}
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- elif m.role in ('user', 'system') %}{{ '<|user|>\\n' + m.content + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>\n{% endif %}"""
MINIMAX = """{%- set ns = namespace(called=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ ']ai\\n' + (m.content or '') }}
{%- set ns.called = none %}
{%- for c in m.tool_calls or [] %}{% set ns.called = c.function.name %}
{{- '<invoke ' + c.function.name + '>' }}
{%- if c.function.arguments is mapping %}{{ c.function.arguments | tojson }}{% endif %}
{{- '</invoke>' }}
{%- endfor %}{{ eos_token + '\\n' }}
{%- elif m.role == 'tool' %}
{%- if ns.called is none %}{{ raise_exception('no previous call') }}{% endif %}
{{- ']tool\\n<response>' + m.content + '</response>' + eos_token + '\\n' }}
{%- elif m.role == 'user' %}{{ ']user\\n' + m.content + eos_token + '\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']ai\\n<think>\\n' }}{% endif %}"""
QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def tokenizer_of(template: str, eos: str) -> PreTrainedTokenizerFast:
    """A token for each character, and the special ones."""
    alphabet = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    vocab = {token: index for index, token in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        additional_special_tokens=[token for token in SPECIAL if token not in ("<s>", eos)],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


USER, SYSTEM = {"role": "user", "content": "and 5?"}, {"role": "system", "content": "Be brief."}
TOOL = {"role": "tool", "content": "2.5", "name": "price"}
AS_JSON = json.dumps("2.5")
ENDS_OF_GPT_OSS = "<|return|> <|endoftext|> <|call|>"
ENDS_OF_GLM = "<|endoftext|> <|user|> <|observation|>"
# Template, end tokens of the engine (the first is the tokenizer's), the token that ended the turn,
# the observed message; and the text that follows.
CASES = {
    "gpt_oss, a user": (
        (GPT_OSS, ENDS_OF_GPT_OSS, "<|return|>", USER),
        "<|start|>user<|message|>and 5?<|end|><|start|>assistant",
    ),
    "gpt_oss, cut": (
        (GPT_OSS, ENDS_OF_GPT_OSS, "", USER),
        "<|end|><|start|>user<|message|>and 5?<|end|><|start|>assistant",
    ),
    "gpt_oss, a tool": (
        (GPT_OSS, ENDS_OF_GPT_OSS, "<|call|>", TOOL),
        f"<|start|>functions.price to=assistant<|channel|>commentary<|message|>{AS_JSON}<|end|>"
        "<|start|>assistant",
    ),
    "glm, a user": ((GLM, ENDS_OF_GLM, "<|user|>", USER), "\nand 5?<|assistant|>"),
    "glm, a tool": (
        (GLM, ENDS_OF_GLM, "<|observation|>", TOOL),
        "\n<tool_response>2.5</tool_response><|assistant|>",
    ),
    "glm, another end": (
        (GLM, ENDS_OF_GLM, "<|endoftext|>", USER),
        "<|user|>\nand 5?<|assistant|>",
    ),
    "glm, cut": ((GLM, ENDS_OF_GLM, "", USER), "<|user|>\nand 5?<|assistant|>"),
    "mixtral, a user": ((MIXTRAL, "</s>", "</s>", USER), "[INST] and 5? [/INST]"),
    "mixtral, a tool": ((MIXTRAL, "</s>", "</s>", TOOL), "[INST] 2.5 [/INST]"),
    "deepseek, a tool": ((DEEPSEEK, "</s>", "</s>", TOOL), "<output>2.5</output>"),
    "deepseek, the system": ((DEEPSEEK, "</s>", "</s>", SYSTEM), "<|user|>Be brief.<|assistant|>"),
    "olmoe, a tool": ((OLMOE, "<eos>", "<eos>", TOOL), "\n<|user|>\n2.5\n<|assistant|>\n"),
    "minimax, a tool": (
        (MINIMAX, "<eos>", "<eos>", TOOL),
        "\n]tool\n<response>2.5</response><eos>\n]ai\n<think>\n",
    ),
    "minimax, a tool after a cut call": (
        (MINIMAX, "<eos>", "", TOOL),
        "<eos>\n]tool\n<response>2.5</response><eos>\n]ai\n<think>\n",
    ),
    "qwen3, a tool": (
        (QWEN3, "<|im_end|>", "<|im_end|>", TOOL),
        "\n<|im_start|>user\n<tool_response>\n2.5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_observation_follows_turn_in_format_of_template(case):
    (template, ends, end, message), expected = CASES[case]
    eos, *others = ends.split()
    tokenizer = tokenizer_of(template, eos)
    conversation = ConversationTokens(
        ChatTokenizer(tokenizer, date="2026-01-02"),
        use_chat_template=True,
        ends=tokenizer.convert_tokens_to_ids([eos, *others]),
    )
    generated = tokenizer.encode("7" + end, add_special_tokens=False)
    observed = conversation.observed(np.asarray(generated, np.int32), [message])
    assert isinstance(observed, np.ndarray), observed
    assert tokenizer.decode(observed) == expected


def test_system_message_is_merged_into_user_message_without_system_role():
    tokenizer = tokenizer_of(MIXTRAL, "</s>")
    conversation = ConversationTokens(
        tokenizer, use_chat_template=True, ends=[tokenizer.eos_token_id]
    )
    first = conversation.first(np.zeros(1, np.int32), [SYSTEM, USER])
    assert tokenizer.decode(first) == "<s>[INST] Be brief.\n\nand 5? [/INST]"
