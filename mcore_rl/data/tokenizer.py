"""The tokenizer in a checkpoint's folder: loaded, and asked what a run must know of it.

That is whether responses can end, and whether a text is too long, told before all of it is
tokenised: a tokenizer takes some 200 bytes of memory for each character of a text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import integer_within, parse_json
from mcore_rl.model.families import FAMILIES

# Texts up to this length are tokenised whole, 13 MB of memory; of longer ones a first piece.
_LONG_CHARACTERS = 1 << 16
_PIECE_CHARACTERS_PER_TOKEN = 16
# So many code points become one at most where Unicode is composed.
_COMPOSED_AT_MOST = 4
_KEEPING_NORMALIZERS = {"Prepend", "ByteLevel"}
_UNICODE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
_NUM_BYTES = 256
_MAX_TOKEN = (1 << 31) - 1


def load_tokenizer(folder: Path, *, trust_remote_code: bool, needs_template: bool) -> Any:
    """transformers' tokenizer. Raises UsageError if there is none, none without code of its own
    that is not trusted, or no chat template where one is needed."""
    from transformers import AutoTokenizer

    register_families()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            # Said aloud: transformers would ask on stdin, and take a y that lies there.
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # `tokenizers` raises nothing more special for a broken file
        if not trust_remote_code and brings_code(folder):
            raise UsageError(
                "holds a tokenizer with code of its own, which is not run unasked",
                flag=f"--rl-hf-checkpoint {folder}",
                remedy="read it, and give --trust-remote-code to have it run",
            ) from error
        raise UsageError(
            f"holds no tokenizer that transformers can load ({str(error).partition(chr(10))[0]})",
            flag=f"--rl-hf-checkpoint {folder}",
            remedy="add its tokenizer files, as tokenizer.json",
        ) from error
    if needs_template and tokenizer.chat_template is None:
        raise UsageError(
            "has a tokenizer without a chat template",
            flag=f"--rl-hf-checkpoint {folder}",
            remedy="pass --rl-no-chat-template to give prompts to the model as they stand",
        )
    return tokenizer


def brings_code(folder: Path) -> bool:
    """Whether the folder names a class of its own for its tokenizer."""
    for name in ("tokenizer_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return "AutoTokenizer" in _settings(folder, name)["auto_map"]
    return False


def vocabulary_size(folder: Path) -> int | None:
    """That of the model, by config.json; None where it says nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return integer_within(_settings(folder, "config.json")["vocab_size"], 1, _MAX_TOKEN)
    return None


def _settings(folder: Path, name: str) -> Mapping[str, Any]:
    """OSError or ValueError for what cannot be read as JSON."""
    settings: Mapping[str, Any] = parse_json((folder / name).read_bytes())
    return settings


# The end of a response ----------------------------------------------------------------------------


def missing_end(folder: Path, *, trust_remote_code: bool) -> str | None:
    """What is wrong if no response can end by itself, as a sentence without its remedy.

    vLLM ends a response at the tokenizer's end of sequence, and at those of generation_config.json
    or, without that file, of config.json. The tokenizer is loaded only where neither names one.
    """
    size = vocabulary_size(folder)
    named, ids = _named_ends(folder)
    if not any(size is None or token < size for token in ids):
        tokenizer = load_tokenizer(
            folder, trust_remote_code=trust_remote_code, needs_template=False
        )
        if tokenizer.eos_token_id is not None:
            ids.append(tokenizer.eos_token_id)
    if any(size is None or token < size for token in ids):
        return None
    if ids:
        return (
            f"the end of sequence in {folder} is token {', '.join(map(str, ids))}, which a model "
            f"with a vocab_size of {size} never samples"
        )
    return (
        f"no end of sequence is known: {folder}/{named} has no eos_token_id, and the tokenizer "
        "beside it no eos_token"
    )


def response_ends(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which vLLM ends a response; `tokenizer` is that of the folder."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({*_named_ends(folder)[1], *own}))


def _named_ends(folder: Path) -> tuple[str, list[int]]:
    """The file that may name ends of sequence, and those that it names."""
    named = "generation_config.json"
    if not (folder / named).is_file():
        named = "config.json"
    found: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        found = _settings(folder, named).get("eos_token_id")
    ends = found if isinstance(found, list) else [found]
    return named, [t for t in ends if integer_within(t, 0, _MAX_TOKEN) is not None]


HOW_TO_END = 'name the token in generation_config.json, as "eos_token_id": 2'


# Texts that are too long --------------------------------------------------------------------------


class TooLong:
    """Which texts have more than `limit` tokens for sure, told without tokenising all of them."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._asked, self._per_token = False, 0

    def least_tokens(self, text: str) -> int:
        """So many tokens or more `text` has, above the limit; 0 if it has to be tokenised."""
        if len(text) <= _LONG_CHARACTERS:
            return 0
        if not self._asked:
            self._asked, self._per_token = True, characters_per_token(self._tokenizer)
        least = len(text) // self._per_token if self._per_token else 0
        if least <= self._limit:
            least = self._of_first_piece(text)
        return least if least > self._limit else 0

    def _of_first_piece(self, text: str) -> int:
        """Up to a blank, at which tokenizers cut before they look any closer."""
        end = max(_LONG_CHARACTERS, _PIECE_CHARACTERS_PER_TOKEN * self._limit)
        if end >= len(text):
            return 0
        words = text[:end].rsplit(None, 1)
        if len(words) < 2:
            return 0
        return len(self._tokenizer(words[0], add_special_tokens=False)["input_ids"])


def characters_per_token(tokenizer: Any) -> int:
    """No token stands for more characters of a text than this; 0 if nothing is sure.

    Sure are tokenizers that lose no character on the way: which neither drop nor replace by
    something shorter, and have a token for every byte.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return 0
    parts = json.loads(backend.to_str())
    normalizers = _parts_of(parts["normalizer"], "normalizers")
    pre_tokenizers = _parts_of(parts["pre_tokenizer"], "pretokenizers")
    composes = any(part["type"] in _UNICODE_NORMALIZERS for part in normalizers)
    keeps_all = (
        all(map(_normalizer_keeps_all, normalizers))
        and all(map(_pre_tokenizer_keeps_all, pre_tokenizers))
        and _has_every_byte(parts["model"], [*normalizers, *pre_tokenizers])
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        and parts["truncation"] is None
    )
    if not keeps_all:
        return 0
    return max(map(len, tokenizer.get_vocab())) * (_COMPOSED_AT_MOST if composes else 1)


def _parts_of(part: Mapping[str, Any] | None, of_sequence: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part[of_sequence] for inner in _parts_of(each, of_sequence)]


def _normalizer_keeps_all(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Replace":
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return part["type"] in _KEEPING_NORMALIZERS | _UNICODE_NORMALIZERS


def _pre_tokenizer_keeps_all(part: Mapping[str, Any]) -> bool:
    if part["type"] in ("Split", "Punctuation"):
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING_PRE_TOKENIZERS


def _has_every_byte(model: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> bool:
    if model["type"] not in ("BPE", "Unigram"):
        return False
    vocab = model["vocab"]
    known = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in known for byte in range(_NUM_BYTES))
    if any(part["type"] == "ByteLevel" for part in parts):
        from tokenizers.pre_tokenizers import ByteLevel

        return known.issuperset(ByteLevel.alphabet())
    return False


def register_families() -> None:
    """Register the configuration of each family that transformers lacks. Idempotent, cheap.

    Kimi-K2 publishes code beside its weights instead of being a part of transformers; its
    model_type is DeepSeek-V3's under another name. Without this even its tokenizer cannot be
    loaded, since transformers wants to understand config.json first. vLLM does the same for itself.
    """
    for family in FAMILIES.values():
        register_model_type(family.model_type, family.class_name)


def register_model_type(model_type: str, class_name: str) -> None:
    """Make a `model_type` known, with the configuration of the model `class_name`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return
    # By its name: without torch the model's own class is not there to be asked.
    config_class = getattr(transformers, class_name.replace("ForCausalLM", "Config"))
    known = type(config_class.__name__, (config_class,), {"model_type": model_type})
    transformers.AutoConfig.register(model_type, known)


def model_class(model_type: str) -> type:
    """transformers' class of a family."""
    import transformers

    found: type = getattr(transformers, FAMILIES[model_type].class_name)
    return found
