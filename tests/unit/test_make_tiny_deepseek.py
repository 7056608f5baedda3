"""The tiny checkpoint can be read by others, and its task can be learned.

Oracle: `transformers` loading the directory, and the tensors on disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mcore_rl.common.errors import UsageError
from mcore_rl.data.tokenizer import register_families
from mcore_rl.model.families import family_of
from mcore_rl.rewards.functions import arithmetic
from scripts import make_tiny_deepseek
from scripts.made_once import MARKER
from scripts.make_tiny_deepseek import ARCHS, make_checkpoint, tiny_task
from tests.model_shapes import model_class

REPOSITORY = Path(__file__).parents[2]
TEXTS = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72",
    "  two  spaces,\ttabs\r\n and a line that ends in one ",
    "größer, 漢字, 😀👩‍👩‍👧, \u200b\ufeff, e\u0301",
    "".join(map(chr, range(1, 300))),
    "12345678901234567890 3.14 -7",
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One random micro checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {arch: make_checkpoint(folder / arch, arch=arch, size="micro") for arch in ARCHS}


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoints["deepseek_v3"])


def tensor_dtypes(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}


@pytest.mark.parametrize("arch", ARCHS)
def test_checkpoint_loads_completely_in_transformers(
    checkpoints: dict[str, Path], arch: str
) -> None:
    folder = checkpoints[arch]
    config = json.loads((folder / "config.json").read_text())
    found = model_class(config.pop("model_type"))  # by its class: transformers lacks Kimi-K2's type
    model, info = found.from_pretrained(
        folder, config=found.config_class(**config), output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    assert config["architectures"] == [type(model).__name__]
    logits = model(torch.tensor([[1, 4, 5], [1, 5, 4]])).logits.float()
    assert logits.isfinite().all()
    assert (logits[0, -1] - logits[1, -1]).abs().max() > 0.05


def test_experts_have_own_tensors_with_distinct_weights(checkpoints: dict[str, Path]) -> None:
    for arch, names in (
        *((arch, family_of(arch).names) for arch in ("deepseek_v3", "kimi_k2", "qwen3_moe")),
        ("deepseek_v2_large", family_of("deepseek_v2").names),
        ("mixtral", family_of("mixtral").names),
    ):
        tensors = load_file(checkpoints[arch] / "model.safetensors")
        experts = [
            tensors["model.layers.1." + names.expert.format(expert=expert) + kind].flatten()
            for expert in range(8)
            for kind in (names.gate, names.up, names.down)
        ]
        assert len({tuple(expert[:8].tolist()) for expert in experts}) == len(experts)
        norms = {n: t for n, t in tensors.items() if n.endswith("norm.weight")}
        assert len({tuple(norm[:8].tolist()) for norm in norms.values()}) == len(norms)


def test_weights_are_bfloat16_and_router_bias_is_float32(checkpoints: dict[str, Path]) -> None:
    dtypes = tensor_dtypes(checkpoints["deepseek_v3"])
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert biases == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert {dtypes[name] for name in biases} == {"F32"}
    assert {dtype for name, dtype in dtypes.items() if name not in biases} == {"BF16"}
    bias = load_file(checkpoints["deepseek_v3"] / "model.safetensors")[biases.pop()]
    assert (bias != 0).all()
    assert (bias != bias.bfloat16().float()).any(), "float32 in name only"


def test_config_has_keys_of_published_checkpoints(checkpoints: dict[str, Path]) -> None:
    config = json.loads((checkpoints["deepseek_v3"] / "config.json").read_text())
    assert config["kv_lora_rank"] + config["qk_rope_head_dim"] == 576, "vLLM on CPU takes only this"
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")
    assert config["torch_dtype"] == "bfloat16"
    assert config["num_nextn_predict_layers"] == 0
    configs = {a: json.loads((f / "config.json").read_text()) for a, f in checkpoints.items()}
    assert "num_experts" in configs["qwen3_moe"] and "num_local_experts" in configs["mixtral"]
    moonlight = configs["moonlight"]
    assert (moonlight["model_type"], moonlight["q_lora_rank"]) == ("deepseek_v3", None)
    assert configs["kimi_k2"]["rope_scaling"]["beta_fast"] == 1.0
    assert configs["llama"]["rope_scaling"]["rope_type"] == "llama3"


def test_mtp_layer_is_stored_but_not_in_model(tmp_path: Path) -> None:
    plain = load_file(make_checkpoint(tmp_path / "plain", size="micro") / "model.safetensors")
    folder = make_checkpoint(tmp_path / "mtp", size="micro", num_mtp_layers=1)
    tensors = load_file(folder / "model.safetensors")
    extra = {n.removeprefix("model.layers.2."): t for n, t in tensors.items() if n not in plain}
    assert all(torch.equal(tensors[name], plain[name]) for name in plain)
    decoder = {n.removeprefix("model.layers.1.") for n in plain if n.startswith("model.layers.1.")}
    assert extra.keys() == decoder | {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "embed_tokens.weight",
        "shared_head.norm.weight", "shared_head.head.weight",
    }  # fmt: skip
    assert extra["eh_proj.weight"].shape == (64, 128)
    assert torch.equal(extra["shared_head.head.weight"], plain["lm_head.weight"])
    assert extra["mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(model.model.layers) == 2


def test_tokenizer_of_family_missing_in_transformers_is_loaded(
    checkpoints: dict[str, Path],
) -> None:
    register_families()
    assert len(AutoTokenizer.from_pretrained(checkpoints["kimi_k2"])) == tiny_task.VOCAB_SIZE


def test_tied_checkpoint_stores_no_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", arch="qwen3", size="micro", tie_word_embeddings=True)
    assert "lm_head.weight" not in tensor_dtypes(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("arch", "overrides"),
    [
        ("deepseek_v3", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
        ("deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
        ("deepseek_v3", {"q_lora_rank": None, "num_hidden_layers": 3}),
        ("qwen2", {"num_key_value_heads": 1}),
    ],
)
def test_overrides_reach_model(tmp_path: Path, arch: str, overrides: dict[str, object]) -> None:
    folder = make_checkpoint(tmp_path / "c", arch=arch, size="micro", overrides=overrides)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {name: getattr(model.config, name) for name in overrides} == overrides
    assert model(torch.tensor([[1, 4, 5]])).logits.isfinite().all()


def test_dtype_float32_is_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", arch="qwen3", size="micro", dtype=torch.float32)
    assert set(tensor_dtypes(folder).values()) == {"F32"}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.float32


def test_tokenizer_restores_any_text(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == tiny_task.VOCAB_SIZE == 509
    for text in TEXTS:
        token_ids = tokenizer.encode(text)
        assert max(token_ids) < tiny_task.VOCAB_SIZE
        assert tokenizer.decode(token_ids) == text
    assert len(tokenizer.encode("1234567890")) == 10, "digits are split one by one"


def test_chat_template_separates_roles_and_opens_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "47+38"},
        {"role": "assistant", "content": "15 85"},
        {"role": "user", "content": "1+1"},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><|system|>Add.<|user|>47+38<|assistant|>15 85<eos><|user|>1+1<|assistant|>"
    )
    token_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert token_ids == tokenizer.encode(text, add_special_tokens=True), "no second <bos>"
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<bos>", "<eos>"]


def test_prompts_are_disjoint_and_answers_correct(checkpoints: dict[str, Path]) -> None:
    rows = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name in ("train", "heldout")
        for path in [checkpoints["qwen3"] / "prompts" / f"{name}.jsonl"]
    }
    prompts = {name: {row["prompt"] for row in rows[name]} for name in rows}
    assert not prompts["train"] & prompts["heldout"]
    assert len(prompts["heldout"]) == len(rows["heldout"]) >= 128
    assert len(prompts["train"]) == len(rows["train"]) >= 1000
    for row in rows["train"] + rows["heldout"]:
        assert row.keys() == {"prompt", "answer"}
        assert sum(map(int, row["prompt"].split("+"))) == int(row["answer"])


def test_careless_answer_is_rewarded_only_without_carries() -> None:
    for problem in sum(tiny_task.split_problems(seed=0), []):
        reward = {
            response: arithmetic(prompt=problem.prompt, response=response, answer=problem.answer)
            for response in (problem.worked_answer, problem.careless_answer)
        }
        assert reward[problem.worked_answer] == 1
        assert reward[problem.careless_answer] == (0 if problem.carries else 1)


def test_tensors_follow_seed(tmp_path: Path) -> None:
    first, second, third = (
        load_file(make_checkpoint(tmp_path / name, size="micro", seed=seed) / "model.safetensors")
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert first.keys() == second.keys() == third.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], third[name]) for name in first)


def test_finished_checkpoint_is_reused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "c", size="micro")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    assert make_checkpoint(tmp_path / "c", size="micro") == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert capsys.readouterr().out == f"Reusing the checkpoint in {folder}.\n"


@pytest.mark.parametrize("change", ["options", "code"])
def test_checkpoint_of_other_options_or_code_is_rebuilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    folder = make_checkpoint(tmp_path / "c", arch="qwen3", size="micro")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    if change == "code":
        monkeypatch.setattr(make_tiny_deepseek, "_code_hash", lambda: "of an edited script")
    seed = 9 if change == "options" else make_tiny_deepseek.DEFAULT_SEED
    make_checkpoint(folder, arch="qwen3", size="micro", seed=seed)
    assert (folder / "model.safetensors").stat().st_mtime_ns != before


@pytest.mark.slow
def test_interrupted_build_is_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script leaves no directory of the final name if it is killed while it writes."""
    script = (
        "import os, sys; from scripts import make_tiny_deepseek as make\n"
        "def die(*_): os.kill(os.getpid(), 9)\n"
        "make._set_buffers = die\n"
        "make.make_checkpoint(sys.argv[1], size='micro')\n"
    )
    out = tmp_path / "c"
    killed = subprocess.run([sys.executable, "-c", script, str(out)], cwd=REPOSITORY)
    assert killed.returncode == -9
    assert not out.exists()
    assert (tmp_path / ".c.partial").is_dir(), "the interruption came too early to mean anything"
    make_checkpoint(out, size="micro")
    assert (out / MARKER).is_file()
    assert not (tmp_path / ".c.partial").exists()


def test_foreign_directory_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="name another directory"):
        make_checkpoint(tmp_path, size="micro")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_invalid_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--arch gpt2"):
        make_checkpoint(tmp_path / "c", arch="gpt2")
    with pytest.raises(UsageError, match="--num-mtp-layers 1"):
        make_checkpoint(tmp_path / "c", arch="qwen3", num_mtp_layers=1)
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_warm_up_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_task, "WARM_UP_STEPS", 3)
    monkeypatch.setattr(tiny_task, "report_accuracy", lambda *_: None)  # takes most of the time
    first, second = (
        load_file(make_checkpoint(tmp_path / n, size="micro", warm_up=True) / "model.safetensors")
        for n in "ab"
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_warm_up_prints_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter(range(0, 100, 2))  # a step takes two
    monkeypatch.setattr(tiny_task.time, "monotonic", lambda: next(seconds))
    assert list(tiny_task.progress(8)) == list(range(8))
    assert capsys.readouterr().out.splitlines() == [
        "warm-up step 0 of 8",
        "warm-up step 2 of 8 · 18 s left",  # six steps of three seconds
        "warm-up step 5 of 8 · 7 s left",
    ]


@pytest.mark.parametrize("shape", [(8, 16), (16, 8)])
def test_muon_step_has_equal_length_in_every_direction(shape: tuple[int, int]) -> None:
    gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    stack = torch.nn.Parameter(torch.zeros(3, *shape))
    stack.grad = gradients.clone()
    tiny_task.muon_step(stack, torch.zeros_like(stack), rate=1.0)
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    moved = torch.linalg.svdvals(stack.detach()) / scale
    assert moved.min() > 0.5 and moved.max() < 1.3  # of a gradient they differ more
    assert torch.all((stack.detach() * gradients).sum((1, 2)) < 0)
    alone = torch.nn.Parameter(torch.zeros(shape))
    alone.grad = gradients[1].clone()
    tiny_task.muon_step(alone, torch.zeros_like(alone), rate=1.0)
    torch.testing.assert_close(alone, stack[1])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_warm_up_reaches_accuracy_of_20_to_50_percent(warmed_checkpoint: Path) -> None:
    folder = warmed_checkpoint
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    recipe = json.loads((folder / MARKER).read_text())
    assert recipe["warm_up"]
    _, heldout = tiny_task.split_problems(recipe["seed"])
    sampled = tiny_task.sample_accuracy(model, tokenizer, heldout * 4, greedy=False)
    greedy = tiny_task.sample_accuracy(model, tokenizer, heldout, greedy=True)
    assert 0.2 <= sampled <= 0.5
    assert 0.2 <= greedy <= 0.5
