"""Token ids of a conversation: generated tokens are kept, only observations are tokenised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.common.errors import UsageError
from mcore_rl.data.tokenizer import load_tokenizer, response_ends
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.isolation.wire import Failed
from tests.conftest import load_script

USER = {"role": "user", "content": "7"}
TOOL = [{"role": "tool", "content": "3"}, {"role": "user", "content": "and?"}]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of the tiny checkpoint, saved as that is."""
    folder = tmp_path_factory.mktemp("tiny")
    script = load_script("tiny_task")
    script.build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 509}')
    return folder


def chatml(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Tokens of one or two characters, of which decoding and encoding makes others."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "ab", "12"]
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("1", "2")]))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def tokens_of(tokenizer, **options: object) -> ConversationTokens:
    given = {"use_chat_template": True, "ends": [tokenizer.eos_token_id], "vocabulary": 509}
    return ConversationTokens(tokenizer, **{**given, **options})  # type: ignore[arg-type]


def rendered(tokenizer, messages, *, prompt: bool) -> list[int]:
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
    return list(found if isinstance(found, list) else found["input_ids"])


def array(ids) -> np.ndarray:
    return np.asarray(ids, np.int32)


@pytest.fixture(params=["tiny", "chatml"])
def tokenizer(request, tiny):
    if request.param == "chatml":
        return chatml()
    return load_tokenizer(tiny, trust_remote_code=False, needs_template=True)


def test_turns_and_observations_are_the_tokens_of_the_whole_conversation(tokenizer):
    """The oracle: the template applied to all of it, where the tokenizer does round-trip."""
    conversation = tokens_of(tokenizer)
    prompt = rendered(tokenizer, [USER], prompt=True)
    ids, messages = list(prompt), [USER]
    for answer, question in (("x y", "and 5?"), ("zz", "so?\nwhat"), ("", " ")):
        turn = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        observation = [{"role": "user", "content": question}]
        ids += [*turn, *conversation.observed(array(turn), observation)]
        messages += [{"role": "assistant", "content": answer}, *observation]
        assert ids == rendered(tokenizer, messages, prompt=True)
        assert conversation.observed(array(turn), observation).dtype == np.int32


def test_a_turn_that_was_cut_is_ended_by_what_follows(tokenizer):
    conversation = tokens_of(tokenizer)
    turn = tokenizer.encode("x y", add_special_tokens=False)
    cut = conversation.observed(array(turn), [USER])
    ended = conversation.observed(array([*turn, tokenizer.eos_token_id]), [USER])
    assert cut.tolist() == [tokenizer.eos_token_id, *ended]
    assert conversation.observed(array([]), [USER]).tolist() == cut.tolist()


def test_what_was_generated_is_kept_by_a_tokenizer_that_does_not_round_trip():
    """The model may write `a` and `b` where the tokenizer would write `ab`."""
    tokenizer = chatml()
    conversation = tokens_of(tokenizer)
    a, b, joined, end = tokenizer.convert_tokens_to_ids(["a", "b", "ab", "<|im_end|>"])
    generated = [a, b, b, a, end]
    again = tokenizer.encode(tokenizer.decode(generated[:-1]), add_special_tokens=False)
    assert again == [joined, b, a] and again != generated[:-1]
    observed = conversation.observed(array(generated), [USER])
    text = "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"
    assert observed.tolist() == tokenizer.encode(text, add_special_tokens=False)
    # What was written does not matter to it, nor how it would be tokenised with what follows.
    assert conversation.observed(array([a, end]), [USER]).tolist() == observed.tolist()
    one, two, both = tokenizer.convert_tokens_to_ids(["1", "2", "12"])
    assert conversation.observed(array([one]), "2").tolist() == [two]
    assert conversation.observed(array([one]), "12").tolist() == [both]


def test_texts_and_ids_are_observed_unchanged(tokenizer):
    conversation = tokens_of(tokenizer)
    turn = array([5, tokenizer.eos_token_id])
    plain = tokenizer.encode("so?", add_special_tokens=False)
    assert conversation.observed(turn, "so?").tolist() == plain
    assert conversation.observed(turn, "").tolist() == []
    assert conversation.observed(turn, [7, 0, 7]).tolist() == [7, 0, 7]
    assert conversation.observed(turn, []).tolist() == []
    refused = conversation.observed(turn, [7, 509])
    assert isinstance(refused, Failed) and "token 509, and its vocabulary has 509" in refused.detail


def test_what_start_returns_stands_in_the_place_of_the_prompt(tokenizer):
    conversation = tokens_of(tokenizer)
    prompt = array(rendered(tokenizer, [USER], prompt=True))
    assert conversation.first(prompt, None) is prompt
    assert conversation.first(array([1]), "7").tolist() == prompt.tolist()
    messages = [{"role": "system", "content": "s"}, USER]
    expected = rendered(tokenizer, messages, prompt=True)
    assert conversation.first(prompt, messages).tolist() == expected
    assert conversation.first(prompt, [3, 4]).tolist() == [3, 4]
    assert isinstance(conversation.first(prompt, []), Failed)
    plain = tokens_of(tokenizer, use_chat_template=False)
    assert plain.first(prompt, "7").tolist() == tokenizer("7")["input_ids"]


def test_messages_without_a_usable_template_are_failures(tiny):
    tokenizer = load_tokenizer(tiny, trust_remote_code=False, needs_template=True)
    plain = tokens_of(tokenizer, use_chat_template=False)
    for found in (plain.observed(array([2]), [USER]), plain.first(array([2]), [USER])):
        assert isinstance(found, Failed)
        assert found.failure.startswith("returned messages: no chat template")
    refuses = tokens_of(
        chatml("{% if 'no' in messages[-1].content %}{{ 1 // 0 }}{% endif %}" + CHATML)
    )
    refused = refuses.observed(array([2]), [{"role": "user", "content": "no"}])
    assert isinstance(refused, Failed)
    assert refused.failure.startswith("returned messages that the chat template refuses: ")


def test_roles_that_the_template_lacks_are_read_as_a_users_message(tiny, caplog):
    """The tiny template raises at a tool's message, as those of Llama 2 and Mixtral do."""
    tokenizer = load_tokenizer(tiny, trust_remote_code=False, needs_template=True)
    conversation = tokens_of(tokenizer)
    said = [{"role": "user", "content": "3\n\nand?"}]
    turn = array([5, tokenizer.eos_token_id])
    assert conversation.observed(turn, TOOL).tolist() == conversation.observed(turn, said).tolist()
    conversation.observed(turn, TOOL)
    assert len([m for m in caplog.messages if "roles tool, user" in m]) == 1
    native = tokens_of(chatml())
    end = native.observed(array([1]), TOOL)
    assert "tool" in chatml().decode(end) and "roles" not in "".join(caplog.messages[1:])


OTHER_TEMPLATES = {
    "it does not keep the assistant's earlier turns": CHATML.replace(
        "message['content'] +", "(message['content'] if message['role'] == 'user' else '') +"
    ),
    "it refuses a conversation of user and assistant in turn": (
        "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}" + CHATML
    ),
    "it changes earlier turns once others follow": "{{ messages | length }}" + CHATML,
    "the text that it puts after a turn depends on earlier turns": CHATML.replace(
        "message['role'] + '\n'", "message['role'] + (loop.index | string) + '\n'"
    ),
    "it ends a turn differently once others follow": CHATML.replace(
        "'<|im_end|>\n'", "('<|im_end|>!' if loop.last else '<|im_end|>\n')"
    ),
    "it does not end an assistant's turn with a token at which the engine": CHATML.replace(
        "<|im_end|>", "<|endoftext|>"
    ),
}


@pytest.mark.parametrize("fault", OTHER_TEMPLATES)
def test_a_template_that_cannot_carry_turns_is_refused_at_the_start(fault):
    tokenizer = chatml(OTHER_TEMPLATES[fault])
    with pytest.raises(UsageError) as caught:
        tokens_of(tokenizer, place="/model")
    says = f"--rl-hf-checkpoint /model has a chat template that cannot carry several turns: {fault}"
    assert str(caught.value).startswith(says)
    assert "pass --rl-no-chat-template and have the environment return texts" in str(caught.value)
    tokens_of(tokenizer, use_chat_template=False)


def test_ends_of_a_response_are_those_of_the_engine(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny, trust_remote_code=False, needs_template=True)
    assert response_ends(tiny, tokenizer) == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9, "vocab_size": 509}')
    assert response_ends(tmp_path, tokenizer) == (2, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert response_ends(tmp_path, tokenizer) == (2, 5, 6)
