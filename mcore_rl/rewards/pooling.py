"""The reward `pooling`: a reward model behind vLLM's own server.

    vllm serve MODEL --runner pooling

    POST /pooling  {"input": ["prompt and response", ...], "use_activation": false, ...}
    {"data": [{"index": 0, "data": [0.7]}, ...], ...}

The text of a sample is its prompt followed by its response, without a chat template. Models with
one score for a sequence (`...ForSequenceClassification` with one label; vLLM's task "classify")
answer with a list of one number, which is the reward. Models with one for each token (vLLM's task
"token_classify") answer with a list of such lists, and the reward is the last token's. Both give
the model's logit, whatever activation the server would put on it by default. Anything else, as the
scores of several classes, has no single number, and fails.

Written for vLLM 0.32. Its `--api-key` does not guard /pooling: a server that others can reach needs
a proxy before it, and `--rl-reward-pooling-header-env` holds what that wants to see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.http import Dialect


def _texts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "input": [r.prompt.text + r.text for r in rollouts],
        "encoding_format": "float",
        "use_activation": False,
    }


def _scores(answer: Any) -> list[Any]:
    return [_score(entry["data"]) for entry in answer["data"]]


def _score(data: Any) -> Any:
    last = data[-1]
    scores = last if isinstance(last, list) else data
    if not isinstance(data, list) or len(scores) != 1:
        raise ValueError("not one score")
    return scores[0]


POOLING_DIALECT = Dialect(
    'that of vLLM\'s /pooling with one score: {"data": [{"data": [number]}, ...]} for a sequence '
    'or {"data": [{"data": [[number], ...]}, ...]} for its tokens',
    _texts,
    _scores,
    max_answer_bytes=1 << 24,  # a number for each token
)
