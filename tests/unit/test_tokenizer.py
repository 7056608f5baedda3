"""Tokenizers: lower bounds of the length of texts, and the end of responses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.tokenizer import (
    TooLong,
    _named_ends,
    brings_code,
    characters_per_token,
    load_tokenizer,
    missing_end,
    vocabulary_size,
)
from tests.unit.test_data import save_tokenizer, write_lines


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), None)


def save_words_tokenizer(folder: Path) -> Path:
    """A tokenizer that drops blanks, and makes one token of an unknown word of any length."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "add": 1, "3": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def test_characters_per_token_are_bounded_if_none_can_be_dropped(tokenizer_dir, tmp_path):
    backend = AutoTokenizer.from_pretrained(tokenizer_dir)
    longest = len("<|assistant|>")
    assert characters_per_token(backend) == longest
    for normalizer, bound in [
        (normalizers.NFC(), 4 * longest),
        (normalizers.Sequence([normalizers.Prepend("_"), normalizers.NFD()]), 4 * longest),
        (normalizers.Replace(" ", "_"), longest),
        (normalizers.Replace("  ", "_"), 0),
        (normalizers.Strip(), 0),
    ]:
        backend.backend_tokenizer.normalizer = normalizer
        assert characters_per_token(backend) == bound, normalizer
    words = AutoTokenizer.from_pretrained(save_words_tokenizer(tmp_path / "words"))
    assert characters_per_token(words) == 0


# One long word, or many; the words' tokenizer makes one token of the former.
HUGE = {"bytes": "9" * 300_000, "words": "add 3 " * 50_000}


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_huge_text_is_too_long_without_being_tokenised(kind, tokenizer_dir, tmp_path, monkeypatch):
    folder = tokenizer_dir if kind == "bytes" else save_words_tokenizer(tmp_path / "words")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given: list[int] = []
    call = PreTrainedTokenizerFast.__call__

    def noted(self, text, *args, **options):
        given.append(len(text))
        return call(self, text, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", noted)
    too_long = TooLong(tokenizer, 6)
    assert [bool(too_long.least_tokens(text)) for text in ("add 3", HUGE[kind])] == [False, True]
    assert sum(given) < 100_000
    assert not TooLong(tokenizer, 300_001).least_tokens(HUGE[kind])


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_huge_text_is_left_out_like_other_long_texts(kind, tokenizer_dir, tmp_path, caplog):
    folder = tokenizer_dir if kind == "bytes" else save_words_tokenizer(tmp_path / "words")
    huge = HUGE[kind]
    rows = [{"prompt": text, "answer": "1"} for text in ("add 3", huge, "3", "add 3 " * 3)]
    path = write_lines(tmp_path / "p.jsonl", rows)
    few = PromptSource(path, 6, use_chat_template=False)
    prompts = load_prompts(few, folder, cache_dir=tmp_path)
    assert [prompt.index for prompt in prompts] == ([0, 2] if kind == "bytes" else [0, 2, 3])
    assert prompts.num_too_long == (2 if kind == "bytes" else 1)
    assert f"{prompts.num_too_long} of 4 prompts are longer than 6 tokens" in caplog.text
    (cached,) = (tmp_path / "prompts").glob("*.arrow")
    assert cached.stat().st_size < 20_000
    all_of_them = PromptSource(path, 300_001, use_chat_template=False)
    assert load_prompts(all_of_them, folder, cache_dir=tmp_path)[1].text == huge
    # The complete cache serves both limits, and the same prompts have the same fingerprint.
    size = cached.stat().st_size
    again = load_prompts(few, folder, cache_dir=tmp_path)
    assert again.fingerprint == prompts.fingerprint and cached.stat().st_size == size


def test_missing_end_of_sequence_is_reported(tokenizer_dir, tmp_path):
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "other"))

    def write(name: str, **fields: object) -> None:
        (folder / name).write_text(json.dumps(fields))

    def fault() -> str | None:
        return missing_end(folder, trust_remote_code=False)

    write("config.json", vocab_size=300)
    assert f"{folder}/config.json has no eos_token_id" in str(fault())
    write("config.json", vocab_size=300, eos_token_id=2)
    assert fault() is None
    write("generation_config.json", do_sample=True)  # vLLM reads only this file
    assert f"{folder}/generation_config.json has no eos_token_id" in str(fault())
    write("generation_config.json", eos_token_id=[300, 301])
    assert "is token 300, 301, which a model with a vocab_size of 300 never samples" in str(fault())
    write("generation_config.json", eos_token_id=[300, 299])
    assert fault() is None
    write("generation_config.json")
    write("tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token="<|user|>")
    assert fault() is None
    write("config.json", vocab_size=200)
    assert "is token 258, which" in str(fault())


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
def test_malformed_settings_are_ignored(name, tmp_path):
    for text in ("[" * 100_000, "5", '{"eos_token_id": [true, -1, 1e999, 1' + "0" * 400 + "]}"):
        (tmp_path / name).write_text(text)
        assert not brings_code(tmp_path)
        assert _named_ends(tmp_path)[1] == []
    (tmp_path / "config.json").write_text('{"vocab_size": 1e999}')
    assert vocabulary_size(tmp_path) is None


@pytest.mark.parametrize("model_type", ["qwen3", "olmoe"])
@pytest.mark.parametrize("needs_template", [True, False])
def test_tokenizer_that_transformers_makes_of_config_json_is_none(
    model_type, needs_template, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    settings = {"added_tokens_decoder": {"1": {"content": "<tool>", "special": False}}}
    for more in ({}, settings):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(more))
        with pytest.raises(UsageError, match="holds no tokenizer.*; copy the tokenizer"):
            load_tokenizer(tmp_path, trust_remote_code=False, needs_template=needs_template)
