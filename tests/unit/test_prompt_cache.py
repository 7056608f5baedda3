"""The name of a cache of tokenised prompts and its dependencies."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import transformers

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_cache import LIBRARIES, content_key, tokenised_table
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.tokenizer import load_tokenizer
from tests.unit.test_data import TEMPLATE, save_tokenizer, write_lines

# Distributions by the names that transformers imports.
DISTRIBUTIONS = {"google": "protobuf", "Mykytea": "kytea"}
# Imported where tokenizers are defined, and no text or token depends on them.
OTHERS = set(
    "PIL huggingface_hub mlx numpy packaging pandas pretty_midi torch typing_extensions "
    "Levenshtein".split()  # compares texts that a model has read from an image
)


def test_versions_cover_imports_of_tokenizers():
    """The imports are those of the installed version."""
    folder = Path(transformers.__file__).parent
    texts = [
        path.read_text()
        for pattern in ("models/*/tokenization_*.py", "tokenization_*.py", "utils/chat_*.py")
        for path in folder.glob(pattern)
    ]
    found = set(re.findall(r"^ *(?:import|from) ([A-Za-z]\w*)", "\n".join(texts), re.MULTILINE))
    names = {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - OTHERS}
    assert {"regex", "mistral_common", "jinja2"} <= names <= {*LIBRARIES}


@pytest.mark.parametrize(
    ("library", "trust_remote_code", "is_read"),
    [
        ("mistral-common", False, True),
        ("Mistral_Common", False, True),
        ("regex", False, True),
        ("some_words", False, False),
        ("some_words", True, True),  # which code of the checkpoint may import
    ],
)
def test_cache_key_follows_versions(library, trust_remote_code, is_read, tmp_path, monkeypatch):
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    if trust_remote_code:
        (folder / "config.json").write_text('{"auto_map": {"AutoTokenizer": "code.Tokenizer"}}')
    lines = write_lines(tmp_path / "p.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    source = PromptSource(lines, 100, trust_remote_code=trust_remote_code)
    keys = set()
    for version in ("1.0", "1.1"):
        installed = tmp_path / version / f"{library.replace('-', '_')}-{version}.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text(f"Name: {library}\nVersion: {version}\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(installed.parent)
            keys.add(content_key(source, folder))
    assert len(keys) == (2 if is_read else 1)


def test_unreadable_tokenizer_is_refused(of_user):
    folder = save_tokenizer(of_user / "tokenizer", TEMPLATE)
    (folder / "tokenizer.json").chmod(0o000)
    source = PromptSource(write_lines(of_user / "p.jsonl", [{"prompt": "1+1="}]), 100)
    with pytest.raises(UsageError, match="^--rl-prompts .*tokenizer.json cannot be read .*permiss"):
        tokenised_table(source, folder, of_user, write_cache=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_git_lfs_pointer_of_tokenizer_is_refused(tmp_path, name):
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n")
    with pytest.raises(UsageError, match=f"holds no tokenizer .*; {name} is a .*: .*git lfs pull"):
        load_tokenizer(folder, trust_remote_code=False, needs_template=False)
