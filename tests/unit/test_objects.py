"""Objects are sent over gloo, whatever the backend of the world."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mcore_rl.common import objects

PACKAGE = Path(objects.__file__).parent
# Functions of torch.distributed that send objects by the backend of the world.
FORBIDDEN = ("_object", "_object_list", "barrier")


def calls_of(source: str) -> Iterator[str]:
    """Names that are called or passed on as attributes, and those imported by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.endswith(FORBIDDEN):
            owner = ast.unparse(node.value)
            if owner == "dist" or owner.endswith(("distributed", "distributed_c10d")):
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from (alias.name for alias in node.names if alias.name.endswith(FORBIDDEN))


def test_only_objects_module_calls_object_collectives() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob("*.py")
        if (names := list(calls_of(path.read_text())))
    }
    assert found.keys() == {"objects.py"}, found
    assert {name.removeprefix("dist.") for name in found["objects.py"]} == {
        "all_gather_object",
        "gather_object",
        "broadcast_object_list",
        "barrier",
    }, "what it does itself is given a group"
    assert list(calls_of("from torch.distributed import all_gather_object"))


@pytest.fixture
def without_cpu() -> Iterator[None]:
    """A world of one rank whose own backend takes no tensor on the host, as NCCL's."""
    place = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("cuda:gloo", **place, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("again", [False, True])  # each world has a group of its own
def test_objects_need_only_ranks_of_world(without_cpu: None, again: bool) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        dist.all_gather_object([None], 1)
    with pytest.raises(RuntimeError):
        dist.barrier()
    assert objects.all_gather({"a": 1}) == [{"a": 1}]
    assert objects.broadcast([2]) == [2]
    assert objects.on_any(True) and not objects.on_any(False)
    objects.barrier()
    group = objects.start()
    assert group is objects.start() and dist.get_backend(group) == "gloo"
    assert objects.timeout_of_world() == timedelta(seconds=77)
