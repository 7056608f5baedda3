"""The `--rl-*` flags, next to Megatron's own arguments.

Each package declares its options, one field per flag, in its `options` module: name, type, default,
bounds and help. `RLConfig` holds these sections. Precedence: the command line, then `--rl-config`
(the later file first), then derived values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mcore_rl.batching.shared_prompts import shares_prompts
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import (
    Parameter,
    Parameters,
    by_flag,
    degree,
    param,
    parameters_of,
    with_values,
)
from mcore_rl.data.group_sizes import differ, samples_of_step
from mcore_rl.data.options import DataOptions, SupervisedOptions
from mcore_rl.data.sources import NO_TEACHER, PROMPTS, SourceSpec, is_yaml
from mcore_rl.environments.options import EnvironmentOptions
from mcore_rl.hybrid_engine.options import EngineOptions, WeightSyncOptions
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.lora import LoraOptions
from mcore_rl.model.quantization import FP8
from mcore_rl.model.teacher import TeacherOptions, TeacherPlace
from mcore_rl.observe.options import AlarmOptions, RunOptions
from mcore_rl.rewards.options import RewardOptions
from mcore_rl.rewards.specs import names_of
from mcore_rl.rollout.options import EvaluationOptions, RolloutOptions

if TYPE_CHECKING:  # torch, which flags do not need
    from mcore_rl.algorithms.recipes import Algorithm
    from mcore_rl.batching.accounting import BatchAccounting
    from mcore_rl.batching.rows import MicroBatching


@dataclass(frozen=True, slots=True)
class TrainerOptions(Parameters):
    """The flags of the model, the algorithm and its steps."""

    hf_checkpoint: str | None = param(None, "Hugging Face checkpoint folder to start from")
    algorithm: str = param(
        "grpo",
        "the recipe: ppo, grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, remax, opo, "
        "dapo, gspo, cispo, gmpo, sapo, sft, dpo or one of --rl-import; other flags replace parts "
        "of it",
    )
    import_: tuple[str, ...] = param(
        (),
        "Python file with your estimators, losses, rewards and so on (mcore_rl.api) and their "
        "flags; can be repeated",
    )
    num_steps: int = param(100, "number of steps (rollout and update)", above=0)
    num_prompts_per_step: int = param(16, "prompts per step", above=0)
    num_mini_batches: int = param(1, "mini-batches per step, one optimizer update each", above=0)
    num_epochs: int = param(1, "optimizer passes over a step's samples", above=0)
    reference_refresh_interval: int = param(
        0, "steps between refreshes of the reference policy; 0 keeps the initial one", least=0
    )
    precision: str = param(
        "bf16", "precision of the trained parameters", choices=("bf16", "fp16", "fp32")
    )
    dither: bool = param(
        True,
        "let updates arrive in the mean that are small beside the rounding of 16-bit weights: the "
        "optimizer's float32 copies start spread over the intervals that round to the weights; "
        "adapters are merged into such copies, and float32 weights rounded from them for engines",
    )
    model_class: str = param(
        "auto",
        "Megatron's class for actor, critic and reward model: GPTModel or HybridModel; auto: "
        "HybridModel if Megatron has deprecated GPTModel and no other flag needs that. Checkpoints "
        "fit both",
        choices=("auto", "gpt", "hybrid"),
    )
    no_moe_grouped_gemm: bool = param(
        False,
        "run each expert separately instead of Transformer Engine's grouped GEMM",
    )
    routing_replay: str = param(
        "off",
        "experts that training uses: off: those its routers choose; r2: updates reuse those of the "
        "scoring pass; r3: scoring and updates reuse those of the engine",
        choices=("off", "r2", "r3"),
    )
    layout: str = param(
        "given",
        "parallel sizes: given: by Megatron's flags; auto: those that mcore-rl plan ranks first "
        "for these devices, with recomputation and smaller optimizer states where nothing fits "
        "without",
        choices=("given", "auto"),
    )
    max_tokens_per_microbatch: int = param(
        0,
        "pack samples without padding into micro-batches of at most this many tokens, balanced "
        "over ranks; 0: pad --micro-batch-size samples to one length. A start chooses it by the "
        "plan if neither is given",
        least=0,
    )
    share_prompts: str = param(
        "auto",
        "compute a prompt once for its samples in a packed row; auto: if results do not change",
        choices=("auto", "on", "off"),
    )
    log_prob_chunk_tokens: int = param(1024, "tokens whose logits are computed at a time", above=0)
    fp32_lm_head: bool = param(
        False, "compute logits in float32, in the trainer and in its engines (arXiv 2506.13585)"
    )
    on_nonfinite_grad: str = param(
        "stop",
        "stop the run at a non-finite gradient, or skip the update",
        choices=("stop", "skip"),
    )
    load_or_start: bool = param(
        False, "start from --rl-hf-checkpoint if --load has no checkpoint yet, for restarted jobs"
    )
    export_hf: str | None = param(None, "Hugging Face folder to export the trained policy to")
    export_interval: int = param(
        0,
        "export every this many steps as well, and keep the export with the best evaluation in the "
        "folder of the same name with -best; 0: only at the end",
        least=0,
        needs=("export_hf",),
    )
    export_dtype: str = param(
        "auto",
        "dtype of the export; auto: that of --rl-hf-checkpoint, with bfloat16 for FP8 blocks; fp8: "
        "FP8 blocks, unchanged where training did not change them",
        choices=("auto", FP8),
        needs=("export_hf",),
    )
    verify_out: str | None = param(None, "JSON file for the result of mcore_rl.verify")
    verify_megatron_only: bool = param(
        False,
        "mcore_rl.verify starts no engine: it exports what Megatron has read to --rl-export-hf and "
        "compares",
        needs=("export_hf",),
    )


@dataclass(frozen=True, slots=True)
class CriticOptions(Parameters):
    """The flags of the critic."""

    _flag_prefix = "critic_"

    init: str | None = param(
        None, "Hugging Face folder that initializes the critic; default: the actor's"
    )
    lr: float | None = param(None, "learning rate of the critic; default: --lr", least=0)
    clip_grad: float | None = param(
        None, "gradient norm of the critic; default: --clip-grad", least=0
    )
    warmup_steps: int | None = param(None, "initial steps that train only the critic", least=0)
    tp_size: int | None = degree("TP", "critic")
    pp_size: int | None = degree("PP", "critic")
    ep_size: int | None = degree("EP", "critic")
    ranks: str | None = param(
        None, "ranks that only train the critic, beside the actor's, for example 4-7"
    )


@dataclass(frozen=True, slots=True)
class RLConfig:
    """The options of a job beyond Megatron's own arguments, in sections.

    For example, `RLConfig.of(num_steps=3, kl_coef=0.1)` has `trainer.num_steps` 3 and the part
    `kl_coef` of the algorithm.
    """

    trainer: TrainerOptions = TrainerOptions()
    lora: LoraOptions = LoraOptions()
    critic: CriticOptions = CriticOptions()
    teacher: TeacherOptions = TeacherOptions()
    data: DataOptions = DataOptions()
    supervised: SupervisedOptions = SupervisedOptions()
    rewards: RewardOptions = RewardOptions()
    environments: EnvironmentOptions = EnvironmentOptions()
    rollout: RolloutOptions = RolloutOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    engine: EngineOptions = EngineOptions()
    weight_sync: WeightSyncOptions = WeightSyncOptions()
    run: RunOptions = RunOptions()
    alarms: AlarmOptions = AlarmOptions()
    # Given parts of the algorithm and their parameters, which the parts declare.
    parts: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **values: Any) -> RLConfig:
        """Return the options of flags by names without --rl-, including the algorithm's.

        Raises UsageError for the first value that is out of bounds.
        """
        return cls().replaced(**values)

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RLConfig:
        """Return the `--rl-*` part of a parsed namespace; raise for a missing attribute, a bug."""
        own = {name: getattr(args, f"rl_{name}") for name in run_flags()}
        # A file unknown to the parser may have added some since.
        parts = {name: getattr(args, f"rl_{name}", None) for name in flags().keys() - own.keys()}
        return cls.of(**own, **{k: v for k, v in parts.items() if v is not None})

    def replaced(self, **values: Any) -> RLConfig:
        """Return the options with other values of these flags, by names without --rl-."""
        values = {name: frozen(value) for name, value in values.items()}
        sections: dict[str, Any] = {k: with_values(v, values) for k, v in self.sections().items()}
        parts = {name: value for name, value in values.items() if name not in run_flags()}
        return dataclasses.replace(self, **sections, parts={**self.parts, **parts})

    def sections(self) -> dict[str, Parameters]:
        """Return the sections by name."""
        return {name: getattr(self, name) for name in SECTIONS}

    def values(self) -> list[tuple[Parameter, Any]]:
        """Return the flags of all sections and the given parts of the algorithm, with values."""
        own = {k: v for section in self.sections().values() for k, v in by_flag(section).items()}
        parts = {k: v for k, v in self.parts.items() if v is not None}
        return [(flags()[name], value) for name, value in (own | parts).items()]

    def as_dict(self) -> dict[str, Any]:
        """Return every flag by name, parts of the algorithm as given or None."""
        own = {k: v for section in self.sections().values() for k, v in by_flag(section).items()}
        return {name: self.parts.get(name) for name in flags()} | own | {"reward": self.reward}

    @property
    def reward(self) -> str:
        """The names of the rewards, separated by commas."""
        if self.rewards.reward is not None:
            return self.rewards.reward
        return "exact_match" if self.environments.environment is None else "environment"

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of all rewards, those of sources of prompts included."""
        return names_of(self.reward, self.data.all_sources())

    @property
    def teachers(self) -> tuple[TeacherPlace, ...]:
        """The teachers of all sources of prompts, each once. Raises UsageError if the sources
        cannot be read."""
        places: dict[str, TeacherPlace] = {}
        for each in filter(None, self.teachers_of_sources):
            places.setdefault(each.place, each)
        return tuple(places.values())

    @property
    def teachers_of_sources(self) -> tuple[TeacherPlace | None, ...]:
        """The teacher of each source of --rl-prompts; without these, that of --rl-teacher."""
        of_run = self.teacher.teacher
        default = None if of_run is None else TeacherPlace(of_run, "--rl-teacher")
        sources = self._sources_with_options()
        teachers: list[TeacherPlace | None] = [] if sources else [default]
        for source in sources:
            flag = f"{PROMPTS} {self.data.prompts}: teacher of source '{source.name}'"
            own = None if source.teacher in (None, NO_TEACHER) else source.teacher
            place = None if own is None else TeacherPlace(own, flag)
            teachers.append(default if source.teacher is None else place)
        return tuple(teachers)

    @property
    def recipe(self) -> Algorithm:
        """The algorithm with the given parts; UsageError if they cannot be combined."""
        of_run = {"top_p": self.rollout.top_p, "top_k": self.rollout.top_k}
        of_run |= by_flag(self.critic)
        given = {**self.parts, **{k: v for k, v in of_run.items() if v is not None}}
        return resolved_recipe(self.trainer.algorithm, tuple(given.items()))

    @property
    def has_engines(self) -> bool:
        """Whether a step samples; supervised training starts no engine."""
        return not self.recipe.is_supervised

    @property
    def samples_per_prompt(self) -> int:
        """The samples of a prompt, the most if sources differ."""
        own = [each.samples_per_prompt or 0 for each in self._sources_with_options()]
        return max([self.recipe.num_samples_per_prompt, *own])

    @property
    def samples_per_step(self) -> int:
        """The samples of every step. Raises UsageError if sources would make it vary."""
        return samples_of_step(
            self._sources_with_options(),
            num_prompts=self.trainer.num_prompts_per_step,
            num_samples=self.recipe.num_samples_per_prompt,
            given=f"{PROMPTS} {self.data.prompts}",
        )

    @property
    def has_groups_of_different_size(self) -> bool:
        """Whether sources have different numbers of samples per prompt."""
        return differ(self._sources_with_options(), self.recipe.num_samples_per_prompt)

    def _sources_with_options(self) -> tuple[SourceSpec, ...]:
        if self.data.prompts is None or not is_yaml(self.data.prompts):
            return ()
        return self.data.train_sources()

    def micro_batching(
        self,
        shape: ModelShape,
        layout: TrainLayout,
        values: Mapping[str, Any],
        *,
        interleaved: bool | None = None,
    ) -> MicroBatching:
        """Return how samples become micro-batches of a model in its layout.

        `values` are Megatron's flags by destination; `interleaved`, whether a pipeline stage has
        several model chunks, is known from validated ones.
        """
        if interleaved is None:
            interleaved = values["virtual_pipeline_model_parallel_size"] is not None
        from mcore_rl.batching.assignment import SampleFlops
        from mcore_rl.batching.rows import MicroBatching

        options = self.trainer
        group = values.get("microbatch_group_size_per_vp_stage") or layout.pp_size
        return MicroBatching(
            max_tokens=options.max_tokens_per_microbatch,
            micro_batch_size=values["micro_batch_size"],
            multiple_of=layout.tp_size * layout.cp_size,
            cp_size=layout.cp_size,
            same_length=layout.pp_size > 1,
            count_multiple_of=group if interleaved else 1,
            share_prompts=shares_prompts(
                options.share_prompts, values, options.max_tokens_per_microbatch
            ),
            cost=SampleFlops.of(shape),
        )

    def accounting(
        self, *, actor: tuple[int, MicroBatching], critic: tuple[int, MicroBatching] | None
    ) -> BatchAccounting:
        """Return the sequences, micro-batches and updates of a run, given the data-parallel sizes
        and micro-batches of the trained models."""
        from mcore_rl.batching.accounting import batch_accounting

        options, recipe = self.trainer, self.recipe
        return batch_accounting(
            num_prompts=options.num_prompts_per_step,
            samples_per_prompt=self.samples_per_prompt,
            samples_per_step=self.samples_per_step,
            num_mini_batches=options.num_mini_batches,
            num_epochs=options.num_epochs,
            num_steps=options.num_steps,
            max_sequence_tokens=self.data.max_prompt_tokens + self.rollout.max_response_tokens,
            actor=actor,
            critic=critic,
            critic_warmup_steps=self.critic.warmup_steps or 0,
            max_draws=1 + recipe.max_refills if recipe.replaces_groups else 1,
        )

    def num_updates(self, *, of_critic: bool) -> int:
        """Return a run's updates of the actor or the critic, the iterations of Megatron's schedules
        of learning rate and weight decay. The actor has none while the critic warms up."""
        options, waits = self.trainer, 0 if of_critic else self.critic.warmup_steps or 0
        updates = (options.num_steps - waits) * options.num_mini_batches * options.num_epochs
        # 1 for a run that is all warm-up: Megatron's scheduler refuses 0.
        return max(1, updates)


SECTIONS: dict[str, type[Parameters]] = {
    name: type(section)
    for name in RLConfig.__slots__
    if isinstance(section := getattr(RLConfig(), name), Parameters)
}


def run_flags() -> dict[str, Parameter]:
    """Return the flags of all sections by name."""
    return {p.name: p for section in SECTIONS.values() for p in parameters_of(section)}


def frozen(value: Any) -> Any:
    """Return argparse's lists as tuples, as in RLConfig."""
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def resolved_recipe(name: str, given: tuple[tuple[str, Any], ...]) -> Algorithm:
    """Return the recipe `name` with the parts that are given."""
    from mcore_rl.algorithms.recipes import resolve_algorithm  # torch, which flags do not need

    return resolve_algorithm(name, dict(given))


def flags() -> dict[str, Parameter]:
    """Return every `--rl-*` flag but --rl-config, by name: the run's, then those of the algorithms'
    parts, including a user's own. Raises UsageError for a name that is declared twice."""
    from mcore_rl.algorithms.recipes import declared_parameters  # imports torch

    parameters = run_flags()
    for name, parameter in declared_parameters().items():
        if name in parameters or name == "config":
            raise UsageError(
                f"is a flag already, so that no loss or estimator of --rl-import can declare "
                f"{name}",
                flag=parameter.flag,
                remedy="rename it",
            )
        parameters[name] = parameter
    return parameters


def config_from(given: Mapping[str, Any]) -> RLConfig:
    """Return our flags among the given ones, by destination; the others at their defaults."""
    ours = {name: given[f"rl_{name}"] for name in flags() if f"rl_{name}" in given}
    return RLConfig.of(**ours)
