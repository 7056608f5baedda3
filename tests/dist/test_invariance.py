"""GRPO's and PPO's updates do not depend on layout, division, recomputation, offload or class.

A covering set: every two values of two factors that can go together meet in some case, and each
case is compared with one process that has the whole model, samples padded one by one, nothing
recomputed, nothing offloaded. Further algorithms have a case or two each, which cover pairs, too.
What was compared is written to build/invariance.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.megatron.model_class import GPT, HYBRID
from tests.dist.checkpoints import tensors_of
from tests.dist.updates import TOLERANCE, Differences, Outcome, differences_of, learned
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

JOB = "tests.dist.invariance_jobs:learn"
TABLE = ROOT / "build" / "invariance.md"
NUM_PROMPTS, SAMPLES_PER_PROMPT, NUM_MINI_BATCHES = 8, 2, 2
SAMPLES_PER_MINI_BATCH = NUM_PROMPTS * SAMPLES_PER_PROMPT // NUM_MINI_BATCHES
MAX_PROCESSES = 8

# Adam's epsilon is large, so that the weights show the gradient and not its
# sign; and as in test_ppo the rates are so low that 4 updates do not blow up the rounding of the
# first.
COMMON_FLAGS = (
    *("--rl-precision", "fp32"),
    *("--rl-num-prompts-per-step", str(NUM_PROMPTS)),
    *("--rl-num-samples-per-prompt", str(SAMPLES_PER_PROMPT)),
    *("--rl-num-mini-batches", str(NUM_MINI_BATCHES)),
    *("--rl-max-prompt-tokens", "64"),
    *("--rl-max-response-tokens", "64"),
    *("--adam-eps", "1.0"),
    *("--lr", "0.1"),
)
ALGORITHMS = {
    # with experts that are given, drawn at random
    "grpo": "--rl-algorithm grpo --rl-clip-eps-upper 0.28 --rl-kl-coef 0.05 --rl-entropy-coef 0.01 "
    "--rl-routing-replay r3",
    "ppo": "--rl-algorithm ppo --rl-kl-reward-coef 0.05 --rl-kl-target 0.1 --rl-gae-lambda 0.9 "
    "--rl-gamma 0.99 --rl-value-clip-eps 0.5 --rl-critic-lr 0.06",
    # a ratio and a correction per sequence, and the mean over sequences; updates with the experts
    # of the scoring pass, which go to other ranks for the second epoch
    "gspo": "--rl-algorithm gspo --rl-kl-coef 0.05 --rl-mismatch-correction sequence_tis "
    "--rl-num-epochs 2 --rl-routing-replay r2",
    # the KL in a reward per sequence, compared within the group; centered scores, of which in the
    # second epoch some ranks have other ones
    "rloo": "--rl-algorithm rloo --rl-loss-aggregation seq_mean_token_mean --rl-num-epochs 2 "
    "--rl-policy-loss policy_gradient --rl-score-centering 8",
    # whitened over all tokens of the step; centered scores with weights of the current policy
    "reinforce_pp": "--rl-algorithm reinforce_pp --rl-mismatch-correction token_tis "
    "--rl-policy-loss policy_gradient --rl-score-centering 8",
}
# Pipeline stages, x model chunks of each; of the 4 layers, "3 + 1" gives the last stage one.
STAGES = {
    "1": (),
    "2": ("--pipeline-model-parallel-size", "2"),
    "2 x 2": (
        *("--pipeline-model-parallel-size", "2"),
        *("--num-virtual-stages-per-pipeline-rank", "2"),
    ),
    "3 + 1": (
        *("--pipeline-model-parallel-size", "2"),
        *("--decoder-last-pipeline-num-layers", "1"),
    ),
    "4": ("--pipeline-model-parallel-size", "4"),
}
PP_SIZES = {"1": 1, "2": 2, "2 x 2": 2, "3 + 1": 2, "4": 4}
# Packed samples share prompts (but under context parallelism), or are kept apart.
PACKED, APART = "packed", "apart"
ALL_TO_ALL, ALL_GATHER = "alltoall", "allgather"
RECOMPUTE = {
    "none": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}


@dataclass(frozen=True)
class Case:
    """One value of each factor."""

    algorithm: str
    tp_size: int
    stages: str
    cp_size: int
    ep_size: int
    etp_size: int
    dp_size: int
    division: str  # "packed", or padded rows of a micro-batch
    recompute: str
    offload: bool
    dispatcher: str = ALL_TO_ALL  # of tokens to experts
    model_class: str = GPT

    @property
    def num_processes(self) -> int:
        return PP_SIZES[self.stages] * self.processes_per_stage

    @property
    def processes_per_stage(self) -> int:
        return self.tp_size * self.cp_size * self.dp_size

    @property
    def experts_span_dp(self) -> bool:
        """Whether tokens for experts come from data-parallel ranks, which have different ones."""
        return self.ep_size * self.etp_size > self.tp_size * self.cp_size

    @property
    def has_uneven_rows(self) -> bool:
        """Whether data-parallel ranks have different numbers of tokens. Padded for context
        parallelism, the longest of 4 samples are alike on all ranks."""
        return self.division != "4" or self.cp_size == 1

    @property
    def is_packed(self) -> bool:
        return self.division in (PACKED, APART)

    @property
    def shares_prompts(self) -> bool:
        return self.division == PACKED and self.cp_size == 1

    @property
    def layout(self) -> str:
        stages = f"PP{self.stages}".replace("PP2 x 2", "PP2 VPP2").replace("PP3 + 1", "PP2 (3 + 1)")
        dense = f"TP{self.tp_size} CP{self.cp_size} {stages} DP{self.dp_size}"
        return f"{dense} EP{self.ep_size} ETP{self.etp_size}"

    @property
    def pairs(self) -> frozenset[tuple[tuple[str, Any], tuple[str, Any]]]:
        return frozenset(itertools.combinations(vars(self).items(), 2))

    def is_possible(self) -> bool:
        if self.num_processes > MAX_PROCESSES:
            return False
        if self.processes_per_stage % (self.ep_size * self.etp_size):
            return False
        if self.dispatcher == ALL_GATHER and not (self.experts_span_dp and self.has_uneven_rows):
            return False
        if self.is_packed:
            return True
        micro_batches, rest = divmod(SAMPLES_PER_MINI_BATCH, self.dp_size * int(self.division))
        # The interleaved schedule takes them by the number of stages.
        return rest == 0 and (self.stages != "2 x 2" or micro_batches % 2 == 0)

    def flags(self, checkpoint: Path) -> list[str]:
        if self.is_packed:
            division = ["--rl-max-tokens-per-microbatch", "128", "--micro-batch-size", "1"]
            division += ["--rl-share-prompts", "on" if self.shares_prompts else "off"]
        else:
            division = ["--micro-batch-size", self.division]
        return [
            *("--rl-hf-checkpoint", str(checkpoint)),
            *COMMON_FLAGS,
            *ALGORITHMS[self.algorithm].split(),
            *("--tensor-model-parallel-size", str(self.tp_size)),
            *STAGES[self.stages],
            *("--context-parallel-size", str(self.cp_size)),
            *("--expert-model-parallel-size", str(self.ep_size)),
            *("--expert-tensor-parallel-size", str(self.etp_size)),
            *("--moe-token-dispatcher-type", self.dispatcher),
            *division,
            *RECOMPUTE[self.recompute].split(),
            *("--rl-offload", "gradients,optimizer,parameters" if self.offload else "none"),
            *("--rl-model-class", self.model_class),
        ]


FACTORS: dict[str, tuple[Any, ...]] = {
    "algorithm": ("grpo", "ppo"),
    "tp_size": (1, 2),
    "stages": ("1", "2", "2 x 2", "4"),
    "cp_size": (1, 2),
    "ep_size": (1, 2, 4),
    "etp_size": (1, 2),
    "dp_size": (1, 2, 4),
    "division": (PACKED, "1", "2", "4"),
    "recompute": tuple(RECOMPUTE),
    "offload": (False, True),
    "dispatcher": (ALL_TO_ALL, ALL_GATHER),
    "model_class": (GPT, HYBRID),
}


def possible_cases() -> list[Case]:
    cases = [Case(*values) for values in itertools.product(*FACTORS.values())]
    return [case for case in cases if case.is_possible()]


def covering_cases(possible: list[Case], given: list[Case]) -> list[Case]:
    """Few of `possible` that have, with `given`, all its pairs: always the one with most that are
    missing yet for what it takes, which is a constant and something for each process. With this
    constant, of those tried, the fewest are needed."""
    pairs = {case: case.pairs for case in possible}
    missing = set().union(*pairs.values()) - set().union(*(case.pairs for case in given))
    chosen = []
    while missing:
        best = max(possible, key=lambda c: len(pairs[c] & missing) / (25 + c.num_processes))
        missing -= pairs[best]
        chosen.append(best)
    return chosen


FURTHER = [
    Case("grpo", 4, "1", 1, 4, 1, 1, "2", "selective", False),
    Case("grpo", 1, "3 + 1", 1, 2, 1, 2, PACKED, "full", True),
    Case("gspo", 2, "2", 1, 2, 1, 1, APART, "full", True),
    Case("gspo", 1, "2 x 2", 1, 2, 1, 2, "2", "none", False),
    Case("rloo", 1, "1", 1, 2, 1, 4, PACKED, "selective", True),
    Case("reinforce_pp", 2, "1", 1, 1, 2, 2, APART, "none", False),
    Case("gspo", 1, "2", 4, 2, 1, 1, PACKED, "selective", False),
]
CASES = [*covering_cases(possible_cases(), FURTHER), *FURTHER]


def name_of(case: Case) -> str:
    offload = "offload" if case.offload else "stay"
    dispatcher = f" {case.dispatcher}" if case.dispatcher == ALL_GATHER else ""
    name = f"{case.algorithm} {case.layout} {case.division} {case.recompute} {offload}{dispatcher}"
    return f"{name} {case.model_class}"


@dataclass
class Table:
    """The rows of build/invariance.md, in the order in which cases ran."""

    rows: list[str] = field(default_factory=list)

    def add(self, case: Case, differences: Differences) -> None:
        cells = (
            case.algorithm,
            str(case.num_processes),
            case.layout,
            "yes, prompts shared" if case.shares_prompts else "yes" if case.is_packed else "no",
            "128 tokens" if case.is_packed else f"{case.division} rows",
            case.recompute,
            "all" if case.offload else "none",
            case.dispatcher,
            case.model_class,
            *(f"{d:.1e}" for d in (differences.loss, differences.grad_norm, differences.weight)),
        )
        self.rows.append(f"| {' | '.join(cells)} |")

    def text(self) -> str:
        names = (
            *("algorithm", "processes", "layout", "packing", "micro-batch", "recompute"),
            *("offload", "dispatcher", "class", "loss", "gradient norm", "weights"),
        )
        return "\n".join(
            [
                "# What updates do not depend on",
                "",
                "Largest differences to one process with the whole model, samples padded one by",
                "one, nothing recomputed, nothing offloaded: after 2 steps of 2 updates each, in",
                "float32, of a DeepSeek-V3 of 4 layers as a GPTModel. Allowed is",
                f"{TOLERANCE:.0e}. For losses (the mean over tokens of each term, and all metrics)",
                "it is relative for values above 1, for gradient norms relative, for weights",
                "absolute. Of PPO actor and critic are compared.",
                "",
                f"| {' | '.join(names)} |",
                f"|{'---|' * len(names)}",
                *self.rows,
                "",
            ]
        )


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table()
    yield table
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table.text())
    print(table.text())


@pytest.fixture(scope="module")
def checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    # Megatron's norm of a tensor adds up squares in float32 one after the other: of the half
    # million elements of a projection with usual heads it is off by 3e-6, and by less for each part
    # of it.
    small_heads = {"qk_nope_head_dim": 16, "v_head_dim": 16}
    return checkpoint_factory("deepseek_v3", overrides={"num_hidden_layers": 4, **small_heads})


@pytest.fixture(scope="module")
def learn(
    checkpoint: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Outcome]:
    return lambda case: learned(
        ranks,
        case.flags(checkpoint),
        case.num_processes,
        tmp_path_factory.mktemp("learned"),
        job=JOB,
    )


@pytest.fixture(scope="module")
def reference_of(learn: Callable[[Case], Outcome]) -> Callable[[str], Outcome]:
    """An algorithm's reference, made when it is first asked for."""

    @functools.cache
    def reference_of(algorithm: str) -> Outcome:
        return learn(Case(algorithm, 1, "1", 1, 1, 1, 1, "1", "none", False))

    return reference_of


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_reference_learns(
    algorithm: str, reference_of: Callable[[str], Outcome], checkpoint: Path
) -> None:
    """Else every case would equal it."""
    outcome = reference_of(algorithm)
    before = tensors_of(checkpoint)
    moved = dict.fromkeys({name.partition("/")[0] for name in outcome.weights}, 0.0)
    assert moved.keys() == ({"actor", "critic"} if algorithm == "ppo" else {"actor"})
    for name, weight in outcome.weights.items():
        model, _, tensor = name.partition("/")
        if tensor in before:
            distance = float((weight - before[tensor].float()).abs().max())
            moved[model] = max(moved[model], distance)
    assert min(moved.values()) > 100 * TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_update_matches_single_process(
    case: Case,
    learn: Callable[[Case], Outcome],
    reference_of: Callable[[str], Outcome],
    table: Table,
) -> None:
    outcome = learn(case)
    differences = differences_of(outcome, reference_of(case.algorithm))
    table.add(case, differences)
    # The flags have had their effect.
    models = 2 if case.algorithm == "ppo" else 1
    assert outcome.found["forwards"] == [1.0 if case.recompute == "none" else 2.0] * models
    same, given = outcome.found.get("replayed", (1, 1))
    assert same == given > 0
    assert len(outcome.found["offloaded"]) == (3 if case.offload else 0)
    # With 4 ranks for 8 samples of a mini-batch there is little to be shared.
    assert case.shares_prompts or not outcome.found["sharing"]
    assert not case.shares_prompts or case.dp_size == 4 or outcome.found["sharing"] >= 4
    assert case.dispatcher != ALL_GATHER or outcome.found["uneven"] > 0
    differences.assert_small()


def test_cases_cover_every_pair_of_values_that_go_together() -> None:
    covered = set().union(*(case.pairs for case in CASES))
    for pair in itertools.combinations(FACTORS, 2):
        for values in itertools.product(*(FACTORS[name] for name in pair)):
            wanted = tuple(zip(pair, values, strict=True))
            assert wanted in covered or not any(wanted in c.pairs for c in possible_cases()), wanted
    assert len(CASES) <= 21
