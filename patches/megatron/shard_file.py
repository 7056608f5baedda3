"""The program that writes files of checkpoints for `background_saving`; a process of its own.

    python shard_file.py ROOT PARENT

For each file it reads from its standard input a pickled list of PyTorch's `WriteItem`, each with
bytes or with dtype and shape of a tensor, whose bytes follow in this order. It writes the file as
PyTorch's own writer does, tensor by tensor, reads it back, and answers on its standard output with
the pickled list of PyTorch's `WriteResult` and the file's SHA-256, or the text of an error. It
touches no device, has no connection to other ranks, and ends with its parent.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)

Answer = tuple[list[Any], str]


def write(path: str, items: Sequence[tuple[Any, Any]], source: io.BufferedReader) -> Answer:
    """Write, flush and read a file; return PyTorch's results and its SHA-256. Raises OSError, or
    EOFError if the tensors from `source` end early."""
    results = []
    with open(path, "wb") as stream:
        for item, content in items:
            is_bytes = isinstance(content, bytes)
            data: Any = io.BytesIO(content) if is_bytes else _received(source, *content)
            name, kind = os.path.basename(path), SerializationFormat.TORCH_SAVE
            transforms = _StorageWriterTransforms()
            results.append(_write_item(transforms, stream, data, item, name, kind))
        stream.flush()
        os.fsync(stream.fileno())
    with open(path, "rb") as written:
        return results, hashlib.file_digest(written, "sha256").hexdigest()


def _received(
    source: io.BufferedReader, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.nbytes:
        room = tensor.view(-1).view(torch.uint8).numpy().data
        if source.readinto(room) < tensor.nbytes:
            raise EOFError(f"the tensors of a file end after {tensor.nbytes} bytes of one")
    return tensor


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    from mcore_rl.isolation.rights import die_with_parent

    die_with_parent(int(sys.argv[2]))
    torch.set_num_threads(1)
    source = open(sys.stdin.fileno(), "rb")  # until this process ends
    while source.peek(1):
        answer: Answer | str
        try:
            path, items = pickle.load(source)
            answer = write(path, items, source)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        if isinstance(answer, str):
            break  # what follows are the rest of the tensors


if __name__ == "__main__":
    main()
