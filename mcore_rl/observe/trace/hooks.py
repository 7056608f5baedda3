"""While steps are traced: clocks around collectives and around Megatron's passes.

Nothing of this is installed otherwise. Functions are replaced by name in `torch.distributed` and
wherever a module of Megatron or mcore_rl holds the same function under a name of its own (Megatron
keeps `dist_all_gather_func` and others); Megatron's stand-in for torch.distributed on a machine
without CUDA looks names up in the real one, call by call. All of it is put back at the end.

- Blocking collectives are timed as they are called, asynchronous ones where they are waited for,
  in `Work.wait`. `isend` and `irecv` only launch, and torch compares them by identity: they stay.
- Forward and backward: `forward_step` and `backward_step` of Megatron's schedules, which hold the
  loss, the release of the output and the gradient's hand-on as well. Hooks of autograd would see
  neither where a backward pass begins on the host nor the passes of a stage without a loss.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from mcore_rl.observe.trace.table import MODEL, Span

COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base"),
    *("all_gather_coalesced", "all_gather_object", "gather", "gather_object"),
    *("all_to_all", "all_to_all_single", "scatter", "scatter_object_list"),
    *("broadcast", "broadcast_object_list", "barrier", "monitored_barrier"),
    *("batch_isend_irecv", "send", "recv", "send_object_list", "recv_object_list"),
)
_LAUNCHES = ("batch_isend_irecv",)  # asynchronous without saying so
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_PASSES = {
    "forward_step": "forward",
    "backward_step": "backward",
    "backward_step_multimodule": "backward",
}
_HOLDERS = ("megatron.", "mcore_rl.")


class Clock(Protocol):
    """What the hooks tell of; none of its methods raises."""

    def begin(self, name: str, category: str) -> Span | None: ...

    def begin_collective(self, name: str, *, of_world: bool, launches: bool) -> Span | None: ...

    def end(self, span: Span | None, *, launches: bool = False) -> None: ...


class Hooks:
    """The clocks, between `install` and `remove`. Both may be called again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._undo: list[tuple[Any, str, Any, Any]] = []  # holder, name, original, replacement
        # What is waited for, by the object that a launch returned.
        self._launched: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Put the clocks in place; whatever fails, nothing stays replaced."""
        import torch.distributed as dist

        try:
            replaced: dict[int, tuple[Any, Any]] = {}
            for name in COLLECTIVES:
                original = getattr(dist, name, None)
                if original is not None:
                    replaced[id(original)] = original, self._timed_collective(name, original)
            schedules = sys.modules.get(SCHEDULES)
            for function, name in _PASSES.items():
                original = getattr(schedules, function, None)
                if original is not None:
                    replaced[id(original)] = original, self._timed_pass(name, original)
            for holder, name, value in _held(dist):
                original, replacement = replaced.get(id(value), (None, None))
                if original is value and original is not None:
                    self._replace(holder, name, original, replacement)
            wait = vars(dist.Work)["wait"]
            self._replace(dist.Work, "wait", wait, self._timed_wait(wait))
        except BaseException:
            self.remove()
            raise

    def _replace(self, holder: Any, name: str, original: Any, replacement: Any) -> None:
        setattr(holder, name, replacement)
        self._undo.append((holder, name, original, replacement))

    def remove(self) -> None:
        """Put everything back; what somebody else has replaced since is left to them."""
        while self._undo:
            holder, name, original, replacement = self._undo.pop()
            if vars(holder).get(name) is replacement:
                setattr(holder, name, original)

    def _timed_collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        from mcore_rl.common import objects

        positions = {parameter: i for i, parameter in enumerate(_parameters(original))}

        def argument(parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            at = positions.get(parameter, len(args))
            return args[at] if at < len(args) else kwargs.get(parameter)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            launches = name in _LAUNCHES or bool(argument("async_op", args, kwargs))
            group = argument("group", args, kwargs)
            whole = "group" in positions and objects.is_whole_world(group)
            span = self._clock.begin_collective(
                name, of_world=whole and not launches, launches=launches
            )
            try:
                result = original(*args, **kwargs)
            finally:
                self._clock.end(span, launches=launches)
            if launches:
                for work in result if isinstance(result, list) else [result]:
                    with contextlib.suppress(TypeError):  # None, and what nothing can refer to
                        self._launched[work] = name
            return result

        return timed

    def _timed_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            launched = self._launched.get(work)  # not known of isend and irecv
            name = "wait" if launched is None else f"wait {launched}"
            span = self._clock.begin_collective(name, of_world=False, launches=False)
            try:
                return original(work, *args, **kwargs)
            finally:
                self._clock.end(span)

        return wait

    def _timed_pass(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            span = self._clock.begin(name, MODEL)
            try:
                return original(*args, **kwargs)
            finally:
                self._clock.end(span)

        return timed


def _held(dist: Any) -> Iterator[tuple[Any, str, Any]]:
    """Everything that may be one of the functions: (module, name, value)."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_HOLDERS)]
    for module in [dist, *modules]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            yield module, name, value


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C
        return ()
