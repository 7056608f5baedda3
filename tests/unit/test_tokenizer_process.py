"""A chat template or tokenizer that exceeds its limits fails with its row."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import normalizers
from transformers import AutoTokenizer

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_cache import tokenizer_process
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.tokenizer_process import ChatTemplate, ProcessEnded, close_all
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.isolation.wire import Failed
from tests.unit.test_data import save_tokenizer, write_lines

# Ended after 10 s of processor time.
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
# Run for prompts that contain "go".
BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "surrogate": "{{ '\\ud800' }}",
    "division": "{{ 1 // 0 }}",
    "memory": "{{ messages[0].content * 10**10 }}",
    "grows": "{% for i in range(9999) %}{% for j in range(999) %}{{ 'x' * 9999 }}{% endfor %}"
    "{% endfor %}",
}


def template_of(bomb: str) -> str:
    chat = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    asked = "{% if 'go' in messages[-1].content %}" + bomb + "{% endif %}"
    return asked + chat + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def rows(tmp_path: Path, *texts: str) -> PromptSource:
    lines = [{"prompt": text, "answer": ""} for text in texts]
    return PromptSource(write_lines(tmp_path / "p.jsonl", lines), 100)


@pytest.mark.parametrize(
    "bomb", [*BOMBS.values(), pytest.param(LOOPS, marks=pytest.mark.slow)], ids=[*BOMBS, "loops"]
)
def test_template_beyond_its_limits_fails_with_its_row(bomb, tmp_path):
    folder = save_tokenizer(tmp_path / "model", template_of(bomb))
    source = rows(tmp_path, "hi", "ho", "go")
    with pytest.raises(UsageError, match=r"p.jsonl, line 3: .*; "):
        load_prompts(source, folder, cache_dir=tmp_path)
    # The next file is tokenised.
    assert len(load_prompts(rows(tmp_path, "hi", "ho"), folder, cache_dir=tmp_path)) == 2


@pytest.mark.slow
def test_tokenizer_that_aborts_its_process_fails_with_its_row(tmp_path):
    """One character becomes 10^10."""
    folder = save_tokenizer(tmp_path / "model", template_of(""))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    swell = [normalizers.Replace(a, b * 100_000) for a, b in (("z", "y"), ("y", "x"))]
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(swell)
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match=f"line 2: .*tokenizer of {folder} cannot be run .* 4 GiB"):
        load_prompts(rows(tmp_path, "hi", "z", "ho"), folder, cache_dir=tmp_path)


def test_unreadable_tokenizer_names_its_folder(tmp_path):
    folder = save_tokenizer(tmp_path / "model", template_of(""))
    (folder / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(UsageError, match=f"--rl-hf-checkpoint {folder} "):
        load_prompts(rows(tmp_path, "hi"), folder, cache_dir=tmp_path)


def test_text_of_an_environment_fails_only_its_sample(tmp_path):
    folder = save_tokenizer(tmp_path / "model", template_of(BOMBS["memory"]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.save_pretrained(folder)
    process = tokenizer_process(folder, ChatTemplate(), use_template=True, trust_remote_code=False)
    end = process.eos_token_id
    assert end == tokenizer.eos_token_id
    conversation = ConversationTokens(process, use_chat_template=True, ends=[end])
    turn = np.array([5, end], np.int32)

    def observed(text: str) -> Any:
        return conversation.observed(turn, [{"role": "user", "content": text}])

    failed = observed("go")
    assert isinstance(failed, Failed) and "the chat template refuses" in failed.failure
    assert tokenizer.decode(observed("hi")) == "\n<|user|>hi<eos>\n<|assistant|>"


def test_process_has_limits_and_no_secret_and_is_replaced_when_it_ends(tmp_path, monkeypatch):
    folder = save_tokenizer(tmp_path / "model", None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    close_all()
    tokens = tokenizer_process(folder, ChatTemplate(), use_template=False, trust_remote_code=False)
    before = set(psutil.Process().children(recursive=True))
    ids = tokens.encode(["hi"], special=False)
    zygote, process = sorted(
        set(psutil.Process().children(recursive=True)) - before, key=lambda each: each.pid
    )
    assert process.parent() == zygote
    assert process.rlimit(psutil.RLIMIT_DATA) == (4 << 30, 4 << 30)
    assert not {"AWS_SECRET_ACCESS_KEY"} & (zygote.environ().keys() | process.environ().keys())
    assert not any("torch" in each.path for each in process.memory_maps())
    process.suspend()
    threading.Timer(0.5, process.kill).start()
    with pytest.raises(ProcessEnded, match="SIGKILL"):
        tokens.encode(["ho"], special=False)
    assert tokens.encode(["hi"], special=False) == ids
    close_all()
    assert not zygote.is_running()
