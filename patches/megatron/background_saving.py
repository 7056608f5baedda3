"""With `--async-save` a file of a checkpoint is written by a process without a device.

Symptom: Megatron's writers in the background cannot be used. From 0.19 on its validation switches
`--async-save` off for the forked one. The persistent one does not start without a GPU.

Cause: a fork of a rank inherits CUDA contexts, connections of NCCL and gloo, and locks of threads
that it does not have; memory that training changes meanwhile is held twice. The persistent process
makes another CUDA context on the rank's device and reads tensors there by CUDA's IPC; tensors in
host memory it reads while training changes them.

Why safe: the rank copies its part into host memory that it keeps for the next save, since memory
that is new to a process costs ten times the copy. A thread sends it to a fresh process that writes
it (`shard_file`), by the function of PyTorch that Megatron's writers call. That process has
no device, no connection and no lock of the rank, and ends with it. Plan, files, metadata and
finalization are Megatron's, which learns of a failure from the same results. Synchronous saves use
`streamed_saving`.

Upstream: nvidia-resiliency-ext, Megatron's default from 0.18 on, prefers a spawned process as well
(pull requests 107 and 108); it needs CUDA.

Drop when: Megatron has a writer that needs no device and takes copies in host memory.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_rl.patches.registry import Patch, require, require_parameters

_PROGRAM = Path(__file__).with_name("shard_file.py")
_ROOT = Path(__file__).resolve().parents[2]
_sender = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # writing to a pipe frees the GIL
_process: subprocess.Popen[bytes] | None = None
free_buffers: list[mmap.mmap] = []  # of files that are written
_reservation: threading.Thread | None = None
_ALIGNMENT = 64  # bytes
digests: dict[Path, str] = {}  # SHA-256 of files that were written; whoever needs one removes it


def apply() -> None:
    """Replace how Megatron's writer prepares, starts and ends the writing of a rank's part."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
    from torch.distributed.checkpoint import filesystem

    writer = FileSystemWriterAsync
    require_parameters(writer.prepare_write_data, "self plan planner")
    require_parameters(writer.get_save_function_and_args, "self")
    require_parameters(writer.retrieve_write_results, "self")
    require_parameters(
        filesystem._write_item, "transforms stream data write_item storage_key serialization_format"
    )
    require(hasattr(filesystem, "_StorageWriterTransforms"), "torch's writer", "has no transforms")
    writer.prepare_write_data = _prepare
    writer.get_save_function_and_args = _start_and_args
    writer.retrieve_write_results = _results


def reserve(num_bytes: int) -> None:
    """Start to make the buffer of the first file, of at most `num_bytes`. A thread touches its
    pages while the rank does other work, so that the first copy need not."""
    global _reservation
    if _reservation is None:
        _reservation = threading.Thread(target=_reserve, args=(num_bytes,), daemon=True)
        _reservation.start()


def release() -> None:
    """Free the buffers of files that are written. The next save makes others."""
    if _reservation is not None:
        _reservation.join()
    free_buffers.clear()


def _reserve(num_bytes: int) -> None:
    buffer = _new_buffer(num_bytes)
    pages = np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE]
    for begin in range(0, len(pages), 1 << 14):  # without the GIL
        pages[begin : begin + (1 << 14)] = 0
    free_buffers.append(buffer)


class StagedFile:
    """A file of which a copy is in host memory, to be written by this rank's process."""

    def __init__(self, path: Path, items: Sequence[tuple[Any, Any]]) -> None:
        """Copy the content. `items` are PyTorch's `WriteItem`, each with its tensor, on any device,
        or an `io.BytesIO`."""
        self.path = path
        contents = [_plain(data) for _, data in items]
        tensors = [content for content in contents if isinstance(content, torch.Tensor)]
        self._buffer = _buffer_of(sum(map(_padded_bytes, tensors)))
        copies = iter(_copies(tensors, self._buffer))
        self._contents = [
            (item, content if isinstance(content, bytes) else next(copies))
            for (item, _), content in zip(items, contents, strict=True)
        ]

    def start(self) -> Future[tuple[list[Any], str]]:
        """Start writing; the result is PyTorch's and the SHA-256 of the file, or RuntimeError.
        Raises OSError."""
        self.written = _sender.submit(self._write, writer_process())
        return self.written

    def _write(self, process: subprocess.Popen[bytes]) -> tuple[list[Any], str]:
        try:
            return _written(process, self.path, self._contents)
        finally:
            self._contents.clear()
            free_buffers.append(self._buffer)


def _plain(content: Any) -> torch.Tensor | bytes:
    """Return the bytes of an `io.BytesIO`, or a tensor as it is saved."""
    if not torch.is_tensor(content):
        return bytes(content.getvalue())
    tensor = content.detach()
    if tensor.is_cuda and "dequantize" in type(tensor).__dict__:  # Transformer Engine's
        tensor = tensor.dequantize()
    return tensor


def _padded_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _buffer_of(num_bytes: int) -> mmap.mmap:
    """Return the smallest free buffer of this size, or a new one."""
    if _reservation is not None:
        _reservation.join()
    found = [buffer for buffer in free_buffers if len(buffer) >= num_bytes]
    if found:
        buffer = min(found, key=len)
        free_buffers.remove(buffer)
        return buffer
    return _new_buffer(num_bytes)


def _new_buffer(num_bytes: int) -> mmap.mmap:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return mmap.mmap(-1, max(num_bytes, _ALIGNMENT), flags=private)


def _copies(tensors: Sequence[torch.Tensor], buffer: mmap.mmap) -> list[torch.Tensor]:
    """Return copies of the tensors in the buffer, one after the other."""
    memory, begin, copies = torch.frombuffer(buffer, dtype=torch.uint8), 0, []
    for tensor in tensors:
        part = memory[begin : begin + tensor.nbytes]
        copies.append(part.view(tensor.dtype).view(tensor.shape))
        begin += _padded_bytes(tensor)
    # Pages of a new buffer cost more time than the copy, on each core.
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if any(tensor.is_cuda for tensor in tensors):
        threads = 1  # in the order of the device's work
    with ThreadPoolExecutor(min(threads, 8)) as pool:
        return list(pool.map(torch.Tensor.copy_, copies, tensors))


def writer_process() -> subprocess.Popen[bytes]:
    """Return this rank's process, started anew if it has ended."""
    global _process
    if _process is None or _process.poll() is not None:
        _process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM), str(_ROOT), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals to the job's group are for ranks, which wait for this process.
            process_group=0,
        )
    return _process


def _written(
    process: subprocess.Popen[bytes], path: Path, contents: list[tuple[Any, torch.Tensor | bytes]]
) -> tuple[list[Any], str]:
    """Send a file to the process and return its answer."""
    assert process.stdin is not None and process.stdout is not None
    items = [(item, each if isinstance(each, bytes) else _header(each)) for item, each in contents]
    answer: tuple[list[Any], str] | str
    try:
        pickle.dump((str(path), items), process.stdin)
        for _, tensor in contents:
            if isinstance(tensor, torch.Tensor) and tensor.nbytes:
                process.stdin.write(tensor.view(-1).view(torch.uint8).numpy().data)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # its answer says why, if there is one
    try:
        answer = pickle.load(process.stdout)
    except EOFError:
        answer = f"its process ended with {process.wait()}"
    if isinstance(answer, str):
        process.wait()
        raise RuntimeError(f"{path} could not be written: {answer}")
    return answer


def _header(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _prepare(self: Any, plan: Any, planner: Any) -> None:
    """Replace `prepare_write_data`: copy this rank's part."""
    from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX

    path = Path(self.checkpoint_dir) / f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    items = [(item, planner.resolve_data(item)) for item in plan.items]
    self.staged = StagedFile(path, items) if items else None


def _start_and_args(self: Any) -> tuple[Any, None, list[Any]]:
    """Replace `get_save_function_and_args`: the function starts the writing and returns its
    future."""
    return None if self.staged is None else self.staged.start, None, []


def _results(self: Any) -> Any:
    """Replace `retrieve_write_results`."""
    from torch.distributed.checkpoint.api import _wrap_exception

    try:
        if self.staged is None:
            return []
        results, digests[self.staged.path] = self.staged.written.result()
        return results
    except RuntimeError as error:
        return _wrap_exception(error)


PATCH = Patch(
    "megatron.background_saving",
    "with --async-save a process without a device writes a file of a checkpoint",
    apply,
)
