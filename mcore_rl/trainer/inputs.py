"""A run's inputs, as the flags name them: prompts, and what rewards the responses."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.messages import RejectedRow, checked_kwargs
from mcore_rl.data.prompt_cache import tokenizer_process
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import PromptDataset, load_prompts
from mcore_rl.data.tokenizer import (
    HOW_TO_END,
    missing_end,
    response_ends,
    vocabulary_size,
)
from mcore_rl.data.tokenizer_process import ChatTemplate
from mcore_rl.data.user_prompts import prompts_path
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.pool import check_environment
from mcore_rl.isolation.levels import parse_accepted
from mcore_rl.isolation.spawn import parse_environment_names
from mcore_rl.rewards.pool import check_rewards
from mcore_rl.rewards.specs import RewardSpec, parse_rewards
from mcore_rl.sandbox import PYTHON_SANDBOX
from mcore_rl.sandbox.code_rows import check_code_rows
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.resume.trainer_state import date_of_checkpoints

logger = logging.getLogger(__name__)


def check_data(checked: JobSpec) -> None:
    """Raise UsageError without readable prompts and a usable reward, which training needs."""
    trusts = checked.trust_remote_code
    if "" in checked.config.rollout.stop:
        raise UsageError("is empty", flag="--rl-stop ''", remedy="give the text to stop at")
    load = checked.flags.get("--load")
    day = None if load is None else date_of_checkpoints(Path(load))
    train, held_out = load_prompt_files(checked.config, trust_remote_code=trusts, date=day)
    check_rewards(reward_spec(checked.config))
    check_code_tests(checked.config, train, held_out)
    environment = environment_spec(checked.config)
    if environment is not None:
        check_environment(environment)
        conversation_tokens(checked.config, trust_remote_code=trusts, date=day)
    if int(os.environ.get("RANK", 0)) != 0:
        return
    fault = missing_end(checked.checkpoint.folder, trust_remote_code=trusts)
    if fault is not None:
        logger.warning(
            "%s: every response will be cut at --rl-max-response-tokens %d; %s",
            fault,
            checked.config.rollout.max_response_tokens,
            HOW_TO_END,
        )


def check_code_tests(
    config: RLConfig, train: PromptDataset, held_out: PromptDataset | None
) -> None:
    """Raise UsageError for answers that are not tests, if `python_sandbox` grades by them."""
    is_reward = PYTHON_SANDBOX in [name.strip() for name in config.reward.split(",")]
    if not is_reward and config.environments.environment != PYTHON_SANDBOX:
        return
    if int(os.environ.get("LOCAL_RANK", 0)) != 0:  # the other ranks of a node read the same rows
        return
    accepted = parse_accepted(config.rewards.sandbox_accept, "--rl-sandbox-accept")
    for prompts, flag in (
        (train, f"--rl-prompts {config.data.prompts}"),
        (held_out, f"--rl-eval-prompts {config.data.eval_prompts}"),
    ):
        if prompts is not None:
            check_code_rows(prompts, flag, may_be_blank=not is_reward, accepted=accepted)


def chat_template(config: RLConfig, date: str | None = None) -> ChatTemplate:
    """Return the chat template of the flags; `date` as in `ChatTemplate`. Raises UsageError."""
    flag = f"--rl-chat-template-kwargs {config.data.chat_template_kwargs}"
    try:
        kwargs = checked_kwargs(config.data.chat_template_kwargs, "it")
    except RejectedRow as error:
        raise UsageError(f": {error.problem}", flag=flag, remedy=error.remedy) from error
    if config.data.no_chat_template and (kwargs or config.data.chat_template is not None):
        raise UsageError(
            "has no effect with --rl-no-chat-template",
            flag=flag if kwargs else f"--rl-chat-template {config.data.chat_template}",
            remedy="drop one of them",
        )
    return ChatTemplate(config.data.chat_template, kwargs, date)


def prompt_source(
    config: RLConfig, path: str, *, trust_remote_code: bool = False, date: str | None = None
) -> PromptSource:
    """Return how to read a prompts file, or a source of --rl-import, according to the flags."""
    return PromptSource(
        path=prompts_path(path, config.data.cache_dir),
        prompt_column=config.data.prompt_column,
        answer_column=config.data.answer_column,
        use_chat_template=not config.data.no_chat_template,
        max_prompt_tokens=config.data.max_prompt_tokens,
        trust_remote_code=trust_remote_code,
        template=chat_template(config, date),
    )


def load_prompt_files(
    config: RLConfig, *, trust_remote_code: bool = False, date: str | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return training and held-out prompts, from the cache if they were tokenised before.

    `trust_remote_code` is Megatron's --trust-remote-code, `date` the date (ISO) for chat templates;
    None: today.
    """
    if config.data.prompts is None:
        raise UsageError(
            "is missing", flag="--rl-prompts", remedy="give a JSONL or Parquet file of prompts"
        )
    assert config.trainer.hf_checkpoint is not None, "checked before"
    files = []
    for path, flag in (
        (config.data.prompts, "--rl-prompts"),
        (config.data.eval_prompts, "--rl-eval-prompts"),
    ):
        files.append(
            None
            if path is None
            else load_prompts(
                prompt_source(config, path, trust_remote_code=trust_remote_code, date=date),
                config.trainer.hf_checkpoint,
                cache_dir=config.data.cache_dir,
                flag=flag,
            )
        )
    train, held_out = files
    assert train is not None
    return train, held_out


def environment_spec(config: RLConfig) -> EnvironmentSpec | None:
    """Return the environment of the flags, if any."""
    if config.environments.environment is None:
        return None
    return EnvironmentSpec(
        name=config.environments.environment,
        timeout_seconds=config.environments.environment_timeout,
        memory_gib=config.environments.environment_memory_gib,
        imports=config.trainer.import_,
        environment_names=parse_environment_names(
            config.environments.environment_env, "--rl-environment-env"
        ),
        sandbox_accept=parse_accepted(config.rewards.sandbox_accept, "--rl-sandbox-accept"),
        max_open=config.environments.max_environments,
        max_turns=config.environments.max_turns,
        max_turn_tokens=config.environments.max_turn_tokens,
    )


def conversation_tokens(
    config: RLConfig, *, trust_remote_code: bool, date: str | None = None
) -> ConversationTokens:
    """Return how environments' messages become tokens of this model. Raises UsageError for a chat
    template that does not support several turns."""
    assert config.trainer.hf_checkpoint is not None, "checked before"
    folder = Path(config.trainer.hf_checkpoint)
    uses_template = not config.data.no_chat_template
    process = tokenizer_process(
        folder,
        chat_template(config, date),
        use_template=uses_template,
        trust_remote_code=trust_remote_code,
    )
    return ConversationTokens(
        process,
        use_chat_template=uses_template,
        ends=response_ends(folder, process),
        vocabulary=vocabulary_size(folder),
        place=config.trainer.hf_checkpoint,
    )


def reward_spec(config: RLConfig) -> RewardSpec:
    """Return the rewards of the flags, with their weights."""
    return parse_rewards(
        config.reward,
        config.rewards.reward_weights,
        num_workers=config.rewards.reward_workers,
        timeout_seconds=config.rewards.reward_timeout_seconds,
        imports=config.trainer.import_,
        url=config.rewards.reward_url,
        header_env=config.rewards.reward_http_header_env,
        pooling_url=config.rewards.reward_pooling_url,
        pooling_header_env=config.rewards.reward_pooling_header_env,
        http_batch=config.rewards.reward_http_batch,
        http_concurrency=config.rewards.reward_http_concurrency,
        http_retries=config.rewards.reward_http_retries,
        memory_gib=config.rewards.reward_memory_gib,
        environment_names=config.rewards.reward_env,
        sandbox_accept=config.rewards.sandbox_accept,
    )
