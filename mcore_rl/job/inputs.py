"""The checks of a start after those of its flags: data, rewards, folders, servers.

`examine` runs checks in order and yields how each ended. A start ends with the first error; the
doctor reports all of them. What a check warns of, it logs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations
from mcore_rl.data.prompts import PromptSources, load_prompt_files
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS
from mcore_rl.data.tokenizer import HOW_TO_END, missing_end
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.pool import check_environment
from mcore_rl.job.teachers import check_teacher_servers
from mcore_rl.megatron.hf_files import check_copies
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.turn_reader import TurnReader
from mcore_rl.sandbox import PYTHON_SANDBOX
from mcore_rl.sandbox.code_rows import check_code_rows
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.mixed import read_mixed
from mcore_rl.trainer.resume.trainer_state import date_of_checkpoints
from mcore_rl.trainer.supervised import read_supervised

logger = logging.getLogger(__name__)

Check = tuple[str, Callable[[], object]]  # the name of what is checked, and what raises UsageError
_LATER = "start it before the run, or correct its address"


class Outcome(NamedTuple):
    """How a check ended: Outcome("reward"), or Outcome("prompts", UsageError(...))."""

    name: str
    error: Exception | None = None


def examine(checks: Iterable[Check]) -> Iterator[Outcome]:
    """Run checks one after the other; a check may need what the ones before it have found."""
    for name, check in checks:
        try:
            check()
        except Exception as error:
            yield Outcome(name, error)
        else:
            yield Outcome(name)


def require(checks: Iterable[Check]) -> None:
    """Run checks as a start does: raise the first error."""
    for outcome in examine(checks):
        if outcome.error is not None:
            raise outcome.error


def check_data(spec: JobSpec) -> None:
    """Raise UsageError without readable prompts and a usable reward, which training needs."""
    data = Data(
        spec.config,
        spec.rewards,
        spec.environment,
        spec.checkpoint.folder,
        trust_remote_code=spec.trust_remote_code,
        load=spec.flags.get("--load"),
    )
    require(data.checks())


@dataclass(slots=True)
class Data:
    """The data of a training job; `checks` fills in the last three fields.

    For example Data(config, rewards, None, Path("checkpoint"), load="runs/one/checkpoints").
    """

    config: RLConfig
    rewards: RewardSpec | None  # None: refused
    environment: EnvironmentSpec | None
    folder: Path  # of the tokenizer
    trust_remote_code: bool = False
    load: str | None = None  # the checkpoints of --load, for the date of chat templates
    write_cache: bool = True
    train: PromptSources | Demonstrations | None = None
    held_out: PromptSources | Demonstrations | None = None
    can_score: bool = False  # the rewards have passed their check

    def checks(self) -> Iterator[Check]:
        """Yield the checks in the order of a start; those that need what was refused are left
        out."""
        config, rewards, environment = self.config, self.rewards, self.environment
        yield "flags", self._check_stop
        yield "prompts", self._read
        is_read = self.train is not None
        if not config.has_engines:
            return
        if is_read:
            yield "prompts", lambda: read_mixed(config, self.folder, **self._how)
        if rewards is not None:
            yield "reward", lambda: self._check_rewards(rewards)
            if is_read and self.can_score:
                yield "prompts", lambda: self._check_code_tests(rewards)
        if environment is not None:
            yield "reward", lambda: check_environment(environment)
            if is_read:
                yield "reward", lambda: self._check_turns(environment)
        if is_read and int(os.environ.get("RANK", 0)) == 0:
            yield "prompts", self._check_end

    @property
    def _how(self) -> dict[str, Any]:
        day = None if self.load is None else date_of_checkpoints(Path(self.load))
        trusts = self.trust_remote_code
        return {"trust_remote_code": trusts, "date": day, "write_cache": self.write_cache}

    def _check_stop(self) -> None:
        if "" in self.config.rollout.stop:
            raise UsageError("is empty", flag="--rl-stop ''", remedy="give the text to stop at")

    def _read(self) -> None:
        if self.config.has_engines:
            self.train, self.held_out = load_prompt_files(
                self.config.data,
                self.folder,
                per_step=self.config.trainer.num_prompts_per_step,
                **self._how,
            )
        else:
            self.train, self.held_out = read_supervised(self.config, self.folder, **self._how)

    def _check_rewards(self, rewards: RewardSpec) -> None:
        check_rewards(rewards)
        self.can_score = True

    def _check_code_tests(self, rewards: RewardSpec) -> None:
        """Refuse answers that are not tests, if `python_sandbox` grades by them."""
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:  # the node's other ranks read the same rows
            return
        for prompts in (self.train, self.held_out):
            if not isinstance(prompts, PromptSources):
                continue
            for spec, part in zip(prompts.specs, prompts.parts, strict=True):
                is_reward = PYTHON_SANDBOX in rewards.weights_of(spec.key)
                own = None if self.environment is None else self.environment.name_for(spec.key)
                if is_reward or own == PYTHON_SANDBOX:
                    flag = f"{EVAL_PROMPTS if spec.is_eval else PROMPTS} {spec.path}"
                    check_code_rows(
                        part, flag, may_be_blank=not is_reward, accepted=rewards.sandbox_accept
                    )

    def _check_turns(self, environment: EnvironmentSpec) -> None:
        """Check that the model's chat template and parsers can read and write turns."""
        how = {"trust_remote_code": self.trust_remote_code}
        day = self._how["date"]
        tokens = ConversationTokens.of_model(self.folder, self.config.data, date=day, **how)
        if environment.names_parsers:  # imports vLLM
            TurnReader.of_model(self.folder, tokens, environment, **how)

    def _check_end(self) -> None:
        fault = missing_end(self.folder, trust_remote_code=self.trust_remote_code)
        if fault is not None:
            logger.warning(
                "%s: every response will be cut at --rl-max-response-tokens %d; %s",
                fault,
                self.config.rollout.max_response_tokens,
                HOW_TO_END,
            )


def checks_of_places(spec: JobSpec) -> Iterator[Check]:
    """Yield the checks of the folders and servers of a job, for this rank."""
    rank = int(os.environ.get("RANK", 0))
    yield "checkpoint", lambda: _check_copies(spec)
    if rank != spec.roles.actor[0]:
        return
    if spec.config.rollout.servers:
        yield "servers", lambda: _check_servers(spec)
    if any(each.url is not None for each in spec.config.teachers):
        yield "teachers", lambda: _check_teachers(spec)


def _check_copies(spec: JobSpec) -> None:
    """Call `check_copies` on all folders; each rank of the job compares its share."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for flag, checkpoint in spec.checkpoints.items():
        check_copies(
            checkpoint.folder, checkpoint.repeated, part=rank, num_parts=world_size, flag=flag
        )


def _check_servers(spec: JobSpec) -> None:
    # It imports vLLM, which takes seconds.
    from mcore_rl.trainer.server_checks import check_servers

    for line in check_servers(spec):
        logger.warning("[Servers] %s; %s", line, _LATER)


def _check_teachers(spec: JobSpec) -> None:
    for line in check_teacher_servers(spec):
        logger.warning("[Teacher] %s; %s", line, _LATER)
