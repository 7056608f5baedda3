"""A teacher on a vLLM server, as a role on the actor's ranks: each rank sends its share of the
samples. See `mcore_rl.hybrid_engine.remote.prompt_scores`."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import rows_to_tokens
from mcore_rl.common import objects
from mcore_rl.common.addresses import header_from
from mcore_rl.hybrid_engine.remote.prompt_scores import PromptScores, ScoringFailed
from mcore_rl.model.teacher import TeacherOptions
from mcore_rl.trainer.roles.forward import Divided
from mcore_rl.trainer.roles.samples import tensors_to_table
from mcore_rl.trainer.roles.teacher import Scores, TeacherRole


class NoTeacherLeft(Exception):
    """A teacher's server has not scored a step's samples within the time."""


class TeacherServer(TeacherRole):
    """A teacher's server. All methods are collective over the actor's ranks."""

    def __init__(self, url: str, options: TeacherOptions) -> None:
        header = header_from(options.teacher_header_env, "--rl-teacher-header-env")
        self._client = PromptScores(url, header)
        self._wait_seconds = 60 * options.teacher_wait_minutes
        self._lengths = np.empty(0, np.int64)
        self._wanted = Shares((), ())

    def divide(self, /, **numbers: torch.Tensor) -> Divided:
        self._lengths = tensors_to_table(numbers).lengths
        world_size = dist.get_world_size()
        # In turn by length, so that ranks send about the same number of tokens.
        order = np.argsort(-self._lengths, kind="stable")
        parts = tuple(np.sort(order[rank::world_size]) for rank in range(world_size))
        self._wanted = Shares(parts, tuple((rank,) for rank in range(world_size)))
        return {"wanted": self._wanted}

    def scores(self, *, tokens: RowExchange, asked_by: Shares) -> Scores:
        """Raises NoTeacherLeft on all ranks if the server does not score all samples in time."""
        mine = self._wanted.of(dist.get_rank())
        samples = [each.token_ids for each in rows_to_tokens(tokens.rows, self._lengths[mine])]
        found, failure = [np.empty(0, np.float32)], None
        try:
            found += self._client.log_probs(samples, self._wait_seconds)
        except ScoringFailed as error:
            failure = str(error)
        if failures := [each for each in objects.all_gather(failure) if each]:
            raise NoTeacherLeft(failures[0])
        rows = np.concatenate(found)
        return {"scores": RowExchange(self._lengths, self._wanted, asked_by, rows[:, None])}
