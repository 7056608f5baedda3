"""Reading, checking, tokenising, caching and drawing prompts."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_cache import content_key
from mcore_rl.data.prompt_file import PromptSource, check_prompts
from mcore_rl.data.prompts import load_prompts, prompt_indices

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('bad role') }}"
    "{% endif %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, template: str | None) -> Path:
    """One token per byte, so that tests can count; and a start token that the templates lack."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<bos>", "<|system|>", "<|user|>", "<|assistant|>"])
    model.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", model.token_to_id("<bos>"))]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


@pytest.fixture(scope="module")
def plain_tokenizer_dir(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("plain_tokenizer"), None)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return AutoTokenizer.from_pretrained(tokenizer_dir)


def write_lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+4?"}]
ROWS = [
    {"prompt": "1+1=", "answer": "2", "level": 1},
    {"prompt": "1234567+1=", "answer": "1234568", "level": 2},
    {"prompt": "naïve 2+2=", "answer": "4", "level": 1},
]


@pytest.fixture
def load(tokenizer_dir, tmp_path):
    """`load(rows, limit, **options)`: the prompts of a JSONL file with these rows."""

    def load(rows: list = ROWS, limit: int = 100, folder: Path = tokenizer_dir, **options: Any):
        source = PromptSource(write_lines(tmp_path / "p.jsonl", rows), limit, **options)
        return load_prompts(source, folder, cache_dir=tmp_path)

    return load


# Reading and tokenising ---------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_load_prompts_applies_the_template_once_for_each_row(
    suffix, tokenizer_dir, tokenizer, tmp_path
):
    write = write_parquet if suffix == ".parquet" else write_lines
    source = PromptSource(write(tmp_path / f"p{suffix}", ROWS), max_prompt_tokens=100)
    prompts = load_prompts(source, tokenizer_dir, cache_dir=tmp_path)
    assert len(prompts) == 3 and prompts.num_too_long == 0
    for index, row in enumerate(ROWS):
        prompt = prompts[index]
        assert (prompt.index, prompt.text, prompt.answer) == (index, row["prompt"], row["answer"])
        assert prompt.token_ids.dtype == np.int32 and prompt.token_ids.flags.writeable
        assert tokenizer.decode(prompt.token_ids) == f"<|user|>{row['prompt']}<|assistant|>"
    assert list(prompts[0].token_ids[[0, -1]]) == tokenizer.convert_tokens_to_ids(
        ["<|user|>", "<|assistant|>"]
    )


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_load_prompts_takes_messages_and_other_columns(suffix, tokenizer_dir, tokenizer, tmp_path):
    write = write_parquet if suffix == ".parquet" else write_lines
    path = write(tmp_path / f"p{suffix}", [{"question": MESSAGES, "result": 7}])
    source = PromptSource(path, 100, prompt_column="question", answer_column="result")
    prompt = load_prompts(source, tokenizer_dir, cache_dir=tmp_path)[0]
    assert (prompt.text, prompt.answer) == ("Add.\n\n3+4?", "7")
    assert tokenizer.decode(prompt.token_ids) == "<|system|>Add.<|user|>3+4?<|assistant|>"


@pytest.mark.parametrize(("value", "text"), [("7 ", "7 "), (7, "7"), (7.5, "7.5"), ("", "")])
def test_load_prompts_makes_answers_strings(value, text, load):
    assert load([{"prompt": "x", "answer": value}])[0].answer == text


def test_load_prompts_gives_the_bare_text_and_start_token_without_template(
    plain_tokenizer_dir, tokenizer, load
):
    prompts = load(folder=plain_tokenizer_dir, use_chat_template=False)
    texts = [f"<bos>{row['prompt']}" for row in ROWS]
    assert [tokenizer.decode(p.token_ids) for p in prompts] == texts


def test_load_prompts_skips_blank_lines_and_a_byte_order_mark(tokenizer_dir, tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    path.write_text("\ufeff" + lines[0] + "\n\n" + lines[1] + "\n  \n" + lines[2])
    prompts = load_prompts(PromptSource(path, 100), tokenizer_dir, cache_dir=tmp_path)
    assert [(p.index, p.text) for p in prompts] == [(i, r["prompt"]) for i, r in enumerate(ROWS)]


def test_load_prompts_drops_and_counts_longer_prompts(load, caplog):
    """The limit is inclusive: the first prompt has 4 characters and 2 tokens of the template."""
    with caplog.at_level(logging.WARNING):
        prompts = load(ROWS + ROWS[:1], 6)
    assert [p.index for p in prompts] == [0, 3]
    assert prompts.num_too_long == 2
    assert [m for m in caplog.messages if "2 of 4 prompts are longer than 6 tokens" in m] != []
    assert len(caplog.messages) == 1
    with pytest.raises(UsageError, match="--rl-max-prompt-tokens 5 .* shortest .* has 6 tokens"):
        load(ROWS + ROWS[:1], 5)


def test_load_prompts_reads_files_of_several_batches(tokenizer_dir, tmp_path):
    rows = [{"prompt": f"{i}", "answer": i} for i in range(10_000)]
    source = PromptSource(write_parquet(tmp_path / "p.parquet", rows), 100)
    prompts = load_prompts(source, tokenizer_dir, cache_dir=tmp_path)
    assert [(p.index, p.text, p.answer) for p in prompts] == [
        (i, str(i), str(i)) for i in range(10_000)
    ]
    assert [len(prompts[i].token_ids) for i in (9, 5000, 9999)] == [3, 6, 6]


def test_load_prompts_asks_for_the_switch_when_there_is_no_template(plain_tokenizer_dir, load):
    with pytest.raises(UsageError, match="without a chat template; pass --rl-no-chat-template"):
        load(folder=plain_tokenizer_dir)


def test_load_prompts_names_the_row_refused_by_the_template(load, tmp_path):
    rows = [*ROWS, {"prompt": [{"role": "robot", "content": "beep"}], "answer": ""}]
    with pytest.raises(UsageError, match=r"p.jsonl, line 4: the chat template .*\(bad role\)"):
        load(rows)
    assert list((tmp_path / "prompts").glob("*.arrow")) == []
    assert list((tmp_path / "prompts").glob("*.tmp")) == []


@pytest.mark.parametrize("what", ["missing", "empty", "corrupt"])
def test_load_prompts_names_a_folder_without_a_tokenizer(what, load, tokenizer_dir, tmp_path):
    folder = tmp_path / "checkpoint"
    if what != "missing":
        folder.mkdir()
    if what == "corrupt":
        for file in tokenizer_dir.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UsageError, match=f"--rl-hf-checkpoint {folder} "):
        load(folder=folder)


# Checking -----------------------------------------------------------------------------------------

GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", None, "p.jsonl does not exist"),
        ("p.jsonl", "", "p.jsonl is empty"),
        ("p.jsonl", "\n \n", "p.jsonl holds no rows"),
        ("p.csv", "a,b", r"has the suffix '.csv', but .jsonl"),
        ("p", "a,b", r"has the suffix '', but .jsonl"),
        ("p.jsonl", GOOD + "\n\n{broken\n", r"p.jsonl, line 3: is not valid JSON \(Expecting"),
        pytest.param(
            "p.jsonl",
            GOOD + "\n" + "[" * 100_000,
            "line 2: is not valid JSON .*deeper than",
            id="nested_too_deep",
        ),
        ("p.jsonl", GOOD + "\n[1]\n", "p.jsonl, line 2: is not a JSON object"),
        ("p.json", "[\n" + GOOD + "\n]", "p.json, line 1: is not valid JSON"),
        ("p.jsonl", GOOD.encode() + b'\n{"prompt": "\xff"}', "line 2: is not valid JSON .*utf-8"),
        ("p.jsonl", r'{"prompt": "\uD800", "answer": ""}', "line 1: holds half a surrogate pair"),
        (
            "p.jsonl",
            GOOD + '\n{"question": "x", "answer": "y"}',
            "--rl-prompt-column 'prompt' .* --flag .* in line 2, which has 'question', 'answer'",
        ),
        ("p.jsonl", '{"prompt": "x"}', "--rl-answer-column 'answer' .* in line 1, .* 'prompt'"),
        ("p.jsonl", "{}", "which has no columns"),
        ("p.jsonl", '{"prompt": 3, "answer": 1}', r"'prompt' is of type int \(3\); write a string"),
        ("p.jsonl", '{"prompt": " ", "answer": 1}', "column 'prompt' is blank"),
        ("p.jsonl", '{"prompt": [], "answer": 1}', r"'prompt' is of type list \(\[\]\)"),
        ("p.jsonl", '{"prompt": [{"role": "user"}], "answer": 1}', "line 1: message 1 has no"),
        ("p.jsonl", '{"prompt": "x", "answer": null}', "column 'answer' is null"),
        ("p.jsonl", '{"prompt": "x", "answer": NaN}', "column 'answer' is nan"),
        ("p.jsonl", '{"prompt": "x", "answer": true}', r"'answer' is of type bool \(True\)"),
        (
            "p.jsonl",
            '{"prompt": "x", "answer.a": 1}',
            "'answer' names .* which has 'prompt', 'answer.a'",
        ),
        ("p.parquet", "not Parquet", "p.parquet cannot be read as Parquet"),
        (
            "p.parquet",
            [{"question": "x", "answer": "y"}],
            "lacks in its schema, which has 'question', 'answer'",
        ),
        (
            "p.parquet",
            [{"prompt": "x", "answer": "y"}, {"prompt": None, "answer": "y"}],
            "row 2: .* is null",
        ),
        ("p.parquet", [{"prompt": b"x", "answer": "y"}], "row 1: .* of type bytes"),
    ],
)
def test_check_prompts_names_place_and_remedy(name, content, message, tmp_path):
    path = tmp_path / name
    if isinstance(content, list):
        write_parquet(path, content)
    elif content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message) as caught:
        check_prompts(PromptSource(path, 100, flag="--flag"))
    text = str(caught.value)
    assert "--flag" in text and str(path) in text and ";" in text and "\n" not in text


def test_check_prompts_refuses_messages_without_template(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": MESSAGES, "answer": "7"}])
    assert check_prompts(PromptSource(path, 100)) == 1
    with pytest.raises(UsageError, match="leave out --rl-no-chat-template"):
        check_prompts(PromptSource(path, 100, use_chat_template=False))


def test_a_token_outside_the_models_vocabulary_is_refused(load, tokenizer_dir, tmp_path):
    folder = Path(shutil.copytree(tokenizer_dir, tmp_path / "other"))
    size = 259  # <|assistant|> is the last of 260 tokens
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    with pytest.raises(UsageError, match=f"token {size} in prompt 1 of --rl-prompts .*; copy the"):
        load(folder=folder)
    assert len(load(folder=folder, use_chat_template=False)) == 3
    # A prompt that is left out anyway costs nothing.
    size = 257  # <|system|>
    (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    long = {"prompt": "<|system|>" + "9" * 20, "answer": "1"}
    assert len(load([ROWS[0], long], 10, folder, use_chat_template=False)) == 1


# The cache ----------------------------------------------------------------------------------------

LOAD_IN_FOUR = """
import json, multiprocessing, psutil, sys
from pathlib import Path
from mcore_rl.data.prompts import load_prompts
from mcore_rl.data.prompt_file import PromptSource

context = multiprocessing.get_context("fork")  # safe without threads; spawn would import torch
barrier = context.Barrier(4)

def load(_):
    barrier.wait()
    prompts = load_prompts(PromptSource(Path(sys.argv[1]), 100), sys.argv[2], cache_dir=sys.argv[3])
    tokens = [p.token_ids.tolist() for p in prompts]
    return [len(psutil.Process().children()), prompts.fingerprint, tokens]

with context.Pool(4) as pool:
    print(json.dumps(pool.map(load, range(4), chunksize=1)))
"""


def load_in_four_processes(*arguments: Path) -> list:
    """For each process: how many it has started to tokenise, the fingerprint, the tokens."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD_IN_FOUR, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_load_prompts_tokenises_in_one_process_and_maps_in_others(tokenizer_dir, tmp_path):
    path = write_lines(tmp_path / "p.jsonl", ROWS)
    first = load_in_four_processes(path, tokenizer_dir, tmp_path / "cache")
    assert sorted(started for started, _, _ in first) == [0, 0, 0, 1]
    second = load_in_four_processes(path, tokenizer_dir, tmp_path / "cache")
    assert [started for started, _, _ in second] == [0] * 4
    here = load_prompts(PromptSource(path, 100), tokenizer_dir, cache_dir=tmp_path / "cache")
    expected = [here.fingerprint, [p.token_ids.tolist() for p in here]]
    assert [result[1:] for result in first + second] == [expected] * 8
    assert len(list((tmp_path / "cache/prompts").glob("*.arrow"))) == 1


def test_cache_follows_what_the_code_of_a_tokenizer_reads(tmp_path):
    """A vocabulary in a sub-folder, in whatever format, and a module of a package."""
    folder = save_tokenizer(tmp_path / "tokenizer", TEMPLATE)
    config = folder / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": [None, "code.Tokenizer"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": auto_map}))
    source = PromptSource(write_lines(tmp_path / "p.jsonl", ROWS), 100, trust_remote_code=True)
    keys = {content_key(source, folder)}
    for name in ("assets/words/vocab.txt", "impl/split.py", "vocab.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        for text in ("a b", "a c"):
            (folder / name).write_text(text)
            keys.add(content_key(source, folder))
    assert len(keys) == 7


def test_fingerprint_follows_everything_that_decides_the_tokens(tokenizer_dir, tmp_path):
    def load(path: Path, limit: int = 100, folder: Path = tokenizer_dir, **options):
        return load_prompts(PromptSource(path, limit, **options), folder, cache_dir=tmp_path)

    path = write_lines(tmp_path / "p.jsonl", ROWS)
    first = load(path)
    copy = write_lines(tmp_path / "copy.jsonl", ROWS)
    assert load(copy).fingerprint == first.fingerprint
    other_template = save_tokenizer(tmp_path / "other", TEMPLATE.replace("<|user|>", "User:"))
    (other_template / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    changed = [
        load(path, limit=12),
        load(path, use_chat_template=False),
        load(path, answer_column="level"),
        load(path, folder=other_template),
    ]
    write_lines(path, [{"prompt": "1+2=", "answer": "3"}])
    changed.append(load(path))
    assert changed[-1][0].text == "1+2="
    assert len({p.fingerprint for p in changed} | {first.fingerprint}) == 6
    # Prompts that are mapped already do not notice.
    assert first[2].text == ROWS[2]["prompt"]


def test_load_prompts_replaces_a_cut_off_cache_file(load, tmp_path):
    load()
    (cached,) = (tmp_path / "prompts").glob("*.arrow")
    whole = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(whole[: len(whole) // 2])
    assert load()[1].answer == "1234568"
    assert cached.read_bytes() == whole


def test_load_prompts_survives_a_cache_that_cannot_be_written(tokenizer_dir, tmp_path, caplog):
    source = PromptSource(write_lines(tmp_path / "p.jsonl", ROWS), 100)
    (tmp_path / "file").write_text("no folder can be made below a file")
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(source, tokenizer_dir, cache_dir=tmp_path / "file/cache")
    assert [p.text for p in prompts] == [row["prompt"] for row in ROWS]
    assert [("cannot be used" in m, "temporary" in m) for m in caplog.messages] == [(True, True)]


def test_load_prompts_uses_the_cache_folder_of_the_user(tokenizer_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_prompts(PromptSource(write_lines(tmp_path / "p.jsonl", ROWS), 100), tokenizer_dir)
    assert len(list((tmp_path / "xdg/mcore_rl/prompts").glob("*.arrow"))) == 1


# Drawing ------------------------------------------------------------------------------------------

SIZES = {
    "num_rows": st.integers(1, 200),
    "num_prompts": st.integers(1, 300),
    "seed": st.integers(0, 2**64 - 1),
}


@given(**SIZES, num_epochs=st.integers(1, 3))
def test_prompt_indices_visit_every_row_once_per_epoch(num_rows, num_prompts, seed, num_epochs):
    num_steps = -(-num_rows * num_epochs // num_prompts)
    drawn = np.concatenate(
        [
            prompt_indices(num_rows, start=step * num_prompts, count=num_prompts, seed=seed)
            for step in range(num_steps)
        ]
    )
    assert drawn.dtype == np.int64 and len(drawn) == num_steps * num_prompts
    for epoch in range(num_epochs):
        in_epoch = drawn[epoch * num_rows : (epoch + 1) * num_rows]
        assert sorted(in_epoch) == list(range(num_rows))


@settings(deadline=None)  # the machine may be busy
@given(**SIZES, start=st.integers(0, 10**8))
def test_prompt_indices_do_not_depend_on_how_steps_are_cut(num_rows, num_prompts, seed, start):
    whole = prompt_indices(num_rows, start=start, count=num_prompts, seed=seed)
    single = [
        prompt_indices(num_rows, start=draw, count=1, seed=seed)[0]
        for draw in range(start, start + num_prompts)
    ]
    assert whole.tolist() == single


def test_prompt_indices_differ_between_epochs_and_seeds():
    def draw(epoch: int, seed: int) -> list[int]:
        return prompt_indices(50, start=50 * epoch, count=50, seed=seed).tolist()

    assert len({tuple(draw(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_prompt_indices_are_stable_across_versions():
    """A run that is resumed after an upgrade continues where it was."""
    drawn = prompt_indices(10, start=8, count=8, seed=1234)
    assert drawn.tolist() == [8, 0, 9, 2, 0, 7, 6, 1]


VERL_ROW = {
    "data_source": "sums",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train", "scores": [0.5, None]},
}


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
@pytest.mark.parametrize("answer", ["2", ["2", "two"], {"value": "2", "unit": None}])
def test_nested_columns_reach_rewards(
    name: str, answer: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The layout of verl's files."""
    row = {**VERL_ROW, "reward_model": {"style": "rule", "ground_truth": answer}}
    if name.endswith("parquet"):
        raw = pa.array([[b"\xff"]])  # which no reward is given
        table = pa.Table.from_pylist([row]).append_column("raw", raw)
        pq.write_table(table, tmp_path / name)
    else:
        write_lines(tmp_path / name, [row])
    source = PromptSource(tmp_path / name, 100, answer_column="reward_model.ground_truth")
    (prompt,) = list(load_prompts(source, tokenizer_dir, cache_dir=tmp_path))
    assert (prompt.text, prompt.answer) == ("1+1=", answer)
    assert json.loads(prompt.row) == row
    with pytest.raises(UsageError, match="'reward_model.style', 'reward_model.ground_truth'"):
        check_prompts(PromptSource(tmp_path / name, 100, answer_column="reward_model.truth"))


def test_a_column_whose_name_has_a_dot_is_that_column(load) -> None:
    row = {"prompt": "1", "a.b": "flat", "a": {"b": "deep"}}
    assert load([row], answer_column="a.b")[0].answer == "flat"
