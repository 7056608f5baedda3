"""A fork that parses its arguments itself passes the checks of a command line, and its own flags
pass them where it does not."""

from __future__ import annotations

import argparse
import io
import pkgutil
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA, Platform
from mcore_rl.flags.parser import add_rl_args, with_rl_args
from mcore_rl.job.facts import Refusals, Source
from mcore_rl.job.inputs import check_data
from mcore_rl.job.resolver import examine, resolve
from mcore_rl.megatron.world import parsed_args
from mcore_rl.planner.settings import GB
from tests.untrusted import need_code_of_tokenizer


@pytest.fixture
def checkpoint(
    checkpoint_factory: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A copy of a dense checkpoint, which a test may change."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return Path(shutil.copytree(checkpoint_factory("qwen2"), tmp_path / "model"))


def tokens_of(checkpoint: Path, *more: str) -> list[str]:
    return [
        *("--rl-hf-checkpoint", str(checkpoint), "--rl-run-dir", "run", "--rl-cache-dir", "cache"),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl"), "--rl-reward", "arithmetic"),
        *("--rl-max-prompt-tokens", "24", "--rl-max-response-tokens", "8"),
        *more,
    ]


def parse(checkpoint: Path, *more: str) -> argparse.Namespace:
    """The arguments that a fork's Megatron parses from derived flags and unchecked ones."""
    derived = resolve(Source(tokens=tokens_of(checkpoint), platform=WITHOUT_CUDA)).tokens
    like = argparse.Namespace(rank=0, local_rank=0, async_save=False, async_strategy="mcore")
    return parsed_args([*derived, *more], add_rl_args, like, log=io.StringIO())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    {
        # Which ended in a KeyError at the first scoring.
        "--rl-reward model": "--rl-reward model names model, but --rl-reward-model is missing",
        "--rl-reward-model other": "--rl-reward-model other has no effect",
        "--rl-reward-tp-size 1": "--rl-reward-tp-size 1 has no effect",
        "--rl-reward model --rl-reward-model other": "other needs the command line",
        "--rl-config more.yaml": "--rl-config more.yaml needs the command line",
        "--rl-algorithm ppo --rl-num-samples-per-prompt 8 --rl-critic-tp-size 1": (
            "--rl-critic-tp-size 1 needs the command line"
        ),
        "--rl-rollout-ranks 0": "--rl-rollout-ranks 0 needs the command line",
        "--rl-rollout-servers http://a:1": "--rl-rollout-servers .* needs the command line",
        "--num-layers 3": "num_layers is 3, but config.json .* start by mcore_rl.initialize, which",
    }.items(),
)
def test_parsed_arguments_of_a_fork_are_checked(flags: str, says: str, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match=says):
        check_data(resolve(Source(args=parse(checkpoint, *flags.split()), platform=WITHOUT_CUDA)))


def test_parsed_arguments_are_checked_against_the_machine(checkpoint: Path) -> None:
    args = parse(checkpoint)
    without_engine = Platform(cuda=True, fused_weight_gradients=True)
    resolve(Source(args=args, platform=without_engine))
    args.apply_rope_fusion = True
    says = "apply_rope_fusion is True, but a machine without Transf.* --no-rope-fusion .*; pass"
    with pytest.raises(UsageError, match=says):
        resolve(Source(args=args, platform=without_engine))
    with pytest.raises(UsageError, match="--transformer-impl local lacks .* and here it can; drop"):
        resolve(Source(args=args, platform=Platform(cuda=True, transformer_engine=(2, 20))))


def test_parsed_arguments_may_trust_tokenizer_code(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "was_here"
    need_code_of_tokenizer(checkpoint, marker)
    with pytest.raises(UsageError, match="holds a tokenizer with code"):
        check_data(resolve(Source(args=parse(checkpoint), platform=WITHOUT_CUDA)))
    assert not marker.exists()
    args = parse(checkpoint, "--trust-remote-code")
    check_data(resolve(Source(args=args, platform=WITHOUT_CUDA)))
    assert marker.exists()


def test_parsed_arguments_are_checked_against_the_device_size(checkpoint: Path) -> None:
    args = parse(checkpoint)
    args.apply_rope_fusion = False
    has_cuda = Platform(cuda=True, fused_weight_gradients=True)
    resolve(Source(args=args, platform=has_cuda, device_bytes=lambda: 80 * GB))
    with pytest.raises(UsageError, match="^phase build does not fit a device of 100 kB: rank 0"):
        resolve(Source(args=args, platform=has_cuda, device_bytes=lambda: 100_000))


def test_a_start_says_that_engines_lack_the_own_all_reduce(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    tokens = tokens_of(checkpoint, "--tensor-model-parallel-size", "2")
    has_cuda = Platform(cuda=True, fused_weight_gradients=True)
    for platform, says in (has_cuda, True), (WITHOUT_CUDA, False):
        notes = resolve(Source(tokens=tokens, platform=platform, world_size=2)).notes
        assert any("own all-reduce" in note for note in notes) == says, notes


def test_flags_of_a_fork_are_named_as_on_a_command_line(checkpoint: Path) -> None:
    """By the names that a command line gives them, Megatron's and ours."""
    flags = resolve(
        Source(
            args=parse(checkpoint, "--lr", "3e-5", "--rl-kl-coef", "0.125"), platform=WITHOUT_CUDA
        )
    ).flags
    assert (flags["--lr"], flags["--rl-kl-coef"]) == ("3e-05", "0.125")
    typed = resolve(
        Source(tokens=tokens_of(checkpoint, "--lr", "3e-5"), platform=WITHOUT_CUDA)
    ).flags
    assert typed["--lr"] == "3e-05" and "--rl-kl-coef" not in typed


class Collected(Refusals):
    """Refusals that do not end the checks."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[UsageError] = []

    def refuse(self, error: UsageError) -> None:
        self.errors.append(error)


def test_independent_checks_run_after_a_refusal(checkpoint: Path) -> None:
    tokens = tokens_of(
        checkpoint,
        *("--rl-offload", "nothing", "--rl-reward", "model", "--lr", "1e-6"),
        *("--tensor-model-parallel-size", "3", "--min-lr", "1e-5"),
        *("--pipeline-model-parallel-size", "99"),
    )
    refusals = Collected()
    facts = examine(Source(tokens=tokens, platform=WITHOUT_CUDA, world_size=1), refusals)
    assert [error.flag for error in refusals.errors] == [
        "--rl-reward model",
        "--min-lr 1e-05",
        "--rl-offload nothing",
        "--tensor-model-parallel-size 3",
        "--pipeline-model-parallel-size 99",
    ]
    assert facts.actor is None and facts.rollout is None and facts.spec is None


def extra_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--notes", required=True)
    return parser


def test_extra_args_of_a_fork_are_known_to_every_parser(checkpoint: Path) -> None:
    tokens = tokens_of(checkpoint, "--notes", "folder", "--rl-algorithm", "ppo")
    with pytest.raises(UsageError, match="unknown flag --notes"):
        resolve(Source(tokens=tokens, platform=WITHOUT_CUDA))
    both: list[Any] = [extra_args, lambda parser: extra_args(add_rl_args(parser))]
    for of_fork in both:
        checked = resolve(
            Source(tokens=tokens, platform=WITHOUT_CUDA, extra_args=with_rl_args(of_fork))
        )
        critic = checked.critic
        assert critic is not None and critic.tokens is not None
        like = argparse.Namespace(rank=0, local_rank=0, async_save=False, async_strategy="mcore")
        args = parsed_args(critic.tokens, critic.extra_args, like, log=io.StringIO())
        assert args.notes == "folder" and args.rl_algorithm == "ppo"
    with pytest.raises(UsageError, match="Megatron refuses these flags .*required: --notes"):
        resolve(
            Source(
                tokens=tokens_of(checkpoint),
                platform=WITHOUT_CUDA,
                extra_args=with_rl_args(extra_args),
            )
        )


def test_no_module_shadows_a_package_function() -> None:
    """Python would put it in the function's place once it is imported."""
    import mcore_rl

    modules = {module.name for module in pkgutil.iter_modules(mcore_rl.__path__)}
    functions = {"prepare", "initialize", "run", "add_rl_args"}
    assert all(callable(getattr(mcore_rl, name)) for name in functions)
    assert not modules & functions
