"""With `--async-save` a file of a checkpoint is written by a process without a device.

Symptom: Megatron's writers in the background cannot be used. From 0.19 on its validation switches
`--async-save` off for the forked one. The persistent one does not start without a GPU.

Cause: a fork of a rank inherits CUDA contexts, connections of NCCL and gloo, and locks of threads
that it does not have; memory that training changes meanwhile is held twice. The persistent process
makes another CUDA context on the rank's device and reads tensors there by CUDA's IPC; tensors in
host memory it reads while training changes them.

Why safe: the rank copies its part in host memory, and a thread sends it to a fresh process that
writes it (`shard_file`), by the function of PyTorch that Megatron's writers call. That process has
no device, no connection and no lock of the rank, and ends with it. Plan, files, metadata and
finalization are Megatron's, which learns of a failure from the same results. Synchronous saves use
`streamed_saving`.

Upstream: nvidia-resiliency-ext, Megatron's default from 0.18 on, prefers a spawned process as well
(pull requests 107 and 108); it needs CUDA.

Drop when: Megatron has a writer that needs no device and takes copies in host memory.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require, require_parameters

_PROGRAM = Path(__file__).with_name("shard_file.py")
_ROOT = Path(__file__).resolve().parents[2]
_sender = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # writing to a pipe frees the GIL
_process: subprocess.Popen[bytes] | None = None
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


class StagedFile:
    """A file of which a copy is in host memory, to be written by this rank's process."""

    def __init__(self, path: Path, items: Sequence[tuple[Any, Any]]) -> None:
        """Copy the content. `items` are PyTorch's `WriteItem`, each with its tensor, on any device,
        or an `io.BytesIO`."""
        self.path = path
        contents = [data if torch.is_tensor(data) else data.getvalue() for _, data in items]
        self._contents = list(zip((item for item, _ in items), _copies(contents), strict=True))

    def start(self) -> Future[tuple[list[Any], str]]:
        """Start writing; the result is PyTorch's and the SHA-256 of the file, or RuntimeError.
        Raises OSError."""
        self.written = _sender.submit(_written, _writer_process(), self.path, self._contents)
        return self.written


def _copies(contents: Sequence[torch.Tensor | bytes]) -> list[torch.Tensor | bytes]:
    """Return the contents with copies of all tensors."""
    # Memory that is new to the process costs more time than the copy, on each core.
    threads = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if any(isinstance(content, torch.Tensor) and content.is_cuda for content in contents):
        threads = 1  # in the order of the device's work
    with ThreadPoolExecutor(min(threads, 8)) as pool:
        return list(pool.map(_copy, contents))


def _copy(content: torch.Tensor | bytes) -> torch.Tensor | bytes:
    if isinstance(content, bytes):
        return content
    tensor = content.detach()
    if tensor.is_cuda and "dequantize" in type(tensor).__dict__:  # Transformer Engine's
        tensor = tensor.dequantize()
    if tensor.is_cuda:
        return tensor.cpu().contiguous()
    return tensor.clone(memory_format=torch.contiguous_format)


def _writer_process() -> subprocess.Popen[bytes]:
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
    """Send a file to the process and return its answer. Frees each tensor once it is sent."""
    assert process.stdin is not None and process.stdout is not None
    items = [(item, each if isinstance(each, bytes) else _header(each)) for item, each in contents]
    answer: tuple[list[Any], str] | str
    try:
        pickle.dump((str(path), items), process.stdin)
        contents.reverse()
        while contents:
            tensor = contents.pop()[1]
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
