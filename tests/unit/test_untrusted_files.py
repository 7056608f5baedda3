"""Downloaded files are read as data, and no call in the source runs what it reads."""

from __future__ import annotations

import argparse
import ast
import io
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import load_prompts
from mcore_rl.flags.parsed_flags import expand_config
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.megatron.hf_checkpoint import open_checkpoint
from mcore_rl.model.config_json import read_model_shape
from tests.untrusted import Command, need_code_of_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "was_here"


@pytest.fixture
def folder(tmp_path: Path, marker: Path) -> Path:
    """A tokenizer with its class in a file beside it."""
    folder = tmp_path / "model"
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "add": 1, "3": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    need_code_of_tokenizer(folder, marker)
    return folder


def without_code(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "evil.py").unlink()
    (folder / "evil.json").rename(folder / "tokenizer.json")


def source_of_prompts(folder: Path, **options: bool) -> PromptSource:
    path = folder.parent / "prompts.jsonl"
    path.write_text('{"prompt": "add 3", "answer": "3"}\n')
    return PromptSource(path, 100, use_chat_template=False, **options)


def test_code_of_a_tokenizer_is_not_run(folder, marker, tmp_path, monkeypatch):
    """Even with "y" on stdin, which transformers would take for consent."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\ny\n"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UsageError, match="tokenizer with code of its own.*--trust-remote-code"):
        load_prompts(source_of_prompts(folder), folder, cache_dir=tmp_path)
    assert not marker.exists()


@pytest.mark.slow
def test_code_of_a_tokenizer_is_run_with_trust_remote_code(folder, marker, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = source_of_prompts(folder, trust_remote_code=True)
    trusted = load_prompts(source, folder, cache_dir=tmp_path)
    assert len(trusted) == 1 and marker.exists()
    # The cache of trusted code is not used without trust, nor for other code.
    with pytest.raises(UsageError, match="tokenizer with code of its own"):
        load_prompts(source_of_prompts(folder), folder, cache_dir=tmp_path)
    marker.unlink()
    again = load_prompts(source, folder, cache_dir=tmp_path)
    assert again.fingerprint == trusted.fingerprint and not marker.exists()  # the cache
    with (folder / "evil.py").open("a") as file:
        file.write("# changed\n")
    changed = load_prompts(source, folder, cache_dir=tmp_path)
    # Run again, with the same result.
    assert changed.fingerprint == trusted.fingerprint and marker.exists()


def test_trust_in_a_folder_without_code_has_no_effect(folder, tmp_path):
    without_code(folder)
    found = {
        load_prompts(source_of_prompts(folder, **options), folder, cache_dir=tmp_path).fingerprint
        for options in ({}, {"trust_remote_code": True})
    }
    assert len(found) == 1


def test_pickled_weights_are_refused_unopened(tmp_path, marker, checkpoint_factory):
    folder = checkpoint_factory("deepseek_v3")
    copy = tmp_path / "model"
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    for name in ("pytorch_model.bin", "model.pt"):
        (copy / name).write_bytes(pickle.dumps(Command(marker)))
    shape = read_model_shape(copy)
    with pytest.raises(UsageError, match="has neither model.safetensors .* convert its weights"):
        open_checkpoint(copy, shape)
    index = {"weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="pytorch_model.bin is corrupt or cut short"):
        open_checkpoint(copy, shape)
    assert not marker.exists()


@pytest.mark.parametrize(
    "text",
    [
        "rl-run-name: !!python/object/apply:os.system ['touch {marker}']",
        "rl-run-name: !!python/object/new:builtins.exec [\"open('{marker}', 'w')\"]",
        "!!python/object/apply:os.mknod ['{marker}']",
    ],
)
def test_code_in_yaml_is_refused(tmp_path, marker, text):
    path = tmp_path / "flags.yaml"
    path.write_text(text.format(marker=marker))
    parser = add_rl_args(argparse.ArgumentParser())
    with pytest.raises(UsageError, match="--rl-config .*is not valid YAML: could not determine a"):
        expand_config(["--rl-config", str(path)], parser)
    assert not marker.exists()


class PickledType(pa.ExtensionType):
    """Libraries store Python objects in columns this way."""

    def __init__(self) -> None:
        super().__init__(pa.binary(), "a.pickled_type")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()


def test_pickles_in_a_parquet_column_are_not_run(folder, marker, tmp_path):
    without_code(folder)
    blob = pa.array([pickle.dumps(Command(marker))], pa.binary())
    columns = [{"pandas_type": "object", "numpy_type": "object"}]
    pandas = {"pandas": json.dumps({"columns": columns})}
    for number, column in enumerate((blob, pa.ExtensionArray.from_storage(PickledType(), blob))):
        table = pa.table({"prompt": ["add 3"], "answer": column}).replace_schema_metadata(pandas)
        path = tmp_path / f"{number}.parquet"
        pq.write_table(table, path)
        source = PromptSource(path, 100, use_chat_template=False)
        with pytest.raises(UsageError, match="answer"):
            load_prompts(source, folder, cache_dir=tmp_path)
    assert not marker.exists()


def test_transformers_runs_the_code_when_trusted(folder, marker, tmp_path, monkeypatch):
    """Control for the tests above."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    assert marker.exists()


# The source ---------------------------------------------------------------------------------------

ALLOWED = {
    ("mcore_rl/common/readers.py", "yaml.load"),  # a SafeLoader that refuses repeated keys
    ("mcore_rl/sandbox/inside.py", "exec"),  # the policy's code, in the sandbox
    ("mcore_rl/isolation/confine.py", "exec"),  # our own program in a confined process
    # Between ranks of one job, as torch's own exchange of objects.
    ("mcore_rl/common/objects.py", "pickle.loads"),
    ("mcore_rl/job/controllers.py", "pickle.load"),  # from the rank that starts it, by a pipe
    # Between a rank and the process that writes its checkpoints, by pipes.
    ("patches/megatron/background_saving.py", "pickle.load"),
    ("patches/megatron/shard_file.py", "pickle.load"),
}


PICKLERS = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def dangerous_calls(tree: ast.AST) -> Iterator[str]:
    """Calls that run what they read, or do not verify the other side."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        rest, _, last = name.rpartition(".")
        module = rest.rpartition(".")[2]
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg}
        if (
            name in ("eval", "exec", "os.system", "os.popen")
            or (module in PICKLERS and last in ("load", "loads", "Unpickler", "open"))
            or (module == "torch" and last == "load" and keywords.get("weights_only") != "True")
            or (module in ("np", "numpy") and keywords.get("allow_pickle", "False") != "False")
            or (module == "yaml" and last in ("load", "load_all", "full_load", "unsafe_load"))
        ):
            yield name
        for unsafe in ("shell=True", "verify=False", "trust_remote_code=True", "ssl=False"):
            keyword, _, value = unsafe.partition("=")
            if keywords.get(keyword) == value:
                yield f"{name}({unsafe})"


def test_source_has_only_the_allowed_dangerous_calls():
    files = [path for part in ("mcore_rl", "patches") for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 100
    found = {
        (str(path.relative_to(ROOT)), call)
        for path in files
        for call in dangerous_calls(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.load(file)",
        "pickle.loads(text)",
        "pickle.Unpickler(file)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "eval(text)",
        "exec(text)",
        "os.system(text)",
        "subprocess.run(text, shell=True)",
        "requests.get(url, verify=False)",
        "session.post(url, ssl=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_dangerous_call_is_found(text):
    assert len(list(dangerous_calls(ast.parse(f"def f():\n    return {text}\n")))) == 1


def test_safe_calls_are_not_found():
    text = "torch.load(p, weights_only=True); np.load(p); yaml.safe_load(t); model.eval(); load(p)"
    assert list(dangerous_calls(ast.parse(text))) == []
