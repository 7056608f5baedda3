"""Treatment of Megatron's flags, with its own parser and validation."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import check_megatron
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.config import RLConfig
from mcore_rl.flags import classes as flag_classes
from mcore_rl.flags import megatron_flags
from mcore_rl.flags.parsed_flags import expand_config, given_values, options_of
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.job import preflight
from mcore_rl.job.facts import Facts, Refusals, Source
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import examine
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.megatron import adapter as megatron_adapter
from tests.model_shapes import CONFIGS

ROOT = Path(__file__).parents[2]
# What a launch script of Megatron must give.
NECESSARY = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 "
    "--seq-length 64 --micro-batch-size 1 --train-iters 3 --lr 1e-6 --bf16 --num-experts 8 "
    "--transformer-impl local --position-embedding-type rope --vocab-size 256"
)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_adapter.make_parser(add_rl_args)


def notes(text: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    return flag_classes.notes(given_values(text.split(), parser), parser)


def test_every_flag_is_in_exactly_one_table(parser: argparse.ArgumentParser) -> None:
    ours = options_of(parser, "mcore_rl").keys()
    known = {action.dest for flag, action in options_of(parser).items() if flag not in ours}
    known.remove("help")
    times = Counter(dest for _, _, dests in flag_classes.tables() for dest in dests)
    assert known - times.keys() == set(), "in no table of megatron_flags"
    assert times.keys() - known == set(), "unknown to Megatron"
    assert {dest for dest, count in times.items() if count > 1} == set(), "in two tables"
    assert megatron_flags.REFUSED_VALUES.keys() <= known
    assert known >= megatron_flags.SET_BY_VALIDATION


@pytest.mark.slow
def test_false_switch_in_file_equals_inverse_switch(tmp_path: Path) -> None:
    """The same options change as with the inverse form of the switch, even if Megatron keeps the
    switch without effect beside the form that it reads (--ckpt-fully-parallel-save)."""
    parser = make_parser()
    file = tmp_path / "flags.yaml"

    def changed(key: str, value: bool) -> dict[str, Any]:
        file.write_text(f"{key}: {str(value).lower()}")
        given = given_values(expand_config(["--rl-config", str(file)], parser), parser)
        return {
            dest: value
            for dest, value in given.items()
            if dest not in megatron_flags.WITHOUT_EFFECT_DESTS
            and bool(value) != bool(parser.get_default(dest))
        }

    options = options_of(parser)
    for option, action in options.items():
        inverse = "--no-" + option[2:]
        if option.startswith("--") and action.nargs == 0 and inverse in options:
            key = option[2:]
            assert changed(key, False) == changed(f"no-{key}", True), option
            assert changed(key, True) == changed(f"no-{key}", False), option
    assert changed("ckpt_fully_parallel_save", False) == {"ckpt_fully_parallel_save": False}


def test_names_in_tables_are_unique() -> None:
    for table in (megatron_flags.HONOURED, megatron_flags.WITHOUT_EFFECT):
        names = " ".join(table.values()).split()
        assert len(names) == len(set(names))


def test_refused_flags_have_names_of_messages(parser: argparse.ArgumentParser) -> None:
    named = [
        *megatron_flags.REFUSED,
        *megatron_flags.REFUSED_OTHERWISE,
        *megatron_flags.REFUSED_BY_MEGATRON,
        *megatron_flags.REFUSED_VALUES,
    ]
    for dest in named:
        action = options_of(parser)[f"--{dest.replace('_', '-')}"]
        assert action.dest == dest
        # Else a run that does not give it would be refused.
        if dest in megatron_flags.REFUSED_VALUES:
            assert action.default not in megatron_flags.REFUSED_VALUES[dest][0]
        else:
            assert not action.default or dest in megatron_flags.OWN_RL


def test_flags_of_megatron_rl_loop_are_all_refused(parser: argparse.ArgumentParser) -> None:
    dests = {action.dest for action in options_of(parser, "rl").values()}
    assert dests == megatron_flags.OWN_RL | megatron_flags.SHARED_RL


def test_document_of_flags_is_current() -> None:
    version = check_megatron().version
    found = (ROOT / "docs" / "using" / "megatron_flags.md").read_text(encoding="utf-8")
    assert found == flag_classes.document(megatron_adapter.make_parser(), version), (
        "run python scripts/document_flags.py"
    )


def test_flags_without_effect_are_noted_in_one_line(parser: argparse.ArgumentParser) -> None:
    (line,) = notes(
        "--data-path a b --split 99,1,0 --eval-iters 3 --eval-interval 5 --log-interval 1 "
        "--mock-data --no-mmap-bin-files --tensor-model-parallel-size 2 --rl-num-steps 3",
        parser,
    )
    groups = line.removeprefix("without effect in RL: ").split("; ")
    assert [group.partition(" (")[0] for group in groups] == [
        "--data-path, --split, --mock-data, --no-mmap-bin-files",
        "--eval-iters, --eval-interval",
        "--log-interval",
    ]
    for group, instead in zip(groups, ("--rl-prompts", "--rl-eval-", "metrics.jsonl"), strict=True):
        assert instead in group


HOSTILE = {
    "tokenizer_type": "HuggingFaceTokenizer",
    "tokenizer_model": "no-such-organisation/no-such-model",
    "vocab_file": "/no/such/vocab.json",
    "merge_file": "/no/such/merges.txt",
    "data_path": "/no/such/data",
    "seq_length": "1000003",
    "max_position_embeddings": "7",
    "decoder_seq_length": "3",
    "split": "nonsense",
    "dataloader_type": "of-another-version",
}


def test_flags_without_effect_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them together, each with a value that Megatron would refuse."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    parser = make_parser()
    (tmp_path / "config.json").write_text((CONFIGS / "qwen3-0.6b.json").read_text())

    def resolved(tokens: list[str]) -> Facts:
        source = Source(
            tokens=["--rl-hf-checkpoint", str(tmp_path), *tokens],
            platform=WITHOUT_CUDA,
            world_size=1,
            parser=parser,
            has_files=False,
            is_here=False,
        )
        return examine(source, Refusals())

    alone = resolved([])
    everything: list[str] = []
    for action in dict.fromkeys(options_of(parser).values()):
        if action.dest not in megatron_flags.WITHOUT_EFFECT_DESTS or action.nargs == 0:
            continue
        kind = getattr(action.type, "convert", action.type)
        text = HOSTILE.get(action.dest) or ("/no" if kind in (None, str) else "1000003")
        everything += [action.option_strings[0], text]
    found = resolved(everything)
    assert found.actor is not None and alone.actor is not None
    assert found.actor.tokens == alone.actor.tokens
    assert found.values == alone.values
    (note,) = flag_classes.notes(found.given, parser)
    assert all(flag in note for flag in everything[::2])
    # What is left is what Megatron's own validation takes.
    check_megatron_accepts(found.actor.tokens or (), found.actor.shape, world_size=1)


def test_unknown_flag_of_megatron_is_noted(parser: argparse.ArgumentParser) -> None:
    other = megatron_adapter.make_parser()
    other.add_argument_group("new").add_argument("--of-tomorrow", type=int)
    add_rl_args(other)
    assert notes("--of-tomorrow 3 --rl-num-steps 3", other) == (
        "not known to mcore_rl, left to Megatron: --of-tomorrow",
    )
    assert notes("--lr 1e-6 --rl-num-steps 3", parser) == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--lr-decay-samples 9", "--lr-decay-samples counts samples; give the flag that ends in"),
        ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping puts stages on other ranks .*; drop it"),
        ("--tensor-parallel-num-weight-shards 4", "shards weights .* does not know; drop it"),
        ("--freeze-all-layers", "--freeze-all-layers leaves nothing to learn"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "type sinkhorn makes Megatron route differently",
        ),
        ("--moe-router-load-balancing-type none sinkhorn", "type sinkhorn makes Megatron route"),
        ("--optimizer sgd", "--optimizer sgd cannot be saved .*; give --optimizer adam"),
        ("--attention-backend local", "--attention-backend local is read only by .*; give"),
        ("--transformer-impl inference_optimized", "inference; give transformer_engine"),
        ("--spec mine", "--spec mine must be a module and a name in it; correct it"),
        ("--spec no.such spec", r"--spec no.such spec cannot be imported \(ModuleNotFound.*; corr"),
        ("--spec json spec", r"--spec json spec cannot be imported \(AttributeError.*; correct"),
        ("--seed 4000000001", "--seed 4000000001 must be at most 4000000000; lower it"),
        ("--exit-signal-handler-for-training", "without saving it; give --exit-signal-handler"),
    ],
)
def test_incompatible_flag_is_refused(
    text: str, says: str, parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(UsageError, match=says):
        preflight.check_switches(given_values(text.split(), parser))


@pytest.mark.parametrize("flag", ["--nccl-communicator-config-path", "--te-precision-config-file"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"cannot be read \(No such file or directory\); correct"),
        (b"a: [", r"is not valid YAML \(.*\); correct"),
        (b"\xff", r"is not valid YAML \(.*\); correct"),
        (b"", "must be a YAML file with 'key: value' lines; correct"),
        (b"- a", "must be a YAML file with 'key: value' lines; correct"),
    ],
)
def test_invalid_yaml_file_is_refused(
    flag: str, content: bytes | None, says: str, parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    file = tmp_path / "a.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=f"{flag} {file} {says}"):
        preflight.check_inputs(given_values([flag, str(file)], parser))
    file.write_bytes(b"dp: {cga_cluster_size: 2}")
    preflight.check_inputs(given_values([flag, str(file)], parser))


def test_function_as_spec_is_refused_before_megatron_0_19(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier releases do not make the configuration that the function takes."""
    from megatron.training import argument_utils

    given = given_values(["--spec", "os.path", "join"], parser)
    preflight.check_switches(given)
    monkeypatch.delattr(argument_utils, "gpt_config_from_args")
    with pytest.raises(UsageError, match="join is a function.*install megatron-core 0.19 or later"):
        preflight.check_switches(given)


def check_all(values: dict[str, Any]) -> None:
    """Flags by themselves and beside each other."""
    preflight.check_switches(values)
    preflight.check_together(values)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--lr -1", "--lr -1.0 must be at least 0$"),
        ("--lr nan", "--lr nan must be at least 0$"),
        ("--lr inf", "--lr inf must be at least 0$"),
        ("--min-lr -0.1", "--min-lr -0.1 must be at least 0$"),
        ("--lr 1e-6 --min-lr 1e-5", "--min-lr 1e-05 is greater than --lr 1e-06; lower the first"),
        ("--lr 1e-6 --lr-warmup-init 1e-5", "--lr-warmup-init 1e-05 is greater than --lr 1e-06"),
        ("--clip-grad -1", "--clip-grad -1.0 must be at least 0$"),
        ("--weight-decay nan", "--weight-decay nan must be at least 0$"),
        ("--adam-beta1 1", "--adam-beta1 1.0 must be at least 0 and less than 1$"),
        ("--adam-eps 0", "--adam-eps 0.0 must be greater than 0$"),
        ("--attention-dropout 1.5", "--attention-dropout 1.5 must be at least 0 and less than 1$"),
        ("--moe-aux-loss-coeff 0.1 -0.1", "--moe-aux-loss-coeff -0.1 must be at least 0$"),
        ("--optimizer-offload-fraction 2", "fraction 2.0 must be at least 0 and at most 1$"),
        ("--make-vocab-size-divisible-by 0", "divisible-by 0 must be greater than 0$"),
        ("--num-distributed-optimizer-instances 0", "instances 0 must be greater than 0$"),
        ("--mlp-chunks-for-training 0", "--mlp-chunks-for-training 0 must be greater than 0$"),
        ("--lr-warmup-iters 9 --lr-decay-iters 9", "is not less than --lr-decay-iters 9; lower"),
        ("--lr-warmup-iters 9 --train-iters 3", "is not less than the run's updates, 3; lower"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters; add it"),
    ],
)
def test_number_out_of_range_is_refused(
    text: str, says: str, parser: argparse.ArgumentParser
) -> None:
    """`$` marks the end of the fault; the remedy follows."""
    with pytest.raises(UsageError) as refused:
        check_all(given_values(text.split(), parser))
    error = refused.value
    assert says in f"{error.fault}$" or says in str(error)
    assert error.fault.startswith(f"{error.flag} ") and error.remedy


def test_numbers_at_bounds_are_accepted(parser: argparse.ArgumentParser) -> None:
    text = (
        "--lr 0 --min-lr 0 --clip-grad 0 --weight-decay 0 --adam-beta1 0 --hidden-dropout 0 "
        "--optimizer-offload-fraction 1 --lr-warmup-iters 2 --train-iters 3 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 1 --moe-aux-loss-coeff 0"
    )
    check_all(given_values(text.split(), parser))


def test_ranges_name_existing_flags(parser: argparse.ArgumentParser) -> None:
    for dest in " ".join(megatron_flags.RANGES.values()).split():
        assert options_of(parser)[f"--{dest.replace('_', '-')}"].dest == dest


def test_critic_lr_below_min_lr_is_refused() -> None:
    values = {"lr": 1e-5, "min_lr": 1e-6, "lr_warmup_init": 0.0}
    flag_classes.check_critic_rate(1e-6, values)
    flag_classes.check_critic_rate(None, values)
    says = "--rl-critic-lr 1e-07 is less than --min-lr 1e-06; lower the latter"
    with pytest.raises(UsageError, match=says):
        flag_classes.check_critic_rate(1e-7, values)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_critic_lr_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match=f"--rl-critic-lr {value} must be at least 0"):
        preflight.check_ranges(RLConfig.of(algorithm="ppo", critic_lr=value))


def parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """As a fork parses and validates."""
    from megatron.training.arguments import parse_args, validate_args

    monkeypatch.setattr(sys, "argv", ["fork", *f"{NECESSARY} {text}".split()])
    args = parse_args(add_rl_args)
    validate_args(args)
    return args


@pytest.mark.filterwarnings("ignore")
def test_fork_counts_values_other_than_defaults_as_given(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parsed("", monkeypatch)
    given = flag_classes.given_to_fork(args, parser)
    assert flag_classes.notes(given, parser) == ()
    flag_classes.check_no_megatron_rl_flag(given, parser)
    unsaid = dict.fromkeys(megatron_flags.SET_BY_VALIDATION)
    preflight.check_switches({**vars(args), **unsaid})

    args = parsed("--eval-iters 3 --grpo-group-size 4", monkeypatch)
    given = flag_classes.given_to_fork(args, parser)
    assert flag_classes.notes(given, parser) == (
        "without effect in RL: --eval-iters (evaluation is --rl-eval-prompts and "
        "--rl-eval-interval)",
    )
    with pytest.raises(UsageError, match="--grpo-group-size belongs to Megatron's own RL loop"):
        flag_classes.check_no_megatron_rl_flag(given, parser)
