"""Adapters that PEFT has written: which are read, with which weights, and which are refused."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.peft_export import adapter_config, check_adapter, load_adapter
from mcore_rl.megatron.lora import Factor
from mcore_rl.model.boxes import full_box
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.lora import Lora, LoraOptions, factor_shapes, resolve_lora
from mcore_rl.model.peft_format import left_out_by_peft
from scripts.make_tiny_deepseek import hf_config

WEIGHTS = "adapter_model.safetensors"
EXPERTS = "experts.gate_proj,experts.up_proj,experts.down_proj"


def lora_of(arch: str, targets: str | None = None, alpha: float = 8.0) -> Lora:
    shape = model_shape(hf_config(arch), Path("config.json"))
    found = resolve_lora(LoraOptions(rank=4, alpha=alpha, targets=targets), shape)
    assert found is not None
    return found


def base_of(arch: str) -> Any:
    config = transformers.AutoConfig.for_model(**hf_config(arch))
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write(folder: Path, lora: Lora, **changed: Any) -> dict[str, torch.Tensor]:
    """Write an adapter of random values under the project's names, and return its tensors."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(shape, generator=generator) for name, shape in factor_shapes(lora).items()
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = adapter_config(lora, folder) | changed
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@dataclass
class Held:
    """A rank's adapter that holds all of a layer's factors."""

    a: Factor
    b: Factor

    def factors(self) -> tuple[Factor, Factor]:
        return self.a, self.b


def loaded(folder: Path, lora: Lora) -> dict[str, torch.Tensor]:
    """Return the factors of a folder, as a rank that has all of them loads them."""
    check_adapter(folder, lora)
    data = {name: torch.full(shape, float("nan")) for name, shape in factor_shapes(lora).items()}
    held = [Factor(name, full_box(each.shape), each, 1.0) for name, each in data.items()]
    adapters = dict(enumerate(map(Held, held[::2], held[1::2])))
    chunk: Any = SimpleNamespace(lora_adapters=SimpleNamespace(by_tensor=adapters))
    load_adapter([chunk], folder, lora)
    return data


def changes(data: dict[str, torch.Tensor], lora: Lora) -> dict[str, torch.Tensor]:
    """Return what the adapters add to each layer's weight."""
    layers = zip(list(data.values())[::2], list(data.values())[1::2], strict=True)
    return {layer: lora.scale * b @ a for layer, (a, b) in zip(lora.modules, layers, strict=True)}


@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("qwen3", None),
        ("nemotron_h", None),
        ("qwen3_moe", None),
        ("mixtral", None),
        ("deepseek_v3", EXPERTS),
        ("qwen3_moe", "experts.down_proj"),
        ("hy_v3", "q_proj,shared_mlp.up_proj"),
        ("minimax_m2", "q_proj,o_proj"),
    ],
)
def test_adapter_that_peft_writes_back_has_the_same_factors(
    tmp_path: Path, arch: str, targets: str | None
) -> None:
    lora = lora_of(arch, targets)
    ours = write(tmp_path / "ours", lora)
    PeftModel.from_pretrained(base_of(arch), str(tmp_path / "ours")).save_pretrained(
        str(tmp_path / "theirs")
    )
    again = loaded(tmp_path / "theirs", lora)
    for name, tensor in ours.items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        ("q_proj", {"target_modules": ["q_proj"], "use_rslora": True}),
        ("q_proj", {"target_modules": r".*\.q_proj", "init_lora_weights": "gaussian"}),
        (
            EXPERTS,
            {
                "target_modules": [],
                "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            },
        ),
    ],
)
def test_adapter_that_peft_has_trained_changes_weights_as_in_peft(
    tmp_path: Path, targets: str, options: dict[str, Any]
) -> None:
    lora = lora_of("qwen3_moe", targets)
    model = get_peft_model(base_of("qwen3_moe"), LoraConfig(r=4, lora_alpha=8, **options))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.normal_()
    model.save_pretrained(str(tmp_path))
    before, after = base_of("qwen3_moe").state_dict(), model.merge_and_unload().state_dict()
    found = changes(loaded(tmp_path, lora), lora)
    assert len(found) == len(lora.modules)
    for layer, change in found.items():
        container, _, last = layer.partition(".experts.")
        if last:
            expert, part = last.split(".")
            stack = "down_proj" if part == "down_proj" else "gate_up_proj"
            name = f"{container}.experts.{stack}"
            theirs = (after[name] - before[name])[int(expert)]
            rows = len(change)
            theirs = theirs[rows:] if part == "up_proj" else theirs[:rows]
        else:
            theirs = after[f"{layer}.weight"] - before[f"{layer}.weight"]
        torch.testing.assert_close(change, theirs, atol=1e-4, rtol=1e-5)  # a sum with the weight


def test_rslora_has_its_scale_under_the_alpha_of_the_adapter_and_under_its_multiple(
    tmp_path: Path,
) -> None:
    write(tmp_path / "stabilized", lora_of("qwen3", "q_proj"), use_rslora=True)
    scaled = []
    for alpha in (8.0, 16.0):  # 16 / 4 is 8 / sqrt(4)
        lora = lora_of("qwen3", "q_proj", alpha=alpha)
        scaled.append(changes(loaded(tmp_path / "stabilized", lora), lora))
    for layer, change in scaled[0].items():
        torch.testing.assert_close(change, scaled[1][layer])
    with pytest.raises(UsageError, match="lora_alpha 8, which --rl-lora-alpha 12 contradicts"):
        check_adapter(tmp_path / "stabilized", lora_of("qwen3", "q_proj", alpha=12.0))


@pytest.mark.parametrize(
    ("arch", "targets", "left_out"),
    [
        ("qwen3_moe", None, ""),
        ("deepseek_v3", "o_proj,experts.down_proj", ""),
        ("qwen2_moe", "q_proj", ""),
        ("qwen2_moe", None, "routed experts"),
        ("deepseek_v3", None, "other MLPs"),
        ("qwen3_moe", "q_proj,experts.gate_proj,experts.up_proj", "gate and up-projections"),
    ],
)
def test_adapters_that_peft_does_not_load_are_named(
    tmp_path: Path, arch: str, targets: str | None, left_out: str
) -> None:
    lora = lora_of(arch, targets)
    named = left_out_by_peft(lora, arch)
    assert named.startswith(left_out) and bool(named) == bool(left_out)
    ours = write(tmp_path / "ours", lora)
    model = PeftModel.from_pretrained(base_of(arch), str(tmp_path / "ours"))
    # What it loads adds up to the squares of all factors.
    held = [each for name, each in model.named_parameters() if ".lora_" in name]
    squares, expected = (
        sum(float(each.pow(2).sum()) for each in some) for some in (held, ours.values())
    )
    assert (squares == pytest.approx(expected, rel=1e-4)) == (not left_out)


def refusal(folder: Path, lora: Lora, **changed: Any) -> str:
    write(folder, lora, **changed)
    with pytest.raises(UsageError) as refused:
        check_adapter(folder, lora)
    assert refused.value.remedy and len(str(refused.value)) < 1000
    return str(refused.value)


def test_configuration_of_peft_is_read_and_every_option_of_it_is_refused(tmp_path: Path) -> None:
    """Except those that change neither the base nor the computation."""
    lora, options = lora_of("qwen3", "q_proj"), LoraConfig(r=4, lora_alpha=8).to_dict()
    write(tmp_path / "default", lora, **{**options, "peft_type": "LORA"})
    check_adapter(tmp_path / "default", lora)
    ignored = set(
        "auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
        "exclude_modules lora_dropout megatron_core target_parameters qalora_group_size".split()
    )
    for key in options.keys() - ignored - {"r", "lora_alpha"}:
        text = refusal(tmp_path / key, lora, **{key: "other"})
        assert f'has {key} "other", which' in text
    assert "has later_option 1, which is not supported" in refusal(
        tmp_path / "later", lora, later_option=1
    )


@pytest.mark.parametrize(
    "start", ["pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga"]
)
def test_start_at_which_peft_changes_the_base_is_refused_for_that(
    tmp_path: Path, start: str
) -> None:
    text = refusal(tmp_path / "a", lora_of("qwen3", "q_proj"), init_lora_weights=start)
    assert start in text and "changes the weights of the base" in text
    assert "merge_and_unload" in text and "--rl-hf-checkpoint" in text


def test_patterns_other_than_those_of_stacked_experts_are_refused(tmp_path: Path) -> None:
    lora, stacked = lora_of("qwen3", "q_proj"), r".*\.gate_up_proj"
    patterns = {"rank_pattern": {stacked: 8}, "alpha_pattern": {stacked: 16}}
    write(tmp_path / "peft", lora, **patterns)
    check_adapter(tmp_path / "peft", lora)
    for number, changed in enumerate(
        (
            {"rank_pattern": {"q_proj": 8}},
            {"rank_pattern": {stacked: 8}},
            {**patterns, "alpha_pattern": {stacked: 16, "q_proj": 1}},
            {**patterns, "rank_pattern": {stacked: "8"}},
            {**patterns, "alpha_pattern": {stacked: float("inf")}},
        )
    ):
        assert "rank_pattern" in refusal(tmp_path / str(number), lora, **changed)


def test_stacked_experts_that_share_factors_are_refused(tmp_path: Path) -> None:
    """As when PEFT has trained what it had converted."""
    lora = lora_of("qwen3_moe", EXPERTS)
    write(tmp_path / "ours", lora)
    model = PeftModel.from_pretrained(base_of("qwen3_moe"), str(tmp_path / "ours"))
    model.save_pretrained(str(tmp_path / "theirs"))
    tensors = load_file(tmp_path / "theirs" / WEIGHTS)
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_B.weight"
    tensors[name] += 0.1
    save_file(tensors, tmp_path / "theirs" / WEIGHTS)
    with pytest.raises(UsageError, match="share their factors: each has rank 8"):
        check_adapter(tmp_path / "theirs", lora)


@pytest.mark.parametrize("value", [True, 4.0, "4", "x" * 5000, None, float("nan")])
def test_rank_that_is_no_integer_is_refused(tmp_path: Path, value: Any) -> None:
    lora = lora_of("qwen3", "q_proj")
    assert "which --rl-lora-rank 4 contradicts" in refusal(tmp_path / "a", lora, r=value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(1, dtype=torch.int64), "of type I64"),
        (torch.ones(1, dtype=torch.bool), "of type BOOL"),
        (torch.ones(1).to(torch.float8_e4m3fn), "of type F8_E4M3"),
        (torch.tensor([float("nan")]), "NaN or infinite"),
        (torch.tensor([-float("inf")], dtype=torch.bfloat16), "NaN or infinite"),
        (torch.tensor([1e300], dtype=torch.float64), "NaN or infinite"),  # in float32
    ],
)
def test_factor_that_is_not_finite_floats_is_refused(
    tmp_path: Path, value: torch.Tensor, text: str
) -> None:
    lora = lora_of("qwen3", "q_proj")
    tensors = write(tmp_path / "a", lora)
    name = list(tensors)[-1]
    tensors[name] = value.expand(tensors[name].shape).contiguous()
    save_file(tensors, tmp_path / "a" / WEIGHTS)
    with pytest.raises(UsageError, match=text) as refused:
        check_adapter(tmp_path / "a", lora)
    assert name in str(refused.value)


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_pipe_in_place_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    lora = lora_of("qwen3", "q_proj")
    write(tmp_path / "a", lora)
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(UsageError, match="not a regular file"):
        check_adapter(tmp_path / "a", lora)


def test_configuration_of_any_length_gives_a_sentence(tmp_path: Path) -> None:
    text = refusal(tmp_path / "a", lora_of("qwen3", "q_proj"), r="x" * (5 << 20))
    assert "more than 1048576 bytes" in text
