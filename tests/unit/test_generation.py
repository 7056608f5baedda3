"""Stop strings of responses that continue in this process's vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from mcore_rl.hybrid_engine.vllm.generation import begin_with


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE(vocab={each: n for n, each in enumerate(alphabet)}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole)


@pytest.mark.parametrize(
    ("prompt", "own", "cut_bytes", "new", "stop", "ends_at"),
    [
        ("a STOP b", "c 好", 1, "d", "STOP", None),  # only the prompt has it
        ("a", "c 好", 2, "d", "好d", 3),
        ("a", "ST", 0, "OP and", "STOP", 2),
        ("a", "STOP", 0, "x", "STOP", None),  # it was not the end then
    ],
)
def test_a_stop_string_is_searched_for_in_the_response_alone(
    tokenizer: Any, prompt: str, own: str, cut_bytes: int, new: str, stop: str, ends_at: int | None
) -> None:
    """`cut_bytes` bytes of the last character of `own` are sampled after the cut."""
    before, after = tokenizer.encode(prompt + own), tokenizer.encode(new)
    if cut_bytes:
        before, after = before[:-cut_bytes], [*before[-cut_bytes:], *after]
    num_own = len(before) - len(tokenizer.encode(prompt))
    params = SamplingParams(
        stop=[stop], include_stop_str_in_output=True, skip_special_tokens=False, detokenize=True
    )
    request: Any = SimpleNamespace(
        request_id="0", sampling_params=params, prompt_token_ids=before, prompt_embeds=None
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    begin_with(detokenizer, before[-num_own:], tokenizer)
    found = [detokenizer.update([token], False) for token in after]
    assert next((n for n, text in enumerate(found, 1) if text is not None), None) == ends_at
