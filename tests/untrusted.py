"""What somebody may put into files that a user downloads: code that leaves a mark if it is run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MODULE = """
open({marker!r}, "w").close()
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class Evil(PreTrainedTokenizerFast):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs | {{"tokenizer_file": {vocabulary!r}}})
class EvilConfig(PretrainedConfig): pass
class EvilModel(PreTrainedModel): pass
"""
_AUTO_MAPS = {
    "config.json": {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"},
    "tokenizer_config.json": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
}


class Command:
    """What pickle makes of it is a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return exec, (f"open({self.marker!r}, 'w').close()",)


def bring_code(
    folder: Path,
    marker: Path,
    files: Sequence[str] = tuple(_AUTO_MAPS),
    vocabulary: str = "tokenizer.json",
) -> None:
    """Put a module into a Hugging Face folder, and name its classes in `files` of it."""
    text = _MODULE.format(marker=str(marker), vocabulary=str(folder / vocabulary))
    (folder / "evil.py").write_text(text)
    for name in files:
        edit_json(folder / name, auto_map=_AUTO_MAPS[name])


def need_code_of_tokenizer(folder: Path, marker: Path) -> None:
    """The same for the tokenizer, whose file no other class reads, as Kimi-K2's."""
    bring_code(folder, marker, ["tokenizer_config.json"], vocabulary="evil.json")
    edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil")
    (folder / "tokenizer.json").rename(folder / "evil.json")


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of the object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
