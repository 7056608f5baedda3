"""What an export may take the place of, and what it leaves there; what tells two folders apart."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.job.preflight import check_outputs
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, fingerprint, load_into_megatron
from mcore_rl.megatron.hf_files import EXPORT_MARKER
from mcore_rl.model.tensors import TensorInfo
from tests.shards import Shards

WEIGHT = torch.arange(6.0).view(2, 3)


def whole_model() -> Any:
    return Shards.of({"model.embed_tokens.weight": WEIGHT})


def write_export(folder: Path, target: Path) -> None:
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text("{}")
    tensors = {"model.embed_tokens.weight": TensorInfo((2, 3), "float32", 4)}
    checkpoint = HFCheckpoint(source, {}, tensors)
    export(whole_model(), checkpoint, target)


@pytest.mark.parametrize("has_layer", [True, False])
def test_mtp_layers_are_exported_bit_for_bit_and_counted_where_there_are_any(
    alone: None, tmp_path: Path, has_layer: bool
) -> None:
    """The layer has its own copy of the embedding, which stays what it was."""
    source, target = tmp_path / "source", tmp_path / "exported"
    source.mkdir()
    (source / "config.json").write_text('{"num_nextn_predict_layers": 1}')
    layer = {
        "model.layers.2.embed_tokens.weight": torch.full((2, 3), 7.0),
        "model.layers.2.mlp.gate.e_score_correction_bias": torch.tensor([1e-7, -0.0]),
        "model.layers.2.eh_proj.weight": torch.randn(3, 6).to(torch.bfloat16),
    }
    save_file(layer, source / "layer.safetensors")
    infos = {
        name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.itemsize)
        for name, t in {**layer, "model.embed_tokens.weight": WEIGHT}.items()
    }
    checkpoint = HFCheckpoint(
        source,
        dict.fromkeys(layer, "layer.safetensors"),
        {"model.embed_tokens.weight": infos.pop("model.embed_tokens.weight")},
        infos if has_layer else {},
    )
    export(whole_model(), checkpoint, target, max_file_bytes=32)
    files = sorted(target.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert torch.equal(found.pop("model.embed_tokens.weight"), WEIGHT)
    assert found.keys() == (layer.keys() if has_layer else set())
    assert all(bits(tensor) == bits(layer[name]) for name, tensor in found.items())
    config = json.loads((target / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == int(has_layer)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {*found, "model.embed_tokens.weight"}
    assert len(set(index["weight_map"].values())) == len(files) > has_layer


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def check(target: Path, *, load: str | None = "saved", **changes: str) -> None:
    check_outputs(
        RLConfig.of(run_dir=str(target.parent / "run"), export_hf=str(target), **changes),  # type: ignore[arg-type]
        {"load": load},
    )


def test_export_permissions_follow_the_umask(alone: None, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_export(tmp_path, tmp_path / "exported")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "exported").iterdir()}
    assert len(modes) == 4 and set(modes.values()) == {0o640}, modes


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", "nan"), ("float32", "-inf")])
def test_a_weight_that_is_not_finite_is_named_as_it_is_read(
    tmp_path: Path, dtype: str, value: str
) -> None:
    weight = torch.zeros(4, 6, dtype=getattr(torch, dtype))
    weight[2, 5] = float(value)
    save_file({"model.norm.weight": weight}, tmp_path / "w.safetensors")
    tensors = {"model.norm.weight": TensorInfo((4, 6), dtype, weight.itemsize)}
    checkpoint = HFCheckpoint(tmp_path, dict.fromkeys(tensors, "w.safetensors"), tensors)
    above: Any = Shards({"model.norm.weight": [((0, 2), (0, 6))]})
    assert load_into_megatron(checkpoint, above) == 12 * weight.itemsize
    around: Any = Shards({"model.norm.weight": [((2, 4), (3, 6))]})
    with pytest.raises(
        UsageError,
        match=rf"^model.norm.weight in {tmp_path}/w.safetensors holds {value} at \[2, 5\], .*copy",
    ):
        load_into_megatron(checkpoint, around)
    assert around.values == {}


TOKENIZER = """
from transformers import PreTrainedTokenizer
class Letters(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "letters.model"}
    def __init__(self, vocab_file=None, **options):
        self.letters = open(vocab_file).read()
        super().__init__(**options)
    @property
    def vocab_size(self): return len(self.letters)
    def get_vocab(self): return {c: i for i, c in enumerate(self.letters)}
    def _tokenize(self, text, **options): return list(text)
    def _convert_token_to_id(self, token): return self.letters.index(token)
    def _convert_id_to_token(self, index): return self.letters[index]
"""


def test_a_tokenizer_of_code_is_loaded_from_an_export(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    source, target = tmp_path / "source", tmp_path / "exported"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (source / "tokenization_letters.py").write_text(TOKENIZER)
    (source / "letters.model").write_text("xabc")
    auto_map = {"AutoTokenizer": ["tokenization_letters.Letters", None]}
    tokenizer = {"tokenizer_class": "Letters", "auto_map": auto_map}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (source / "secret").symlink_to("/etc/hostname")
    (source / "run.sh").write_text("")
    (source / "run.sh").chmod(0o4500)
    (source / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (source / EXPORT_MARKER).write_text("of an earlier export")
    tensors = {"model.embed_tokens.weight": TensorInfo((2, 3), "float32", 4)}
    export(whole_model(), HFCheckpoint(source, {}, tensors), target)
    shutil.rmtree(source)
    loaded = AutoTokenizer.from_pretrained(target, trust_remote_code=True)
    assert loaded("cab")["input_ids"] == [3, 1, 2]
    assert (target / "additional_chat_templates" / "tools.jinja").is_file()
    assert not (target / "secret").exists() and "secret" in caplog.text
    usual = (target / "config.json").stat().st_mode & 0o7777
    assert (target / "run.sh").stat().st_mode & 0o7777 == usual | (usual & 0o444) >> 2
    assert json.loads((target / EXPORT_MARKER).read_text()) == {"exported_from": str(source)}


def test_resumed_run_replaces_an_export_only(alone: None, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    write_export(tmp_path, target)
    check(target)
    write_export(tmp_path, target)
    with pytest.raises(UsageError, match="exists and would be replaced"):
        check(target, load=None)
    (target / EXPORT_MARKER).unlink()
    assert (target / "config.json").is_file()
    with pytest.raises(UsageError, match="exists and would be replaced"):
        check(target)


@pytest.mark.parametrize("name", ["hf_checkpoint", "critic_init", "reward_model"])
def test_export_over_an_input_folder_is_refused(alone: None, tmp_path: Path, name: str) -> None:
    target = tmp_path / "exported"
    write_export(tmp_path, target)
    (tmp_path / "link").symlink_to(target)
    shutil.copytree(target, target / "inner")
    flag = f"--rl-{name.replace('_', '-')}"
    for source in (tmp_path / "link", target / "inner"):
        with pytest.raises(UsageError, match=f"{target} would replace {flag} {source}, .*; name"):
            check(target, **{name: str(source)})
    check(target, **{name: str(tmp_path / "source")})


def test_export_through_a_link_writes_its_target(alone: None, tmp_path: Path) -> None:
    link, place = tmp_path / "link", tmp_path / "other_disk" / "exported"
    link.symlink_to(place)
    for _ in range(2):  # where nothing is yet, and where an export is
        check(link)
        write_export(tmp_path, link)
        assert link.is_symlink() and not place.is_symlink()
        assert sorted(path.name for path in place.parent.iterdir()) == ["exported"]
        (file,) = place.glob("*.safetensors")
        assert torch.equal(load_file(file)["model.embed_tokens.weight"], WEIGHT)
    endless = tmp_path / "endless"
    endless.symlink_to(endless)
    with pytest.raises(UsageError, match="exists and would be replaced"):
        check(endless)


def test_a_mount_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    check(disk)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == disk)
    with pytest.raises(UsageError, match=f"{disk} is a mount point, .*; name a new folder in it"):
        check(disk)


def folder_of(folder: Path, *files: dict[str, torch.Tensor]) -> HFCheckpoint:
    folder.mkdir()
    place, tensors = {}, {}
    for number, content in enumerate(files):
        save_file(content, folder / f"{number}.safetensors")
        for name, tensor in content.items():
            place[name] = f"{number}.safetensors"
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors[name] = TensorInfo(tuple(tensor.shape), dtype, tensor.itemsize)
    return HFCheckpoint(folder, place, tensors)


def test_a_fingerprint_is_of_the_weights_and_not_of_their_files(
    alone: None, tmp_path: Path
) -> None:
    a, b = torch.arange(20_000.0).view(100, 200), torch.arange(6, dtype=torch.bfloat16)
    expected = fingerprint(folder_of(tmp_path / "one", {"a": a, "b": b}))
    assert fingerprint(folder_of(tmp_path / "two", {"b": b}, {"a": a.clone()})) == expected
    others = {
        "a small change of all weights": {"a": a * (1 + 1e-6), "b": b},
        "of a small tensor": {"a": a, "b": b + 1},
        "of the last weight": {"a": a.index_put((torch.tensor(99),), a[99] + 1), "b": b},
        "two tensors that change places": {"a": b, "b": a},
        "another shape": {"a": a.view(200, 100), "b": b},
        "another dtype": {"a": a, "b": b.view(torch.float16)},
        "a tensor more": {"a": a, "b": b, "c": b.clone()},
    }
    found = {
        name: fingerprint(folder_of(tmp_path / name, content)) for name, content in others.items()
    }
    assert len({expected, *found.values()}) == 1 + len(others), found
