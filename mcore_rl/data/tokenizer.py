"""Loading of a checkpoint's tokenizer, and checks of it.

The checks find out whether responses can end, and whether a text is too long before all of it is
tokenised: a tokenizer takes about 200 bytes of memory per character of a text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.readers import FETCH_LFS, integer_within, is_lfs_pointer, parse_json
from mcore_rl.model.families import FAMILIES, text_values

# Texts up to this length are tokenised at once (13 MB of memory), longer ones by a first piece.
_LONG_CHARACTERS = 1 << 16
_PIECE_CHARACTERS_PER_TOKEN = 16
# Most code points that Unicode composition merges into one.
_COMPOSED_AT_MOST = 4
_KEEPING_NORMALIZERS = {"Prepend", "ByteLevel"}
_UNICODE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
_NUM_BYTES = 256
_MAX_TOKEN = (1 << 31) - 1


def load_tokenizer(folder: Path, *, trust_remote_code: bool, needs_template: bool) -> Any:
    """Return transformers' tokenizer.

    Raises UsageError if it is missing, needs untrusted code, or lacks a required chat template."""
    from transformers import AutoTokenizer

    register_families()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder),
            local_files_only=True,
            # Explicit, as transformers would otherwise ask on stdin and accept a y found there.
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # `tokenizers` raises no specific exception for a broken file
        if not trust_remote_code and brings_code(folder):
            raise UsageError(
                "holds a tokenizer with code of its own, which is not run by default",
                flag=f"--rl-hf-checkpoint {folder}",
                remedy="review the code, then pass --trust-remote-code",
            ) from error
        pointer = next(filter(is_lfs_pointer, sorted(folder.glob("*"))), None)
        add = "add its tokenizer files, as tokenizer.json"
        raise UsageError(
            f"holds no tokenizer that transformers can load ({str(error).partition(chr(10))[0]})",
            flag=f"--rl-hf-checkpoint {folder}",
            remedy=f"{pointer.name} {FETCH_LFS}" if pointer else add,
        ) from error
    if not _has_texts(tokenizer):
        # transformers makes a tokenizer from config.json alone; its only tokens are special.
        raise UsageError(
            "holds no tokenizer: its files name no token that a text could have",
            flag=f"--rl-hf-checkpoint {folder}",
            remedy="copy the tokenizer of the published checkpoint, as tokenizer.json and "
            "tokenizer_config.json",
        )
    if needs_template and tokenizer.chat_template is None:
        raise UsageError(
            "has a tokenizer without a chat template",
            flag=f"--rl-hf-checkpoint {folder}",
            remedy="pass --rl-no-chat-template to give prompts to the model unchanged",
        )
    return tokenizer


def _has_texts(tokenizer: Any) -> bool:
    """Return whether the vocabulary has more than special tokens. One that a tokenizer's own code
    does not show counts as one that has."""
    try:
        known = set(tokenizer.get_vocab().values())
    except NotImplementedError:
        return True
    return bool(known - set(tokenizer.all_special_ids) - set(tokenizer.added_tokens_decoder))


def brings_code(folder: Path) -> bool:
    """Return whether the folder names its own class for its tokenizer."""
    for name in ("tokenizer_config.json", "config.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return "AutoTokenizer" in _settings(folder, name)["auto_map"]
    return False


def vocabulary_size(folder: Path) -> int | None:
    """Return the model's vocab_size in config.json; None if it has none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        values = text_values(_settings(folder, "config.json"))
        return integer_within(values["vocab_size"], 1, _MAX_TOKEN)
    return None


def _settings(folder: Path, name: str) -> Mapping[str, Any]:
    """Parse a JSON file of the folder; raise OSError or ValueError if that fails."""
    settings: Mapping[str, Any] = parse_json((folder / name).read_bytes())
    return settings


# The end of a response ----------------------------------------------------------------------------


def missing_end(folder: Path, *, trust_remote_code: bool) -> str | None:
    """Return a sentence without remedy if no response can end by itself, else None.

    vLLM ends a response at the tokenizer's end of sequence, and at those in generation_config.json
    or, without that file, in config.json. The tokenizer is only loaded if none of these is usable.
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
    """Return the tokens at which vLLM ends a response; `tokenizer` is the folder's."""
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tuple(sorted({*_named_ends(folder)[1], *own}))


def named_ends(folder: Path) -> list[int]:
    """Return the ends of sequence in generation_config.json or, without that file, in
    config.json."""
    return _named_ends(folder)[1]


@functools.cache
def ends_of(folder: Path, *, trust_remote_code: bool) -> tuple[int, ...]:
    """Return `response_ends` of a folder that does not change."""
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code, needs_template=False)
    return response_ends(folder, tokenizer)


def _named_ends(folder: Path) -> tuple[str, list[int]]:
    """Return the file that may name ends of sequence, and the ends that it names."""
    named = "generation_config.json"
    if not os.path.isfile(folder / named):
        named = "config.json"
    stated: Any = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        settings = _settings(folder, named)
        stated = settings.get("eos_token_id", text_values(settings).get("eos_token_id"))
    ends = stated if isinstance(stated, list) else [stated]
    return named, [t for t in ends if integer_within(t, 0, _MAX_TOKEN) is not None]


HOW_TO_END = 'name the token in generation_config.json, as "eos_token_id": 2'


# Texts that are too long --------------------------------------------------------------------------


class TooLong:
    """Detector of texts that certainly have more than `limit` tokens, without tokenising them."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit

    @functools.cached_property
    def _per_token(self) -> int:
        return characters_per_token(self._tokenizer)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of `text`'s tokens if above the limit; 0: it must be tokenised."""
        if len(text) <= _LONG_CHARACTERS:
            return 0
        least = len(text) // self._per_token if self._per_token else 0
        if least <= self._limit:
            least = self._count_first_piece(text)
        return least if least > self._limit else 0

    def _count_first_piece(self, text: str) -> int:
        """Count the tokens of a first piece up to a blank, at which tokenizers pre-tokenise."""
        end = max(_LONG_CHARACTERS, _PIECE_CHARACTERS_PER_TOKEN * self._limit)
        if end >= len(text):
            return 0
        words = text[:end].rsplit(None, 1)
        if len(words) < 2:
            return 0
        return len(self._tokenizer(words[0], add_special_tokens=False)["input_ids"])


def characters_per_token(tokenizer: Any) -> int:
    """Return the most characters of a text that one token can represent; 0 if unknown.

    It is known for tokenizers that lose no characters: they neither drop characters nor replace
    them by shorter text, and have a token for every byte.
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


def _parts_of(part: Mapping[str, Any] | None, sequence_key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part[sequence_key] for inner in _parts_of(each, sequence_key)]


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

    Kimi-K2 publishes code with its weights and is not part of transformers; its model_type is
    another name for DeepSeek-V3's. Without registration even its tokenizer cannot be loaded, since
    transformers parses config.json first. vLLM does the same for itself.
    """
    for family in FAMILIES.values():
        register_model_type(family.model_type, family.class_name)


def register_model_type(model_type: str, class_name: str) -> None:
    """Register a `model_type` with the configuration of the model `class_name`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type in CONFIG_MAPPING:
        return
    # By name, because without torch the model's class is not available.
    config_class = getattr(transformers, class_name.replace("ForCausalLM", "Config"))
    known = type(config_class.__name__, (config_class,), {"model_type": model_type})
    transformers.AutoConfig.register(model_type, known)
