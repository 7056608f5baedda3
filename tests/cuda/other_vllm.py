"""What of our code does not fit another version of vLLM: python -m tests.cuda.other_vllm 0.33.0

Downloads the version's CUDA wheel (about 350 MB, kept in .cuda/vllm), and prints a table: names
that it lacks and signatures that differ (by tests/cuda/type_checker.py), engine arguments that it
does not take, and patches that do not fit its code. No GPU and no other torch are needed: nothing
is compiled or run. The exit code is 0, whatever is found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cuda import stack, type_checker
from tests.cuda.test_names import ACCEPTED, CODE, only, unaccepted


@dataclass(frozen=True)
class Difference:
    """One row of the table."""

    kind: str  # name or signature, engine argument, patch
    place: str  # of our code
    found: str

    def __str__(self) -> str:
        found = " ".join(self.found.split()).replace("|", "/")
        return f"| {self.kind} | {self.place} | {found} |"


def site_of(version: str) -> Path:
    """The folder with the version's files, without its libraries; downloaded once."""
    folder = stack.FOLDER / "vllm" / version
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
            made = Path(unpacked) / version
            stack.unpack("vllm", version, made)
            made.rename(folder)
    return folder


def differences(site: Path) -> list[Difference]:
    """What does not fit the vLLM of a folder."""
    light = stack.light()
    with tempfile.TemporaryDirectory() as folder:
        found = names_that_differ(site, light.site, Path(folder))
    rows = []
    for line in found:
        place, _, message = line.partition(": ")
        rows.append(Difference("name or signature", place, message))
    path = {**light.environment, "PYTHONPATH": f"{site}:{light.site}"}
    other = stack.Stack("light", light.python, site, path)
    try:
        said = other.run("fit_job")
    except RuntimeError as error:
        return [*rows, Difference("import", "tests/cuda/fit_job.py", str(error).splitlines()[-1])]
    return rows + [Difference(*row) for row in said]


def names_that_differ(site: Path, light: Path, folder: Path) -> list[str]:
    """Findings of the type checker. `light` has the other packages, `folder` is empty."""
    # Not the light folder itself: a module that the version lacks would be found there.
    other = only("transformer_engine", light, folder / "other")
    (folder / "check").mkdir()
    found = type_checker.check(CODE, [site, other], folder / "check", packages=["vllm"])
    return unaccepted(found, ACCEPTED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="as the package index has it, such as 0.33.0")
    rows = differences(site_of(parser.parse_args().version))
    print("| kind | our code | what differs |", "| --- | --- | --- |", *rows, sep="\n")
    if not rows:
        print("Nothing differs.", file=sys.stderr)


if __name__ == "__main__":
    main()
