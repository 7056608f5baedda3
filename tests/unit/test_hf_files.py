"""Reading of a Hugging Face folder: its index, its duplicate tensors and its other files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.job.reading import read_shape_of
from mcore_rl.megatron.hf_checkpoint import (
    HFCheckpoint,
    check_tensors,
    open_checkpoint,
    read_tensor,
)
from mcore_rl.megatron.hf_files import INDEX, check_copies, other_files, row_blocks
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.tensors import checkpoint_tensors
from mcore_rl.tools.doctor import job as doctor_job
from mcore_rl.tools.doctor.job import check_folder
from tests.bad_input_folder import DEEPSEEK, QWEN3

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLAG = "--rl-hf-checkpoint"
Tensors = dict[str, torch.Tensor]
TIED = QWEN3 | {"tie_word_embeddings": True}


def tensors_of(config: dict[str, Any]) -> Tensors:
    shape = model_shape(config, Path("config.json"))
    torch.manual_seed(0)
    return {
        name: torch.randn(spec.shape).to(getattr(torch, spec.dtype))
        for name, spec in checkpoint_tensors(shape)
    }


def write(folder: Path, config: dict[str, Any], *files: Tensors, index: bool = True) -> None:
    """Each of `files` as a shard; in the index, the first that holds a tensor counts."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"shard-{n}.safetensors" for n in range(len(files))]
    if not index:
        names = ["model.safetensors"]
    weight_map: dict[str, str] = {}
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name)
        weight_map = {tensor: name for tensor in tensors} | weight_map
    if index:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def read(folder: Path, config: dict[str, Any], num_parts: int = 3) -> HFCheckpoint:
    """Read a folder as the ranks of a start do, then as one process does, and the doctor."""
    shape = model_shape(config, folder / "config.json")
    checkpoint = open_checkpoint(folder, shape)
    check_tensors(checkpoint, shape, flag=FLAG)
    refusals = []
    for part in range(num_parts):
        try:
            check_copies(folder, checkpoint.repeated, part=part, num_parts=num_parts)
        except UsageError as error:
            refusals.append(str(error))
    if refusals:
        with pytest.raises(UsageError) as found:
            check_copies(folder, checkpoint.repeated)
        assert str(found.value) == refusals[0]  # each names the first value in its own rows
        assert len({each.partition("repeat it: ")[0] for each in refusals}) == 1
        raise found.value
    assert {finding.level for finding in check_folder(checkpoint, shape)} == {"green"}
    return checkpoint


@pytest.mark.parametrize("name", [HEAD, "model.lm_head.weight", "embed_out.weight"])
@pytest.mark.parametrize("index", [True, False])
def test_head_equal_to_tied_embeddings_is_read_once(tmp_path: Path, name: str, index: bool) -> None:
    tensors = tensors_of(TIED)
    write(tmp_path, TIED, tensors | {name: tensors[EMBEDDING].clone()}, index=index)
    found = read(tmp_path, TIED)
    assert found.tensors.keys() == found.everything.keys() == tensors.keys()


def refuse(folder: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read(folder, config)


@pytest.mark.parametrize("row", [0, 150, 299, None], ids=str)
def test_head_unlike_tied_embeddings_is_refused(tmp_path: Path, row: int | None) -> None:
    tensors = tensors_of(TIED)
    head = tensors[EMBEDDING].clone()
    if row is None:
        head = head.float()
    else:
        head[row, 31] += 1
    write(tmp_path, TIED, tensors | {HEAD: head})
    refuse(tmp_path, TIED, f"{FLAG} .*{HEAD}, which differs .*{EMBEDDING}.*tie_word_embeddings")


def test_tensor_in_two_shards_is_read_once_if_equal(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    write(tmp_path, QWEN3, tensors, norm | {HEAD: tensors[HEAD].clone()})
    assert read(tmp_path, QWEN3).files[HEAD] == "shard-0.safetensors"
    write(tmp_path, QWEN3, tensors, norm | {HEAD: tensors[HEAD] + 1})
    refuse(tmp_path, QWEN3, f"{HEAD} of shard-1.safetensors, .* of shard-0.*remove")


def test_single_file_beside_shards_must_be_equal(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    assert set(read(tmp_path, QWEN3).files.values()) == {"shard-0.safetensors"}
    save_file(tensors | {HEAD: tensors[HEAD] + 1}, tmp_path / "model.safetensors")
    refuse(tmp_path, QWEN3, f"{HEAD} of model.safetensors, which differs")
    save_file({HEAD: tensors[HEAD]}, tmp_path / "model.safetensors")
    refuse(tmp_path, QWEN3, f"has both model.safetensors and {INDEX}.*remove")


@pytest.mark.parametrize("index", [True, False])
def test_files_of_other_formats_are_not_read(tmp_path: Path, index: bool) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors, index=index)
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(1)}, tmp_path / "consolidated.safetensors"
    )
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "consolidated.00.pth").write_bytes(b"weights")
    found = read(tmp_path, QWEN3)
    assert found.tensors.keys() == tensors.keys()
    # Without an index vLLM's own loader would read that file as well.
    assert found.is_all_that_vllm_reads == index


@pytest.mark.parametrize("name", ["inv_freq", "cos_cached", "sin_cached"])
def test_position_tables_are_not_weights(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(QWEN3)
    table = {f"model.layers.0.self_attn.rotary_emb.{name}": torch.ones(4).double()}
    write(tmp_path, QWEN3, tensors | table)
    assert read(tmp_path, QWEN3).everything.keys() == tensors.keys()


@pytest.mark.parametrize(
    "prefix", ["", "model.model.", "language_model.model.", "_orig_mod.model."]
)
def test_tensors_of_other_prefix_are_refused_with_prefix(tmp_path: Path, prefix: str) -> None:
    tensors = {name.replace("model.", prefix): t for name, t in tensors_of(QWEN3).items()}
    write(tmp_path, QWEN3, tensors)
    says = f"has {prefix}embed_tokens.weight, which .* describes as {EMBEDDING}; rename"
    refuse(tmp_path, QWEN3, f"{FLAG} .* {says}")


# Prefixes of a multimodal folder's text model and of its head.
PREFIXES = {"model.language_model.": "lm_head.", "language_model.model.": "language_model.lm_head."}
TOWER = {
    "model.visual.blocks.0.weight": torch.ones(3, 5),
    "vision_tower.rotary_emb.inv_freq": torch.ones(4),
    "multi_modal_projector.positions": torch.arange(7),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("tied", [False, True])
def test_multimodal_folder_is_read_as_its_text_model(
    prefix: str, tied: bool, tmp_path: Path
) -> None:
    """A head beside tied embeddings is compared, and everything else is a tower's."""
    of_text = tensors_of(QWEN3 | {"tie_word_embeddings": tied})
    head = {HEAD: of_text[EMBEDDING].clone()} if tied else {}
    stored = {
        name.replace("model.", prefix).replace("lm_head.", PREFIXES[prefix]): tensor
        for name, tensor in (of_text | head).items()
    }
    config = {"model_type": "mistral3", "text_config": QWEN3, "tie_word_embeddings": tied}
    write(tmp_path, config, stored, TOWER)
    found = read(tmp_path, config)
    assert found.tensors.keys() == of_text.keys()
    assert found.others.keys() == TOWER.keys()
    assert found.stored_name(EMBEDDING) == f"{prefix}embed_tokens.weight"
    assert len(found.repeated) == len(head) and not found.is_all_that_vllm_reads
    _, others = check_folder(found, model_shape(config, Path("config.json")))
    assert "besides the text model (3 tensors) are not trained" in others.found
    for name, tensor in {**of_text, **TOWER}.items():
        assert torch.equal(read_tensor(found, name), tensor)


def test_tower_in_float8_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "mistral3", "text_config": QWEN3}
    stored = {
        name.replace("model.", "language_model.model.", 1): t
        for name, t in tensors_of(QWEN3).items()
    }
    tower = {"vision_tower.weight": torch.ones(3, 5).to(torch.float8_e4m3fn)}
    write(tmp_path, config, stored, tower)
    refuse(tmp_path, config, "vision_tower.weight in .* has dtype F8_E4M3; .*dequantise")


def test_tied_head_in_place_of_embedding_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(TIED)
    write(tmp_path, TIED, tensors | {HEAD: tensors.pop(EMBEDDING)})
    refuse(tmp_path, TIED, f"has {HEAD}, .* as {EMBEDDING}; rename")


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["dense", "moe"])
def test_layers_beyond_last_are_refused_unless_mtp(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = tensors_of(config)
    fewer = config | {"num_hidden_layers": 1}
    write(tmp_path, fewer, tensors)
    refuse(tmp_path, fewer, "has model.layers.1.input.*no place.*give the config.jso")
    write(tmp_path, fewer, tensors | {"model.layers.1.eh_proj.weight": torch.ones(32, 64)})
    assert all(name.startswith("model.layers.1.") for name in read(tmp_path, fewer).mtp)


def test_tensor_missing_from_index_is_read_if_in_model(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors | {"of.another": torch.ones(1)})
    index = json.loads((tmp_path / INDEX).read_text())
    del index["weight_map"][HEAD], index["weight_map"]["of.another"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert read(tmp_path, QWEN3).tensors.keys() == tensors.keys()


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["dense", "moe"])
def test_missing_misshapen_or_extra_tensor_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    tensors = tensors_of(config)
    for name in tensors:
        write(tmp_path, config, {n: t for n, t in tensors.items() if n != name})
        refuse(tmp_path, config, f"lacks {name},.*copy")
    last = list(tensors)[-1]
    write(tmp_path, config, tensors | {last: tensors[last][..., None]})
    refuse(tmp_path, config, f"has {last} of shape .*describes")
    layers = ("model.layers.x.weight", "model.layers", "model.layers." + "9" * 5000)
    for name in ("of.another", *layers):
        write(tmp_path, config, tensors | {name: torch.ones(1)})
        refuse(tmp_path, config, f"has {name[:200]} of shape .*no place.*remove")


def test_copies_in_trained_mtp_layers_must_equal_model(tmp_path: Path) -> None:
    tensors = tensors_of(DEEPSEEK)
    copy = "model.layers.2.embed_tokens.weight"
    shape = model_shape(DEEPSEEK, tmp_path / "config.json")
    for change in (0, 1):
        write(tmp_path, DEEPSEEK, tensors | {copy: tensors[EMBEDDING] + change})
        carried = open_checkpoint(tmp_path, shape)
        assert copy in carried.mtp and not carried.repeated  # carried as it is
        trained = carried.with_mtp_trained(shape, 1)
        if not change:
            check_copies(tmp_path, trained.repeated)
            continue
        value = tensors[EMBEDDING][0, 0]
        with pytest.raises(UsageError, match=f"{copy}, which differs from {EMBEDDING}") as refused:
            check_copies(tmp_path, trained.repeated)
        values = f"[0, 0] is {value + 1:.9g} in the copy and {value:.9g} in the other"
        assert values in str(refused.value)
        start = next(row_blocks(tensors[EMBEDDING].shape, 1, 2)).start
        with pytest.raises(UsageError, match=rf"\[{start}, 0\] is"):
            check_copies(tmp_path, trained.repeated, part=1, num_parts=2)


@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_doctor_refuses_values_that_load_refuses(tmp_path: Path, value: str) -> None:
    tensors = tensors_of(QWEN3)
    tensors[HEAD][299, 31] = float(value)
    write(tmp_path, QWEN3, tensors)
    refuse(tmp_path, QWEN3, rf"^{HEAD} .* holds {value} at \[299, 31\].*; copy")


def test_doctor_reports_complete_only_after_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = tensors_of(QWEN3)
    tensors |= {name: torch.zeros_like(tensors[name]) for name in (EMBEDDING, HEAD)}
    write(tmp_path, QWEN3, tensors)
    shape = model_shape(QWEN3, tmp_path / "config.json")
    checkpoint = open_checkpoint(tmp_path, shape)
    whole, zeros = check_folder(checkpoint, shape)
    assert (whole.level, zeros.level) == ("green", "yellow")
    assert "all complete" in whole.found and f"{EMBEDDING} and 1 other tensor" in zeros.found
    monkeypatch.setattr(doctor_job, "_READ_BYTES", checkpoint.stored_bytes // 4)
    part, *_ = check_folder(checkpoint, shape)
    assert "all complete" not in part.found and "one tensor in 4 was read" in part.found


def test_doctor_reads_values_of_other_models(tmp_path: Path) -> None:
    tensors = tensors_of(QWEN3)
    write(tmp_path, QWEN3, tensors | {HEAD: tensors[HEAD] / 0})
    critic = open_checkpoint(tmp_path, model_shape(QWEN3, tmp_path / "config.json"))
    with pytest.raises(UsageError, match=f"^{HEAD} .* nan or infinite"):
        list(check_folder(critic))


INDEXES = {
    "null": {"weight_map": {EMBEDDING: None}},
    "a number": {"weight_map": {EMBEDDING: 5}},
    "a list": {"weight_map": {EMBEDDING: ["a"]}},
    "a long name": {"weight_map": {EMBEDDING: "x" * 5000}},
    "a parent": {"weight_map": {EMBEDDING: "../model.safetensors"}},
    "an absolute name": {"weight_map": {EMBEDDING: "/etc/passwd"}},
    "a folder": {"weight_map": {EMBEDDING: "."}},
    "a NUL": {"weight_map": {EMBEDDING: "a\0b"}},
    "no names": {"weight_map": {}},
    "a list of names": {"weight_map": [EMBEDDING]},
    "a text": {"weight_map": "model.safetensors"},
    "nothing": {},
    "a list alone": [],
    "a number alone": 5,
}


@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES)
def test_invalid_index_is_refused(tmp_path: Path, content: object) -> None:
    write(tmp_path, QWEN3, {})
    (tmp_path / INDEX).write_text(json.dumps(content))
    refuse(tmp_path, QWEN3, f"{FLAG}: .*{INDEX} is not a safetensors index.*copy")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["model-00001-of-00002.safetensors"], f"{INDEX}, but model-0.*; copy {INDEX}, which"),
        (["a.safetensors", "b.safetensors"], f"{INDEX}, but a.safetensors; copy {INDEX}, which"),
        (["consolidated.safetensors", "adapter_model.safetensors"], f"{INDEX}; convert its weigh"),
        (["pytorch_model.bin"], f"{INDEX}; convert its weights"),
    ],
)
def test_shards_without_index_are_refused(tmp_path: Path, files: list[str], says: str):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for name in files:
        save_file(tensors_of(QWEN3), tmp_path / name)
    refuse(tmp_path, QWEN3, f"^{FLAG} {tmp_path} has neither .* nor {says}")


ENTRY = b'{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "length", "says"),
    [
        (b'{"a":' + ENTRY + b"}", 1 << 20, "invalid header length"),
        (b'{"a":' + ENTRY + b"}", (1 << 64) - 1, "header too large"),
        (b'{"a":' + ENTRY + b"}", 3, "invalid JSON"),
        (b"[" * 100_000, None, "invalid JSON"),
        (b"not JSON at all", None, "invalid JSON"),
        (b"\xff{}", None, "invalid UTF-8"),
        (b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", None, "its header has a twice"),
        (b'{"a":' + ENTRY + b',"\\u0061":' + ENTRY + b"}", None, "its header has a twice"),
        (b'{"a":' + ENTRY + b',"b":' + ENTRY + b"}", None, "invalid offset"),
    ],
)
def test_invalid_header_is_refused(
    tmp_path: Path, header: bytes, length: int | None, says: str
) -> None:
    file = tmp_path / "model.safetensors"
    size = len(header) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, QWEN3)
    sentence = str(caught.value)
    assert sentence.startswith(f"{FLAG}: {file} is corrupt or cut short (") and "\n" not in sentence
    assert sentence.endswith("; copy this file again")


def test_git_lfs_pointer_is_refused_as_pointer(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, tensors_of(QWEN3), index=False)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    refuse(tmp_path, QWEN3, "model.safetensors is corrupt.*git lfs pull")


@pytest.mark.parametrize("name", ["config.json", INDEX, "shard-0.safetensors", "."])
def test_unreadable_file_is_refused(of_user: Path, name: str) -> None:
    folder = of_user / "checkpoint"
    write(folder, QWEN3, tensors_of(QWEN3))
    (folder / name).chmod(0o000)
    says = "has no config.json that can be read; give" if name == "." else f"{name}.*; .*permiss"
    with pytest.raises(UsageError, match=f"^{FLAG}:? {folder}.*{says}"):
        open_checkpoint(folder, read_shape_of(str(folder), "--rl-hf-checkpoint"))


def test_other_files_are_all_but_weights(tmp_path: Path) -> None:
    kept = [
        *("config.json", "LICENSE", "tokenization_bytes.py", "bytes.model", "qwen.tiktoken"),
        *("vocab.bin", "additional_chat_templates/tools.jinja", "a/b/c.json"),
        *("README.pt.md", "unigram_model.bin", "model_vocab.bin", "onnx.py"),
    ]
    dropped = [
        *("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model-00001-of-2.bin"),
        *("adapter_config.json", "pytorch_model.bin.index.json", "model.gguf", ".gitattributes"),
        ".cache/x.json",
        *("model-2.safetensors.incomplete", "model.SAFETENSORS.aria2", f"{INDEX}.bak"),
        *("pytorch_model_fsdp.bin", "optimizer_0.bin", "model.onnx_data", "tf_model.h5.index.json"),
        *("openvino_model.bin", "ggml-model-q4_0.bin", "__pycache__/a.pyc", "a/__pycache__/b.pyc"),
        *("original/consolidated.00.pth", "original/tokenizer.model", "run/metrics.jsonl"),
    ]
    for name in (*kept, *dropped):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = other_files(tmp_path, apart_from=[tmp_path / "run"])
    assert sorted(found.files) == sorted(kept)
    assert found.left_out == ("original (a folder with weights of its own)",)


def test_only_links_of_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "5678").write_text("{}")
    (tmp_path / "secret").write_text("x")
    for name in ("config.json", "tokenizer.json"):
        (snapshot / name).symlink_to("../../blobs/5678")
    (snapshot / "notes.txt").symlink_to(tmp_path / "secret")
    (snapshot / "gone.txt").symlink_to("../../blobs/nothing")
    (snapshot / "round").symlink_to(".")
    (snapshot / "self").symlink_to("self")
    found = other_files(snapshot)
    assert found.files == ("config.json", "tokenizer.json")
    left_out = [text.split()[0] for text in found.left_out]
    assert left_out == ["gone.txt", "notes.txt", "round", "self"]


def test_links_to_one_other_folder_are_followed(tmp_path: Path) -> None:
    """A user's own tree of links to a model that lies elsewhere."""
    model, folder = tmp_path / "model", tmp_path / "mine"
    model.mkdir()
    folder.mkdir()
    (model / "templates").mkdir()
    (model / "templates" / "tools.jinja").write_text("")
    (model / "templates" / "back").symlink_to(".")
    for name in ("config.json", "bytes.model"):
        (model / name).write_text("{}")
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    found = other_files(folder)
    assert sorted(found.files) == ["bytes.model", "config.json", "templates/tools.jinja"]
    assert found.left_out == ("templates/back (a link to a folder that is copied)",)


def test_unlistable_folder_is_left_out(of_user: Path) -> None:
    (of_user / "closed").mkdir(mode=0o000)
    (of_user / "LICENSE").write_text("x")
    found = other_files(of_user)
    assert (found.files, found.left_out) == (("LICENSE",), ("closed (Permission denied)",))
