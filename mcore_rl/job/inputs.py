"""The check of a training job's inputs: prompts, rewards and the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompts import PromptSources, load_prompt_files
from mcore_rl.data.sources import EVAL_PROMPTS, PROMPTS
from mcore_rl.data.tokenizer import HOW_TO_END, missing_end
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.pool import check_environment
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


def check_data(spec: JobSpec) -> None:
    """Raise UsageError without readable prompts and a usable reward, which training needs."""
    config, folder, trusts = spec.config, spec.checkpoint.folder, spec.trust_remote_code
    if "" in config.rollout.stop:
        raise UsageError("is empty", flag="--rl-stop ''", remedy="give the text to stop at")
    load = spec.flags.get("--load")
    day = None if load is None else date_of_checkpoints(Path(load))
    if not config.has_engines:
        read_supervised(spec, date=day)
        return
    train, held_out = load_prompt_files(config.data, folder, trust_remote_code=trusts, date=day)
    read_mixed(spec, date=day)
    check_rewards(spec.rewards)
    check_code_tests(spec.rewards, spec.environment, train, held_out)
    if spec.environment is not None:
        check_environment(spec.environment)
        tokens = ConversationTokens.of_model(
            folder, config.data, trust_remote_code=trusts, date=day
        )
        if spec.environment.names_parsers:  # imports vLLM
            TurnReader.of_model(folder, tokens, spec.environment, trust_remote_code=trusts)
    if int(os.environ.get("RANK", 0)) != 0:
        return
    fault = missing_end(folder, trust_remote_code=trusts)
    if fault is not None:
        logger.warning(
            "%s: every response will be cut at --rl-max-response-tokens %d; %s",
            fault,
            config.rollout.max_response_tokens,
            HOW_TO_END,
        )


def check_code_tests(
    rewards: RewardSpec,
    environment: EnvironmentSpec | None,
    train: PromptSources,
    held_out: PromptSources | None,
) -> None:
    """Raise UsageError for answers that are not tests, if `python_sandbox` grades by them."""
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:  # the other ranks of a node read the same rows
        return
    for prompts in filter(None, (train, held_out)):
        for spec, part in zip(prompts.specs, prompts.parts, strict=True):
            is_reward = PYTHON_SANDBOX in rewards.weights_of(spec.key)
            own = None if environment is None else environment.name_for(spec.key)
            if is_reward or own == PYTHON_SANDBOX:
                flag = f"{EVAL_PROMPTS if spec.is_eval else PROMPTS} {spec.path}"
                accepted = rewards.sandbox_accept
                check_code_rows(part, flag, may_be_blank=not is_reward, accepted=accepted)
