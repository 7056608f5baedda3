"""A job's `JobSpec`, from a command line or from the arguments that a fork has parsed: `resolve`.

`examine` calls the checks of a job one after the other. Each raises UsageError; they read flags and
files only, so that all of them take seconds. `Refusals` decides what a refusal means: a start ends
with the first one, the doctor collects them and skips the checks that need what was refused. The
planner leaves out the checks that need the weights or the machine of the job. Megatron's own
validation runs near the end, to find in advance what Megatron would refuse.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mcore_rl.common.allocator import check_allocator
from mcore_rl.config import RLConfig, config_from
from mcore_rl.flags.classes import check_critic_rate
from mcore_rl.flags.derived import DerivedFlags, derive_flags, values_of, with_effect
from mcore_rl.flags.fsdp import check_fsdp, check_fsdp_machine
from mcore_rl.flags.packages import check_wandb
from mcore_rl.flags.parsed_flags import expand_config, import_given_files
from mcore_rl.hybrid_engine.memory.offload import offload_kinds
from mcore_rl.job import engines, preflight, reading
from mcore_rl.job.batches import check_batches, check_lengths
from mcore_rl.job.facts import BATCH, LAYOUT, LENGTHS, Facts, Refusals, Source
from mcore_rl.job.job_spec import spec_of
from mcore_rl.job.layout import (
    check_actor_layout,
    check_rollout,
    check_stages,
    title_of_engines,
)
from mcore_rl.job.lora import check_lora, check_lora_folders
from mcore_rl.job.memory import check_memory
from mcore_rl.job.supervised import check_mixed_batches, check_supervised
from mcore_rl.job.teachers import check_teacher_flags, read_teacher, teacher_spec
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.job.value_models import (
    Folder,
    ValueOptions,
    check_positions,
    check_reward_model_flags,
    critic_options,
    lay_out,
    lay_out_in_fork,
    read_folder,
    read_value_shape,
    reward_options,
)
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.model_class import choose_model_class
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.roles import REWARD, parse_roles
from mcore_rl.model.teacher import TeacherPlace
from mcore_rl.moe.balance import check_balancing
from mcore_rl.rewards.specs import parse_rewards
from mcore_rl.spec import JobSpec, LaidOut, TeacherSpec, ValueModelSpec


def resolve(source: Source) -> JobSpec:
    """Return the job of `source`, after every check. Raises the first refusal.

    `--help` and `--help-rl` exit with SystemExit, after rank 0 has printed the flags.
    """
    reading.answer_help(source.tokens, source.extra_args)
    spec = examine(source, Refusals()).spec
    assert spec is not None, "a check was skipped without a refusal"
    return spec


def examine(source: Source, refusals: Refusals) -> Facts:
    """Call the checks of a job in order; return what they find."""
    if source.is_here:
        refusals.passes(preflight.check_versions)
    refusals.passes(import_given_files, source.tokens)
    parser = source.parser or reading.make_parser(source.extra_args)
    examiner = _Examiner(source, refusals, Facts(parser=parser))
    examiner.examine()
    return examiner.facts


class _Examiner:
    """The checks of a job, in groups; each group needs what the ones before it found."""

    def __init__(self, source: Source, refusals: Refusals, facts: Facts) -> None:
        self.source, self.refusals, self.facts = source, refusals, facts
        self._lengths_are_right = False

    def examine(self) -> None:
        facts = self.facts
        with self.refusals.single_flags():
            self._read_flags()
        if facts.config is None:
            return
        self._read_rewards(facts.config)
        self._check_named_files(facts.config)
        if facts.shape is None:
            return
        self._check_model(facts.config, facts.shape)
        self._derive(facts.config, facts.shape)
        if facts.values is None:
            return
        self._check_together(facts.config, facts.shape, facts.values)
        self._lay_out(facts.config, facts.shape, facts.values)
        self._check_other_models(facts.config, facts.shape)

    def _read_flags(self) -> None:
        """Read the given flags, and check those that can be wrong by themselves."""
        facts, refusals, args = self.facts, self.refusals, self.source.args
        given = None
        if args is not None:
            given = refusals.value(reading.given_in_fork, args, facts.parser)
        elif (
            tokens := refusals.value(expand_config, self.source.tokens, facts.parser)
        ) is not None:
            facts.tokens = tuple(tokens)
            given = refusals.value(reading.given_in, tokens, facts.parser)
        if given is None:
            return
        facts.given = given
        config = facts.config = refusals.value(self._read_config)
        if config is None:
            return
        refusals.passes(check_supervised, config, given, scores_only=self.source.scores_only)
        refusals.passes(check_reward_model_flags, config)
        refusals.passes(check_teacher_flags, config)
        refusals.passes(preflight.check_environment_flags, config)
        has_cuda = self.source.platform.cuda
        refusals.passes(config.rollout.check_kv_after_update, has_cuda=has_cuda)
        refusals.passes(preflight.check_switches, given)
        if args is not None:
            refusals.passes(reading.check_needs_no_command_line, args, config)
        if self.source.has_files:
            refusals.passes(preflight.check_inputs, given)

    def _read_config(self) -> RLConfig:
        config = config_from(self.facts.given)
        preflight.check_ranges(config)
        if self.source.scores_only:
            return config.replaced(max_response_tokens=1)
        return config

    def _read_rewards(self, config: RLConfig) -> None:
        """Read what evaluates responses: the rewards, and the environment of several turns."""
        facts, refusals, imports = self.facts, self.refusals, config.trainer.import_
        sources = config.data.all_sources()
        facts.rewards = refusals.value(
            parse_rewards, config.reward, config.rewards, imports, sources
        )
        facts.environment = refusals.value(
            config.environments.spec,
            imports,
            config.rewards.sandbox_accept,
            sources,
            needs_state=config.rollout.keeps_unfinished,
        )

    def _check_named_files(self, config: RLConfig) -> None:
        """Check the files and folders that the flags name; read config.json and the weights."""
        facts, refusals, source = self.facts, self.refusals, self.source
        if source.has_files:
            refusals.passes(preflight.check_outputs, config, facts.given)
        if source.is_here:
            refusals.passes(check_wandb, facts.given)
        facts.shape = refusals.value(
            source.read_shape, config.trainer.hf_checkpoint, "--rl-hf-checkpoint"
        )
        if facts.shape is not None and source.has_files:
            facts.checkpoint = refusals.value(reading.read_checkpoint, config, facts.shape)

    def _check_model(self, config: RLConfig, shape: ModelShape) -> None:
        """Check the flags of ours that depend on the model alone."""
        facts, refusals = self.facts, self.refusals
        if facts.checkpoint is not None:
            refusals.passes(preflight.check_export_dtype, config.trainer, facts.checkpoint)
        refusals.passes(engines.check_speculation, config, shape, facts.checkpoint)
        refusals.passes(engines.check_candidates, config, shape)
        starts_engines = config.has_engines and not config.rollout.servers
        if self.source.is_here and starts_engines:
            refusals.passes(engines.check_engine, config, shape, cuda=self.source.platform.cuda)
        only_megatron = self.source.scores_only and config.trainer.verify_megatron_only
        if self.source.has_engine and starts_engines and not only_megatron:
            refusals.passes(engines.check_layers, shape, cuda=self.source.platform.cuda)
        if refusals.knows(LENGTHS):
            self._lengths_are_right = refusals.passes(
                check_lengths,
                config,
                shape,
                cp_size=facts.given.get("context_parallel_size") or 1,
                scores_only=self.source.scores_only,
            )

    def _derive(self, config: RLConfig, shape: ModelShape) -> None:
        """Derive the flags that follow from config.json, the machine and ours."""
        facts, refusals, args = self.facts, self.refusals, self.source.args
        given, parser, platform = facts.given, facts.parser, self.source.platform
        if args is not None:
            if refusals.passes(
                reading.check_fork_fits,
                *(args, shape, config, given),
                parser=parser,
                platform=platform,
            ):
                facts.derived, facts.values = DerivedFlags((), (), ()), vars(args)
            return
        with refusals.single_flags():
            derived = refusals.value(
                derive_flags, shape, config, given, parser=parser, platform=platform
            )
        if derived is not None:
            facts.derived = derived
            facts.values = values_of(derived, given, parser)

    def _check_together(
        self, config: RLConfig, shape: ModelShape, values: Mapping[str, Any]
    ) -> None:
        """Check combinations of flags, except those that concern layouts."""
        source, refusals, platform = self.source, self.refusals, self.source.platform
        refusals.passes(preflight.check_together, values)
        refusals.passes(preflight.check_indexer_loss, shape, values)
        refusals.passes(preflight.check_routing, config.trainer.routing_replay, shape, values)
        refusals.passes(check_balancing, values, config.trainer.max_tokens_per_microbatch)
        if self.facts.checkpoint is not None:
            refusals.passes(preflight.check_biases, self.facts.checkpoint, shape, values)
        refusals.passes(check_critic_rate, config.critic.lr, values)
        self.facts.lora = lora = refusals.value(check_lora, config, shape, values)
        if lora is not None and source.has_files:
            refusals.passes(check_lora_folders, config, lora, values)
        if source.is_here:
            requested = config.trainer.model_class
            self.facts.model_class = refusals.value(
                choose_model_class, requested, values, has_mamba=shape.mamba is not None
            )
            refusals.passes(engines.check_graphs, config.engine)
        if source.is_here and platform.cuda:
            refusals.passes(check_allocator, os.environ)
        if source.is_here and source.args is None and values.get("use_megatron_fsdp"):
            megatron_adapter.allow_many_queues()  # before CUDA starts
        if refusals.passes(check_fsdp, values) and source.is_here:
            refusals.passes(check_fsdp_machine, values, os.environ, platform=platform)
        refusals.passes(offload_kinds, config.weight_sync.offload, values, has_cuda=platform.cuda)

    def _lay_out(self, config: RLConfig, shape: ModelShape, values: Mapping[str, Any]) -> None:
        """Lay out actor and engines, divide the samples among ranks, and ask Megatron."""
        facts, refusals, source = self.facts, self.refusals, self.source
        layout = layers = None
        if refusals.knows(LAYOUT):
            given = config.critic.ranks, config.rewards.reward_ranks, config.rollout.rollout_ranks
            count = config.rollout.num_controllers
            facts.roles = refusals.value(
                parse_roles, source.world_size, *given, count, config.teacher.teacher_ranks
            )
            if facts.roles is not None:
                refusals.passes(engines.check_separate, config, facts.roles)
                layout = refusals.value(check_actor_layout, shape, values, facts.roles)
            pp_size = values.get("pipeline_model_parallel_size", 1)
            layers = refusals.value(check_stages, shape, pp_size, values)
        if layers is None:
            return
        may_train_mtp = refusals.passes(preflight.check_mtp, config, shape, layers, values)
        if may_train_mtp and facts.checkpoint is not None:
            refusals.passes(preflight.check_mtp_weights, shape, facts.checkpoint, values)
        if layout is None:
            return
        facts.actor = LaidOut(shape, layout, layers, values, self._tokens_of_actor())
        roles, has_cuda = facts.roles, source.platform.cuda
        assert roles is not None, "there is a layout"
        if not config.has_engines:
            facts.rollout = RolloutLayout.without_engines(layout.world_size)
        else:
            with refusals.of_role(title_of_engines(roles)):
                facts.rollout = refusals.value(
                    check_rollout,
                    *(config.engine, shape, layout, layers),
                    roles=roles,
                    has_cuda=has_cuda,
                )
        if facts.rollout is not None:
            refusals.passes(
                engines.check_rollout_dtype,
                *(config, shape, facts.checkpoint, facts.rollout),
                has_cuda=has_cuda,
            )
        if source.checks_batches and refusals.knows(BATCH):
            facts.batches_are_right = refusals.passes(check_batches, config, layout, layers, values)
            refusals.passes(check_mixed_batches, config, layout, layers, values)
        if facts.rollout is not None and self._fits_together:
            facts.is_accepted = self._megatron_accepts(facts.actor)

    def _tokens_of_actor(self) -> tuple[str, ...] | None:
        """Return the derived flags, then the given ones that have an effect; None in a fork."""
        facts = self.facts
        if facts.derived is None or self.source.args is not None:
            return None
        given = with_effect(facts.derived, facts.tokens, facts.parser)
        return (*facts.derived.tokens, *given)

    @property
    def _fits_together(self) -> bool:
        return self.facts.batches_are_right and self._lengths_are_right

    def _megatron_accepts(self, model: LaidOut) -> bool:
        """Return whether Megatron's own validation passes; False, too, where it is not run."""
        if model.tokens is None or not self.source.is_here:
            return False
        return self.refusals.passes(
            check_megatron_accepts,
            *(model.tokens, model.shape),
            world_size=model.layout.world_size,
            extra_args=self.source.extra_args,
        )

    def _check_other_models(self, config: RLConfig, shape: ModelShape) -> None:
        """Check the critic and the reward model; then whether the job fits the machine."""
        facts, source = self.facts, self.source
        critic = reward_model = None
        if (options := critic_options(config)) is not None:
            critic, facts.critic = self._value_model(options, config, shape)
        if (options := reward_options(config)) is not None:
            reward_model, _ = self._value_model(options, config, shape)
        teachers = [self._teacher(each, config, shape) for each in config.teachers if each.folder]
        ask = source.device_capability
        if facts.rollout is not None and facts.rollout.float8 and source.platform.cuda and ask:
            self.refusals.passes(engines.check_float8_device, ask())
        memory_notes: tuple[str, ...] | None = ()
        if self._fits_together:
            memory_notes = self.refusals.value(check_memory, config, facts, source)
        is_complete = not self.refusals.count and not self.refusals.left_out
        if memory_notes is not None and is_complete and source.has_files:
            facts.spec = spec_of(facts, source, critic, reward_model, teachers, memory_notes)

    def _value_model(
        self, options: ValueOptions, config: RLConfig, shape: ModelShape
    ) -> tuple[ValueModelSpec | None, LaidOut | None]:
        """Check a critic or a reward model by the checks of the actor and those of its own."""
        facts, refusals, source = self.facts, self.refusals, self.source
        own_shape = refusals.value(read_value_shape, options, shape, source.read_shape)
        if own_shape is None:
            return None, None
        folder = None
        if source.has_files and (options.init is not None or facts.checkpoint is not None):
            folder = refusals.value(
                read_folder, options, own_shape, facts.checkpoint, source.read_shape
            )
            if options.role == REWARD:
                facts.reward_model_folder = folder
        if refusals.knows(LENGTHS):
            refusals.passes(check_positions, options, config, own_shape)
        laid_out = self._laid_out(options, config, own_shape)
        if laid_out is None:
            return None, None
        with refusals.of_role(f"the {options.name}"):
            if options.learns:
                self._check_learning(config, laid_out, folder)
            if facts.is_accepted:
                self._megatron_accepts(laid_out)
        if folder is None:
            return None, laid_out
        spec = ValueModelSpec(
            shape=own_shape,
            checkpoint=folder.checkpoint,
            has_head=folder.has_head,
            layout=laid_out.layout,
            layers=laid_out.layers,
            tokens=laid_out.tokens,
            extra_args=source.extra_args,
        )
        return spec, laid_out

    def _teacher(
        self, teacher: TeacherPlace, config: RLConfig, shape: ModelShape
    ) -> TeacherSpec | None:
        """Check a teacher in a folder by the checks of the actor and those of its own."""
        read = read_teacher(teacher, config, shape, self.facts, self.refusals, self.source)
        if read is None:
            return None
        laid_out = self._laid_out(read.options, config, read.shape)
        if laid_out is None:
            return None
        self.facts.teachers += (laid_out,)
        with self.refusals.of_role("the teacher"):
            if self.facts.is_accepted:
                self._megatron_accepts(laid_out)
        return teacher_spec(read, laid_out, self.facts, self.source.extra_args)

    def _laid_out(
        self, options: ValueOptions, config: RLConfig, own_shape: ModelShape
    ) -> LaidOut | None:
        facts = self.facts
        if facts.roles is None or facts.actor is None:
            return None
        if self.source.args is not None:
            return self.refusals.value(lay_out_in_fork, options, own_shape, facts.actor)
        with self.refusals.of_role(f"the {options.name}"):
            return self.refusals.value(
                lay_out,
                *(options, config, own_shape, facts.given, facts.tokens),
                parser=facts.parser,
                roles=facts.roles,
                platform=self.source.platform,
            )

    def _check_learning(self, config: RLConfig, laid_out: LaidOut, folder: Folder | None) -> None:
        """Check the batches and experts of a model that is trained in a layout of its own."""
        refusals, values = self.refusals, laid_out.values
        if self.facts.batches_are_right:
            refusals.passes(check_batches, config, laid_out.layout, laid_out.layers, values)
        refusals.passes(check_balancing, values, config.trainer.max_tokens_per_microbatch)
        if folder is not None:
            refusals.passes(preflight.check_biases, folder.checkpoint, laid_out.shape, values)
