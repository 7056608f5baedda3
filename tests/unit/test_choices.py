"""Flags that a start chooses by the plan of its job."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import MachineMemory
from mcore_rl.common.platform import WITHOUT_CUDA, Platform
from mcore_rl.job.choices import choose, with_chosen
from mcore_rl.job.facts import Refusals, Source
from mcore_rl.job.memory import planned_case
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import examine
from mcore_rl.observe.run_directory import RunConfig
from mcore_rl.planner.plan import plan_case
from mcore_rl.tools.plan.command_line import read_command_line, read_named_shape
from scripts.make_tiny_deepseek import ARCHS, hf_config
from tests.model_shapes import has_engine_on_cpu

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
GPUS = Platform(cuda=True, transformer_engine=(2, 20), fused_weight_gradients=False)
PACKED = "--rl-max-tokens-per-microbatch"
UTILIZATION = "--rl-rollout-gpu-memory-utilization"
SEQS = "--rl-rollout-max-num-seqs"
EIGHT_BILLION = dict(
    hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip


@functools.cache
def parser() -> Any:
    return make_parser()


def source_of(
    config: Path,
    *flags: str,
    world_size: int = 1,
    gpu_gb: float = 85.0,
    host_gb: float | None = None,
) -> Source:
    """A job on devices of a size, or on hosts of a size without devices."""
    on_host = host_gb is not None
    memory = MachineMemory(int((host_gb or 0) * 1e9), int((host_gb or 0) * 1e9), "the machine's")
    return Source(
        tokens=["--rl-ranks-per-node", str(min(8, world_size)), *flags],
        platform=WITHOUT_CUDA if on_host else GPUS,
        world_size=world_size,
        parser=parser(),
        device_bytes=None if on_host else lambda: int(gpu_gb * 1e9),
        host_memory=(lambda: memory) if on_host else None,
        read_shape=functools.partial(read_named_shape, str(config)),
        has_files=False,
        is_here=False,
    )


def chosen(source: Source) -> dict[str, str]:
    """Each chosen flag with its values."""
    found: dict[str, str] = {}
    for token in choose(source):
        if token.startswith("--"):
            name = token
            found[name] = ""
        else:
            found[name] = f"{found[name]} {token}".strip()
    return found


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("configs")

    def of(name: str) -> Path:
        if name != "qwen3-8b":
            return CONFIGS / f"{name}.json"
        values = json.loads((CONFIGS / "qwen3-0.6b.json").read_text()) | EIGHT_BILLION
        path = folder / f"{name}.json"
        path.write_text(json.dumps(values))
        return path

    return of


# ------------------------------------------------------------------------- without a layout


@pytest.mark.parametrize("widens", [False, True])
def test_without_devices_samples_are_packed_as_the_host_allows(
    widens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor without products of bfloat16 keeps weights in float32 as well."""
    monkeypatch.setattr("mcore_rl.job.choices.has_slow_products", lambda precision: widens)
    small = CONFIGS / "qwen3-0.6b.json"
    lengths = ("--rl-max-prompt-tokens", "64", "--rl-max-response-tokens", "64")
    large_host = chosen(source_of(small, *lengths, host_gb=64))
    assert large_host == {PACKED: "2048", SEQS: "128"}
    sizes = [int(chosen(source_of(small, *lengths, host_gb=size))[PACKED]) for size in (25, 23, 16)]
    assert sizes == ([1024, 128, 128] if widens else [2048, 1024, 128])


def test_engines_of_their_own_leave_trainers_what_they_do_not_need() -> None:
    small, lengths = CONFIGS / "qwen3-0.6b.json", ("--rl-max-response-tokens", "64")

    def of(num_engines: int, host_gb: float | None) -> dict[str, str]:
        ranks = ",".join(str(1 + rank) for rank in range(num_engines))
        flags = (*lengths, "--rl-rollout-ranks", ranks)
        return chosen(source_of(small, *flags, world_size=1 + num_engines, host_gb=host_gb))

    assert [of(number, 64)[PACKED] for number in (1, 2, 3)] == ["2048"] * 3
    assert [of(number, 26)[PACKED] for number in (1, 2, 3)] == ["2048", "2048", "576"]
    on_devices = of(2, None)
    assert (on_devices[PACKED], on_devices[UTILIZATION]) == ("16384", "0.9")


def test_no_more_than_the_samples_of_a_rank_are_packed() -> None:
    flags = ("--rl-max-prompt-tokens", "64", "--rl-max-response-tokens", "64")
    few = ("--rl-num-prompts-per-step", "2", "--rl-num-samples-per-prompt", "4")
    assert chosen(source_of(CONFIGS / "qwen3-0.6b.json", *flags, *few))[PACKED] == "1024"


def test_the_longest_sample_is_the_least_micro_batch() -> None:
    flags = ("--rl-max-response-tokens", "30000")
    found = chosen(source_of(CONFIGS / "qwen3-0.6b.json", *flags))
    assert found[PACKED] == str(512 + 30000)


@pytest.mark.parametrize(
    "flags",
    [
        ("--micro-batch-size", "2"),
        (PACKED, "0"),
        ("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01"),
    ],
)
def test_samples_are_padded_where_the_user_says_so_or_they_cannot_be_packed(
    flags: Sequence[str],
) -> None:
    found = chosen(source_of(CONFIGS / "qwen3-30b-a3b.json", *flags, host_gb=2000))
    assert PACKED not in found and SEQS in found


def test_given_values_stay(qwen3: Callable[[str], Path]) -> None:
    flags = (PACKED, "3000", UTILIZATION, "0.4", SEQS, "7")
    assert choose(source_of(qwen3("qwen3-0.6b"), *flags)) == ()


def test_help_and_refused_jobs_have_no_choice() -> None:
    small = CONFIGS / "qwen3-0.6b.json"
    assert choose(source_of(small, "--help")) == ()
    assert choose(source_of(small, "--no-such-flag")) == ()
    assert choose(source_of(small, "--tensor-model-parallel-size", "3", world_size=8)) == ()


def test_the_share_of_engines_is_what_training_leaves(qwen3: Callable[[str], Path]) -> None:
    """The plan fits with it, and not with more."""
    source = source_of(qwen3("qwen3-8b"), "--tensor-model-parallel-size", "2", world_size=8)
    found = chosen(source)
    share = float(found[UTILIZATION])
    assert 0.5 < share <= 0.9
    facts = examine(with_chosen(source, choose(source)), Refusals())
    assert facts.config is not None
    case = planned_case(facts.config, facts, int(85e9))
    assert case is not None and plan_case(case).fits
    engine = dataclasses.replace(case.engine, gpu_memory_utilization=share + 0.02)
    if share < 0.9:
        assert not plan_case(dataclasses.replace(case, engine=engine)).fits


def test_sequences_are_those_of_a_step_and_of_evaluations(tmp_path: Path) -> None:
    flags = ("--rl-num-prompts-per-step", "32", "--rl-num-samples-per-prompt", "16")
    small = CONFIGS / "qwen3-0.6b.json"
    assert chosen(source_of(small, *flags))[SEQS] == "512"
    assert chosen(source_of(small, *flags, world_size=8))[SEQS] == "64"
    evaluates = ("--rl-eval-prompts", "x.jsonl", "--rl-num-eval-prompts", "600")
    assert chosen(source_of(small, *flags, *evaluates))[SEQS] == "600"
    assert chosen(source_of(small, *flags, "--rl-num-prompts-per-step", "640"))[SEQS] == "1024"


# ------------------------------------------------------------------------------ the layout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "world_size", "layout", "savings"),
    [
        ("qwen3-30b-a3b", 8, "2 1 8", "recompute"),
        ("glm-4.5-air", 16, "2 1 8", "offload"),
        ("qwen3-8b", 1, "1 1 ", "offload"),
        ("qwen3-8b", 2, "2 1 ", "recompute"),
        ("qwen3-8b", 8, "2 1 ", ""),
    ],
)
def test_the_layout_fits_with_as_few_savings_as_possible(
    qwen3: Callable[[str], Path], model: str, world_size: int, layout: str, savings: str
) -> None:
    """The chosen flags pass the checks of a start, and the plan fits with them."""
    lengths = ("--rl-max-response-tokens", "2048", "--rl-num-prompts-per-step", "64")
    source = source_of(qwen3(model), "--rl-layout", "auto", *lengths, world_size=world_size)
    found = chosen(source)
    sizes = ("tensor", "pipeline", "expert")
    of_flags = [found.get(f"--{size}-model-parallel-size", "") for size in sizes]
    assert " ".join(of_flags) == layout
    assert ("--recompute-granularity" in found) == bool(savings)
    assert ("--optimizer-cpu-offload" in found) == (savings == "offload")
    assert ("--use-precision-aware-optimizer" in found) == (savings == "offload")
    facts = examine(with_chosen(source, choose(source)), Refusals())
    assert facts.config is not None and facts.config.trainer.layout == "given"
    case = planned_case(facts.config, facts, int(85e9))
    assert case is not None and plan_case(case).fits


@pytest.mark.slow
def test_the_layout_of_671_billion_parameters_fits() -> None:
    source = source_of(
        CONFIGS / "deepseek-v3.json",
        *("--rl-layout", "auto", "--rl-num-prompts-per-step", "256"),
        world_size=256,
    )
    found = chosen(source)
    assert int(found["--tensor-model-parallel-size"]) <= 8
    assert "--optimizer-cpu-offload" not in found
    facts = examine(with_chosen(source, choose(source)), Refusals())
    assert facts.config is not None
    case = planned_case(facts.config, facts, int(85e9))
    assert case is not None and plan_case(case).fits


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_layout_without_devices_is_accepted(arch: str, world_size: int, tmp_path: Path) -> None:
    """By all checks that need no weights, Megatron's own validation included."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(arch)))
    source = source_of(config, "--rl-layout", "auto", world_size=world_size, host_gb=64)
    source = dataclasses.replace(source, is_here=True, has_engine=has_engine_on_cpu(arch))
    flags = choose(source)
    assert "--tensor-model-parallel-size" in flags and PACKED in flags
    assert examine(with_chosen(source, flags), Refusals()).is_accepted


def test_devices_that_are_too_few_are_refused_with_a_number_that_does() -> None:
    model = CONFIGS / "qwen3-30b-a3b.json"
    with pytest.raises(UsageError, match=r"1 devices of 85.0 GB.*take (\d+) devices") as refused:
        choose(source_of(model, "--rl-layout", "auto"))
    enough = int(refused.value.remedy.split()[1])
    assert choose(source_of(model, "--rl-layout", "auto", world_size=enough))


def test_a_layout_is_either_chosen_or_given() -> None:
    flags = ("--rl-layout", "auto", "--tensor-model-parallel-size", "2")
    with pytest.raises(UsageError, match="--tensor-model-parallel-size 2 fixes a part") as refused:
        choose(source_of(CONFIGS / "qwen3-8b.json", *flags, world_size=8))
    assert refused.value.remedy == "drop one of the two"


def test_a_resume_does_not_choose_again(qwen3: Callable[[str], Path], tmp_path: Path) -> None:
    """With as many ranks, and unless it gives one of the flags."""
    flags = ("--rl-layout", "auto", "--rl-run-dir", str(tmp_path))
    kept = ("--tensor-model-parallel-size", "4", PACKED, "2048")
    about = {"ranks": 8, "chosen": " ".join(kept)}
    (tmp_path / "config.yaml").write_text(RunConfig(about=about).text())
    of = functools.partial(source_of, qwen3("qwen3-8b"), *flags)
    assert choose(of(world_size=8)) == kept
    assert choose(of(world_size=4)) != kept
    assert choose(of(PACKED, "4096", world_size=8)) != kept
    resumed = with_chosen(of(world_size=8), kept)
    facts = examine(resumed, Refusals())
    assert facts.config and facts.config.trainer.max_tokens_per_microbatch == 2048
    assert facts.actor and facts.actor.layout.tp_size == 4


def test_the_plan_names_what_a_start_chooses(qwen3: Callable[[str], Path]) -> None:
    flags = ["--rl-layout", "auto", "--rl-num-prompts-per-step", "64"]
    config = qwen3("qwen3-8b")
    tokens = ["--hf-config", str(config), "--world-size", "8", "--gpu-memory-gb", "85", *flags]
    request = read_command_line(tokens)
    expected = " ".join(choose(source_of(config, *flags, world_size=8)))
    assert any(note.endswith(expected) for note in request.notes)
    assert plan_case(request.case).fits
