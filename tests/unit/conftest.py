"""Fixtures of the unit tests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from mcore_rl import config as options
from mcore_rl.algorithms import recipes, registry
from mcore_rl.algorithms.registry import find_policy_loss
from mcore_rl.common import user_code
from mcore_rl.data import user_prompts
from mcore_rl.environments import interface as environments
from mcore_rl.model import families
from mcore_rl.observe import user_metrics
from mcore_rl.rewards import functions as reward_functions


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank, whose own backend takes no tensor on the host, as NCCL's."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def restored_tables() -> Iterator[None]:
    """What a test imports from a user's file is known to no other test."""
    for module in environments.SHIPPED.values():  # these register once in a process
        importlib.import_module(module)
    options.resolved_recipe.cache_clear()
    find_policy_loss("ppo_clip")  # the built-in ones come with the first look-up
    tables: list[dict] = [
        registry.ESTIMATORS,
        registry.POLICY_LOSSES,
        registry.GROUP_FILTERS,
        registry.SAMPLERS,
        user_code.IMPORTED,
        recipes.RECIPES,
        families.FAMILIES,
        user_metrics.METRICS,
        user_prompts.SOURCES,
        reward_functions.BY_NAME,
        environments.BY_NAME,
    ]
    saved = [dict(table) for table in tables]
    yield
    # In place: modules hold them by name.
    for table, entries in zip(tables, saved, strict=True):
        table.clear()
        table.update(entries)
