"""Parts: the wheels that a machine without a registry lacks, as files of a limited size.

    python scripts/gpu_trial/parts.py FOLDER STATE    installs what has arrived, into this Python;
                                                      STATE remembers, and keeps earlier parts

`pack.py` writes a folder of `parts.json` and `part-1` to `part-N`. The parts are one stream of
bytes, all wheels one after the other, cut at equal distances: a wheel can be installed as soon as
its parts are there. Wheels are in groups, the group that is needed first at the front:

    part-1             part-2             part-3
    |megatron| engine ...                      |

Only the standard library is used: this runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "parts.json"
KEPT, _INSTALLED = "parts", "installed.json"  # in the folder STATE
MEGATRON, ENGINE = "megatron", "engine"
# What the groups bring that stages need, as facts.py names it.
PROVIDES = {MEGATRON: ("megatron.training", "pytest"), ENGINE: ("vllm",)}


@dataclass(frozen=True)
class Wheel:
    """A wheel in the stream, for example

    Wheel("plotly-7.1.0-py3-none-any.whl", "megatron", 9_700_000, "ab12...")
    """

    file: str
    group: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The stream of wheels, and where it is cut, for a machine with this `python` and `torch`."""

    python: str
    torch: str
    part_bytes: int
    part_sha256: tuple[str, ...]
    wheels: tuple[Wheel, ...]

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read `parts.json`; raises OSError, and ValueError if it is damaged."""
        fields = json.loads((folder / MANIFEST).read_text())
        wheels = tuple(Wheel(**wheel) for wheel in fields.pop("wheels"))
        return cls(**{**fields, "part_sha256": tuple(fields["part_sha256"])}, wheels=wheels)

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=1) + "\n")

    def placed(self) -> Iterator[tuple[Wheel, int, range]]:
        """Yield each wheel with its place in the stream and the numbers of its parts."""
        start = 0
        for wheel in self.wheels:
            last = (start + wheel.num_bytes - 1) // self.part_bytes
            yield wheel, start, range(start // self.part_bytes + 1, last + 2)
            start += wheel.num_bytes

    def parts_of(self, group: str) -> list[int]:
        """Return the numbers of the parts that have wheels of a group."""
        return sorted(
            {n for wheel, _, parts in self.placed() if wheel.group == group for n in parts}
        )


def arrived(folder: Path, manifest: Manifest) -> list[int]:
    """Return the numbers of the parts that are there. Raises ValueError for a damaged one."""
    numbers = []
    for number, expected in enumerate(manifest.part_sha256, start=1):
        part = folder / f"part-{number}"
        if part.is_file():
            if hashlib.sha256(part.read_bytes()).hexdigest() != expected:
                raise ValueError(f"{part} is damaged: copy it again")
            numbers.append(number)
    return numbers


def waiting(folder: Path) -> dict[str, str]:
    """Return the parts that are still to come, as text, by the module that they bring; nothing
    without a list of parts."""
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = Manifest.read(folder)
    there = {n for n in range(1, len(manifest.part_sha256) + 1) if (folder / f"part-{n}").is_file()}
    waits = {}
    for group, modules in PROVIDES.items():
        if to_come := [n for n in manifest.parts_of(group) if n not in there]:
            text = f"part {', '.join(map(str, to_come))} of {len(manifest.part_sha256)}"
            waits.update(dict.fromkeys(modules, text))
    return waits


def unpack(folder: Path, target: Path, but: Collection[str] = ()) -> Iterator[Path]:
    """Write the wheels whose parts are all there into `target`, but those named; yield each.

    Raises ValueError if a part is damaged.
    """
    manifest = Manifest.read(folder)
    there = arrived(folder, manifest)
    for wheel, start, parts in manifest.placed():
        if wheel.file in but or not set(parts) <= set(there):
            continue
        stream = b"".join((folder / f"part-{number}").read_bytes() for number in parts)
        begin = start - (parts[0] - 1) * manifest.part_bytes
        content = stream[begin : begin + wheel.num_bytes]
        if hashlib.sha256(content).hexdigest() != wheel.sha256:
            raise ValueError(f"{wheel.file} is not what was packed: pack again")
        (target / wheel.file).write_bytes(content)
        yield target / wheel.file


def keep(folder: Path, state: Path) -> Manifest:
    """Copy what has arrived into `state`, so that earlier parts need not be carried again.

    Parts of another list, and the memory of what was installed from them, are dropped. Raises
    OSError, and ValueError for damaged parts, or parts for another Python than this one.
    """
    manifest, kept = Manifest.read(folder), state / KEPT
    here = ".".join(map(str, sys.version_info[:2]))
    if manifest.python != here:
        raise ValueError(
            f"the parts are for Python {manifest.python}, and {sys.executable} is Python {here}: "
            f"pack with --python {here}"
        )
    if not (kept / MANIFEST).is_file() or Manifest.read(kept) != manifest:
        shutil.rmtree(kept, ignore_errors=True)
        (state / _INSTALLED).unlink(missing_ok=True)
        kept.mkdir(parents=True)
        manifest.write(kept)
    for number in arrived(folder, manifest):
        if not (kept / f"part-{number}").is_file():
            shutil.copyfile(folder / f"part-{number}", kept / f"part-{number}")
    return manifest


def install(folder: Path, state: Path) -> int:
    """Install the wheels that have arrived since the last call, which `state` remembers."""
    record, wheels = state / _INSTALLED, state / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    try:
        manifest = keep(folder, state)
        installed = json.loads(record.read_text()) if record.is_file() else []
        there = ", ".join(map(str, arrived(state / KEPT, manifest))) or "none"
        new = list(unpack(state / KEPT, wheels, but=installed))
    except (OSError, ValueError) as fault:
        print(f"gpu_trial: error: {fault}")
        return 1
    if new:
        # Bytecode is written on import: of thousands of modules few are imported.
        options = "--no-index --no-deps --no-compile --no-cache-dir --force-reinstall"
        command = [sys.executable, "-m", "pip", "--no-input", "install", "-q", *options.split()]
        if code := subprocess.run([*command, *map(str, new)]).returncode:
            return code
        record.write_text(json.dumps([*installed, *(wheel.name for wheel in new)]))
        for wheel in new:
            wheel.unlink()
    print(f"parts {there} of {len(manifest.part_sha256)}: {len(new)} wheels installed")
    return 0


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1]), Path(sys.argv[2])))
