"""Options of prompts."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param


@dataclass(frozen=True, slots=True)
class DataOptions(Parameters):
    """The flags of prompts: their files, and how rows become prompts."""

    prompts: str | None = param(None, "JSONL or Parquet file of training prompts")
    eval_prompts: str | None = param(None, "JSONL or Parquet file of held-out prompts")
    prompt_column: str = param("prompt", "column that holds the prompt (text or chat messages)")
    answer_column: str = param("answer", "column that holds the reference answer for the reward")
    no_chat_template: bool = param(
        False, "use prompts as they are in the file, without a chat template"
    )
    chat_template: str | None = param(
        None, "name of one of the tokenizer's chat templates, or a .jinja file"
    )
    chat_template_kwargs: str = param("{}", "arguments of the chat template, a JSON object")
    max_prompt_tokens: int = param(512, "drop and count prompts that are longer", above=0)
    cache_dir: str | None = param(None, "folder that caches tokenized prompts")
    on_changed_prompts: str = param(
        "stop",
        "what a resume does if --rl-prompts differ from the checkpoint's; restart begins at the "
        "first prompt",
        choices=("stop", "restart"),
    )

    def required_prompts(self) -> str:
        """Return `prompts`. Raises UsageError without them."""
        if self.prompts is None:
            remedy = "give a JSONL or Parquet file of prompts"
            raise UsageError("is missing", flag="--rl-prompts", remedy=remedy)
        return self.prompts
