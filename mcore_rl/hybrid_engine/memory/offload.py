"""Offload of training's device memory to the host while rollout runs, and back bit for bit.

Storages are emptied and refilled in place. Views of a buffer, a `main_grad`, tied weights, and main
parameters that another object references all keep their identity and are valid again after
`onload`. They must not be touched in between: reading one raises in torch, writing one
kills the process.

Megatron's own helpers do not suffice. The optimizer's replaces `p.data`, which detaches a float32
parameter from its buffer, copies through pageable memory and cannot begin early. The gradients'
can only drop them.

    kind         content                                         while offloaded
    parameters   the model's                                     host copy
    optimizer    float32 main parameters, moments                host copy
    gradients    data-parallel buffers and the optimizer's       nothing (zero afterwards), or a
                 copies                                          host copy with `keep_gradients`

While engines start, all kinds are offloaded, whatever the flag says, because vLLM needs its share
of the device free then. Tensors that cannot be offloaded stay and are logged.

Without CUDA the device is host memory, too. The same code runs there, so that tests exercise it,
but a copy saves nothing: only dropped gradients do, and `OffloadStats.saved` counts only these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.memory.arenas import move_to_arenas
from mcore_rl.hybrid_engine.memory.host_memory import HostBuffer
from mcore_rl.hybrid_engine.memory.usage import give_back_cached

logger = logging.getLogger(__name__)

# The first kind owns a storage that several share, so that kept data are never dropped with a
# gradient. Also the order of the way back: log-probs need the parameters, the update the rest.
KINDS = ("parameters", "optimizer", "gradients")
SHORT_NAMES = {"params": "parameters", "grads": "gradients"}  # on the command line

Tensors = Mapping[str, Iterable[tuple[str, torch.Tensor]]]  # kind -> (name, tensor)


# Megatron's flags that fix addresses, by destination: the kinds concerned, and the reason.
_GRAPHS = (frozenset(KINDS), "captures the addresses of all that training holds in CUDA graphs")
_REGISTERED = (frozenset({"gradients", "parameters"}), "registers these buffers with NCCL")
_QUANTISED = (frozenset({"parameters"}), "keeps parameters in a form that cannot be emptied")
_CLASHES: dict[str, tuple[frozenset[str], str]] = {
    "cuda_graph_impl": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "optimizer_cuda_graph": _GRAPHS,
    "nccl_ub": _REGISTERED,
    "fp8_param_gather": _QUANTISED,
    "fp4_param_gather": _QUANTISED,
}
_FLAGS = {"nccl_ub": "use-nccl-ub"}  # flags whose name differs from the destination's


def _forbidden(values: Mapping[str, Any]) -> dict[str, str]:
    """Return kind -> the destination of the flag in `values` that fixes its addresses."""
    return {
        kind: dest
        for dest, (kinds, _) in _CLASHES.items()
        if values.get(dest) not in (None, False, "none")
        for kind in kinds
    }


def kinds_at_start(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the kinds that leave the device while engines start; the others keep their memory.

    `values` are Megatron's flags by destination. Kinds whose addresses a flag fixes from the
    beginning stay. Graphs are captured in the first update, after the engines have started.
    """
    captured_later = {dest for dest, clash in _CLASHES.items() if clash is _GRAPHS}
    begun = {dest: value for dest, value in values.items() if dest not in captured_later}
    return frozenset(KINDS) - _forbidden(begun).keys()


def offload_kinds(
    text: str, values: Mapping[str, Any], *, has_cuda: bool, flag: str = "--rl-offload"
) -> frozenset[str]:
    """Return the kinds that a flag's value selects: "auto", "none", or some of KINDS with commas.

    SHORT_NAMES are aliases. "auto" selects gradients and optimizer with a GPU and nothing without
    one, except kinds that Megatron's flags (`values`, by destination) do not allow. Raises
    UsageError for an unknown kind, and for one that is named and not allowed.
    """
    forbidden = {
        kind: f"--{_FLAGS.get(dest, dest.replace('_', '-'))}, which {_CLASHES[dest][1]}"
        for kind, dest in _forbidden(values).items()
    }
    if text == "auto":
        pays_off = {"gradients", "optimizer"} if has_cuda else set()
        return frozenset(pays_off - forbidden.keys())
    named = [] if text == "none" else [kind.strip() for kind in text.split(",")]
    wanted = frozenset(SHORT_NAMES.get(kind, kind) for kind in named)
    for kind in sorted(wanted):
        if kind not in KINDS:
            raise UsageError(
                f"names {kind!r}, which is not one of {', '.join(sorted(KINDS))}",
                flag=f"{flag} {text}",
                remedy="give some of these separated by commas, or auto, or none",
            )
        if kind in forbidden:
            raise UsageError(
                f"does not go with {forbidden[kind]}",
                flag=f"{flag} {text}",
                remedy="drop one of the two",
            )
    return wanted


@dataclass(slots=True)
class OffloadStats:
    """One offload and its way back on this rank: bytes of each kind that was taken off.

    A kind whose tensors are not allocated yet, such as moments before the first update, has 0.

    Example: `OffloadStats(moved={"optimizer": 8 << 30}, dropped={"gradients": 4 << 30},
    saved={...})`.
    """

    moved: dict[str, int] = field(default_factory=dict)  # copied to the host
    dropped: dict[str, int] = field(default_factory=dict)  # gradients that were not kept
    saved: dict[str, int] = field(default_factory=dict)  # memory freed in between

    @property
    def moved_bytes(self) -> int:
        return sum(self.moved.values())

    @property
    def dropped_bytes(self) -> int:
        return sum(self.dropped.values())

    @property
    def saved_bytes(self) -> int:
        return sum(self.saved.values())

    def of(self, kinds: frozenset[str]) -> OffloadStats:
        """Return the stats of `kinds`."""

        def chosen(sizes: Mapping[str, int]) -> dict[str, int]:
            return {kind: size for kind, size in sizes.items() if kind in kinds}

        return OffloadStats(chosen(self.moved), chosen(self.dropped), chosen(self.saved))


@dataclass(slots=True)
class _Segment:
    """One offloaded storage."""

    kind: str
    name: str  # of one of its tensors
    storage: torch.UntypedStorage
    num_bytes: int
    start: int | None  # in the kind's host buffer; None: not kept
    is_onloaded: bool = False

    @property
    def end(self) -> int:
        assert self.start is not None
        return self.start + self.num_bytes


class Offloader:
    """Offload of `what` (some of KINDS) from the device to the host and back. Local to this rank.

    `at_start` are the kinds that leave the device while engines start (`kinds_at_start`).

    `find` is called before each offload, because an optimizer creates its state in its first step.
    New state moves into `arenas` of at most `chunk_bytes`, so that it leaves in a few copies.
    Tensors that are not on `device` stay in place (some optimizers keep theirs on the host). With
    `pin`, host memory is page-locked on CUDA and kept from one switch to the next, because locking
    is slow. Without `pin` or CUDA, it is freed on the way back.

    Raises RuntimeError for offloading a kind twice, bringing back when nothing is offloaded, a
    tensor whose storage cannot be emptied, and a storage that was refilled in between.
    """

    def __init__(
        self,
        find: Callable[[], Tensors],
        what: frozenset[str],
        *,
        device: torch.device,
        at_start: frozenset[str] = frozenset(KINDS),
        keep_gradients: bool = False,
        pin: bool = True,
        chunk_bytes: int = 256 << 20,
    ) -> None:
        assert what | at_start <= set(KINDS), f"{sorted(what | at_start)}: not all among {KINDS}"
        self.what, self._at_start = what, at_start
        self.stats = OffloadStats()
        self._find, self._device, self._chunk_bytes = find, device, chunk_bytes
        self._on_cuda = device.type == "cuda"
        self._kept = set(KINDS) if keep_gradients else set(KINDS) - {"gradients"}
        # Page-locking takes longer than a copy: not worth it for kinds that leave only once.
        pinned = what if pin and self._on_cuda else frozenset()
        self._host = {kind: HostBuffer(kind in pinned, chunk_bytes) for kind in KINDS}
        self._offloaded: dict[str, list[_Segment]] = {}
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None

    @property
    def offloaded(self) -> frozenset[str]:
        """The kinds that are offloaded, in full or in part."""
        return frozenset(self._offloaded)

    @property
    def host_bytes(self) -> int:
        """Host memory currently held for copies."""
        return sum(buffer.num_bytes for buffer in self._host.values())

    def offload(self, *kinds: str) -> None:
        """Take the kinds of `what` among `kinds` (default: all) off the device.

        Waits for the device. If host memory cannot be allocated, nothing changes.
        """
        wanted = [kind for kind in KINDS if kind in self.what and kind in (kinds or KINDS)]
        if again := self._offloaded.keys() & set(wanted):
            raise RuntimeError(f"{_rank()}{', '.join(sorted(again))} are offloaded already")
        self._offload_segments(wanted, self._segments(wanted))

    @contextmanager
    def all_offloaded(self) -> Iterator[None]:
        """Offload all of `at_start` for the duration of the context, whatever `what` is.

        For the start of an engine, which needs its share of the device free. Tensors whose storage
        cannot be emptied stay, and their size is logged. Afterwards everything is back bit for bit,
        except gradients that are not kept; after a failure, as much as fits.
        """
        if self._offloaded:
            raise RuntimeError(
                f"{_rank()}{', '.join(sorted(self._offloaded))} are offloaded already"
            )
        wanted = [kind for kind in KINDS if kind in self._at_start]
        stays: dict[str, int] = {}
        self._offload_segments(wanted, self._segments(wanted, stays))
        give_back_cached()
        self._log_start(stays)
        try:
            yield
        except BaseException:
            try:
                self._onload_all()
            except Exception:  # the first failure is raised
                logger.debug("%straining's state could not be brought back", _rank(), exc_info=True)
            raise
        self._onload_all()

    def _onload_all(self) -> None:
        if self._offloaded:
            self.onload()

    def _log_start(self, stays: Mapping[str, int]) -> None:
        # Without CUDA a copy lies in the same memory.
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        text = ""
        if stays:
            more = f" and {len(stays) - 1} more tensors" if len(stays) > 1 else ""
            size = sum(stays.values()) / 1e9
            text = f"; {size:.1f} GB cannot leave: {next(iter(stays))}{more}"
        logger.log(
            logging.INFO if self._on_cuda and is_first else logging.DEBUG,
            "[Offload] of this rank, while engines start: %.1f GB off the device%s",
            (self.stats.moved_bytes + self.stats.dropped_bytes) / 1e9,
            text,
        )

    def _offload_segments(self, wanted: list[str], segments: list[_Segment]) -> None:
        if not self._offloaded:
            self.stats = OffloadStats()
        for kind in wanted:
            self._host[kind].reserve(
                max((s.end for s in segments if s.kind == kind and s.start is not None), default=0)
            )
        self._offloaded.update({kind: [s for s in segments if s.kind == kind] for kind in wanted})
        for segment in segments:
            self._copy(segment, to_host=True)
            if not self._on_cuda:  # at once: the copy lies in the same memory
                segment.storage.resize_(0)
        if self._on_cuda and segments:
            torch.cuda.current_stream(self._device).synchronize()  # wait for the copies
            for segment in segments:
                segment.storage.resize_(0)
            give_back_cached()
        self._count(wanted, segments)

    def prefetch(self, reserve_bytes: int = 1 << 30) -> int:
        """Begin to bring back what fits, while the last responses are being generated.

        On CUDA the copies run on a separate stream, concurrently with the engine's kernels, as many
        as leave `reserve_bytes` of the device free. Without CUDA everything is copied before this
        returns. Returns the bytes being copied. May be called again when more memory is free;
        `onload` brings back the rest, and nothing may be touched before that.
        """
        self._require_offloaded("prefetch")
        free = torch.cuda.mem_get_info(self._device)[0] - reserve_bytes if self._on_cuda else None
        fitting = []
        for segment in self._not_onloaded():
            if segment.start is None:
                continue  # `onload` fills in zeros
            if free is not None:
                free -= segment.num_bytes
                if free < 0:
                    break
            fitting.append(segment)
        self._onload_segments(fitting)
        return sum(segment.num_bytes for segment in fitting)

    def onload(self, *kinds: str) -> None:
        """Bring `kinds` (default: all) back; later work on the caller's stream sees them."""
        self._require_offloaded("onload")
        coming = [kind for kind in KINDS if kind in self._offloaded and kind in (kinds or KINDS)]
        self._onload_segments([s for s in self._not_onloaded() if s.kind in coming])
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for kind in coming:
            self._host[kind].release()
            del self._offloaded[kind]

    def _require_offloaded(self, call: str) -> None:
        if self.what and not self._offloaded:
            raise RuntimeError(f"{_rank()}{call} was called, but nothing is offloaded")

    def _not_onloaded(self) -> Iterator[_Segment]:
        for kind in KINDS:
            yield from (s for s in self._offloaded.get(kind, ()) if not s.is_onloaded)

    def _segments(self, kinds: list[str], stays: dict[str, int] | None = None) -> list[_Segment]:
        """Return the storages of `kinds`, each once, with their places in host memory.

        Storages that cannot be emptied are added to `stays` (name -> bytes); without `stays` they
        raise RuntimeError.
        """
        seen = {s.storage._cdata for segments in self._offloaded.values() for s in segments}
        ends = dict.fromkeys(KINDS, 0)
        segments = []
        tensors = {kind: list(named) for kind, named in self._find().items()} if kinds else {}
        if "optimizer" in kinds:
            state = [tensor for _, tensor in tensors["optimizer"]]
            on_device = [tensor for tensor in state if tensor.device.type == self._device.type]
            move_to_arenas(on_device, arena_bytes=self._chunk_bytes)
        for kind in KINDS if kinds else ():
            for name, tensor in tensors[kind]:
                storage = tensor.untyped_storage()
                if storage._cdata in seen or tensor.device.type != self._device.type:
                    continue
                seen.add(storage._cdata)
                if kind not in kinds or storage.nbytes() == 0:
                    continue
                fault = _why_not_plain(name, tensor)
                if fault is not None and stays is not None:
                    stays[name] = storage.nbytes()
                    continue
                if fault is not None:
                    raise RuntimeError(f"{_rank()}{fault}")
                start = ends[kind] if kind in self._kept else None
                segments.append(_Segment(kind, name, storage, storage.nbytes(), start))
                ends[kind] += -(-storage.nbytes() // 512) * 512  # aligned for the copy engine
        return segments

    def _onload_segments(self, segments: list[_Segment]) -> None:
        for segment in segments:
            if segment.storage.nbytes() != 0:
                raise RuntimeError(
                    f"{_rank()}the storage of {segment.name} ({segment.kind}) holds "
                    f"{segment.storage.nbytes()} bytes, expected 0: it was refilled while offloaded"
                )
        if self._stream is None:
            for segment in segments:
                segment.storage.resize_(segment.num_bytes)
                self._copy(segment, to_host=False)
                segment.is_onloaded = True
                if segment.start is not None:  # host and device are the same memory here
                    self._host[segment.kind].release_before(segment.end)
            return
        # Memory belongs to the stream it was allocated on, and kernels there may still use it:
        # allocate on the caller's stream, let the copies wait for it, and wait in `onload`.
        try:
            for segment in segments:
                segment.storage.resize_(segment.num_bytes)
        except torch.OutOfMemoryError:
            for segment in segments:
                segment.storage.resize_(0)  # all are still offloaded: the caller may try again
            raise
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for segment in segments:
                self._copy(segment, to_host=False)
                segment.is_onloaded = True

    def _copy(self, segment: _Segment, *, to_host: bool) -> None:
        device = _bytes_of(segment.storage)
        if segment.start is None:
            if not to_host:
                device.zero_()
            return
        done = 0
        for piece in self._host[segment.kind].pieces(segment.start, segment.num_bytes):
            part = device[done : done + len(piece)]
            source, target = (part, piece) if to_host else (piece, part)
            target.copy_(source, non_blocking=True)
            done += len(piece)

    def _count(self, kinds: list[str], segments: list[_Segment]) -> None:
        for kind in kinds:
            taken = [s for s in segments if s.kind == kind]
            dropped = sum(s.num_bytes for s in taken if s.start is None)
            moved = sum(s.num_bytes for s in taken if s.start is not None)
            self.stats.dropped[kind], self.stats.moved[kind] = dropped, moved
            self.stats.saved[kind] = dropped + (moved if self._on_cuda else 0)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _why_not_plain(name: str, tensor: torch.Tensor) -> str | None:
    """Return why a tensor's storage cannot be emptied, or None if it can."""
    if type(tensor.detach()) is not torch.Tensor:
        return (
            f"{name} is a {type(tensor).__name__}, expected a plain tensor: quantised weights keep "
            "their bytes elsewhere and cannot be offloaded"
        )
    if not tensor.untyped_storage().resizable():
        return (
            f"the memory of {name} cannot be freed: it is not torch's own, or numpy has a view of "
            "it"
        )
    return None


def _rank() -> str:
    return f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
