"""Pack what a machine with a GPU, torch and no registry lacks, in parts; see parts.py.

    python scripts/gpu_trial/pack.py --torch 2.11 --out DIR [--part-mib 55]
    python scripts/gpu_trial/pack.py --torch 2.11 --out DIR --python 3.13 --machine FILE

The wheels are those of scripts/requirements-cuda.txt that the trial needs, without those that the
machine has: --machine is its `python3 -m pip list --format freeze`, or names alone, by default
torch-<version>.txt in this folder. pip downloads them for --python and --platform. vLLM's wheel
is packed without what a trial does not use, and its compiled modules are compressed by LZMA (xz).

Every part is read back: the wheels must be those that were packed, and each file in them must have
the bytes of its published wheel.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu_trial.parts import ENGINE, MEGATRON, Manifest, Wheel, unpack  # noqa: E402

MIB = 1 << 20
_PLATFORM = re.compile(r"(manylinux)_(\d+)_(\d+)_(\w+)")
# setuptools installs mcore_rl from its tree; that of a machine with torch may be too old.
_ALWAYS = ("setuptools",)
WANTED = {
    MEGATRON: """setuptools megatron-core aiohttp aiohappyeyeballs aiosignal attrs einops filelock
        frozenlist fsspec hf-xet httpcore httpx huggingface-hub hypothesis idna iniconfig jinja2
        markdown-it-py markupsafe mdurl multidict narwhals numpy packaging plotly pluggy propcache
        protobuf psutil pyarrow pygments pytest pytest-timeout pyyaml regex rich safetensors scipy
        sortedcontainers tensorboard tensorboard-data-server tokenizers tqdm transformers typer
        typing-extensions werkzeug yarl""".split(),
    ENGINE: """annotated-types anyio apache-tvm-ffi blake3 cachetools cbor2 certifi
        charset-normalizer click cloudpickle compressed-tensors depyf dill dnspython
        email-validator fastapi h11 httpcore2 httptools httpx2 jiter jmespath llguidance llvmlite
        loguru model-hosting-container-standards msgspec ninja numba openai oss-harmony
        partial-json-parser pillow prometheus-client prometheus-fastapi-instrumentator py-cpuinfo
        pybase64 pydantic pydantic-core pydantic-extra-types python-multipart pyzmq requests
        sentencepiece setproctitle sniffio starlette tiktoken truststore typing-inspection urllib3
        uvicorn uvloop watchfiles websockets xgrammar vllm""".split(),
}
# Of vLLM's wheel: a server in Rust, sources to compile kernels from, FlashAttention 2 (Hopper takes
# version 3), and modules that need another torch than 2.11 and that no stage uses.
LEFT_OUT = re.compile(
    r"vllm/vllm-rs$|vllm/third_party/.*\.(h|hpp|cuh|cu|inl)$"
    r"|vllm/(vllm_flash_attn/_vllm_fa2_C|third_party/deep_gemm/_C_extension|_qutlass_C)\."
)


def read_options(tokens: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("pack.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--torch", required=True, metavar="X.Y", help="the machine's torch")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--part-mib", type=int, default=55, metavar="MIB", help="size of a part")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="the machine's Python")
    glibc = "newest tag that the machine's glibc supports (default: %(default)s)"
    parser.add_argument("--platform", default="manylinux_2_39_x86_64", metavar="TAG", help=glibc)
    parser.add_argument("--machine", type=Path, metavar="FILE", help="what is installed there")
    parser.add_argument(
        "--groups", nargs="+", choices=list(WANTED), default=list(WANTED), metavar="GROUP",
        help="megatron or engine alone (default: both)",
    )  # fmt: skip
    options = parser.parse_args(tokens)
    options.machine = options.machine or Path(__file__).with_name(f"torch-{options.torch}.txt")
    if not options.machine.is_file():
        parser.error(f"--torch {options.torch}: {options.machine} is missing; name --machine FILE")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty; name a new folder")
    if not _PLATFORM.fullmatch(options.platform):
        parser.error(f"--platform {options.platform} is not like manylinux_2_39_x86_64")
    if options.part_mib < 1:
        parser.error(f"--part-mib {options.part_mib} must be at least 1")
    return options


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def read_list(file: Path) -> dict[str, str]:
    """Return version ("" if there is none) by package of a list of pins or names."""
    lines = [line for line in file.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]
    split = [re.split(r"==| @ ", line.strip(), maxsplit=1) for line in lines]
    return {canonical(name): version for name, version, *_ in (pair + [""] for pair in split)}


def download(groups: Iterable[str], options: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return the wheels with their groups, from the cache or from pip, vLLM's last."""
    folder = ROOT / ".cache" / "gpu_trial" / f"wheels-{options.python}-{options.platform}"
    folder.mkdir(parents=True, exist_ok=True)
    pins = read_list(ROOT / "scripts" / "requirements-cuda.txt")
    there = read_list(options.machine).keys() - set(_ALWAYS)
    wanted = [(group, name) for group in groups for name in WANTED[group] if name not in there]
    missing = [(name, pins[name]) for _, name in wanted if not _found(folder, name, pins[name])]
    if missing:
        tags = tags_until(options.platform)
        chosen = ["--no-deps", "--only-binary=:all:", "--python-version", options.python]
        chosen += ["--implementation", "cp", *(a for tag in tags for a in ("--platform", tag))]
        command = [sys.executable, "-m", "pip", "-q", "download", *chosen, "-d", str(folder)]
        specifiers = [f"{name}=={version}" for name, version in missing]
        subprocess.run([*command, *specifiers], check=True)
    wheels = [(group, _found(folder, name, pins[name])) for group, name in wanted]
    return [(group, wheel) for group, wheel in wheels if wheel is not None]


def tags_until(platform: str) -> list[str]:
    """Return the tags that a machine takes: pip matches each by itself."""
    kind, major, minor, machine = _PLATFORM.findall(platform)[0]
    older = [f"{kind}_{major}_{number}_{machine}" for number in range(int(minor), 4, -1)]
    return [*older, f"{kind}2014_{machine}", f"{kind}1_{machine}"]


def _found(folder: Path, name: str, version: str) -> Path | None:
    """Return the wheel of a package in a folder."""
    for wheel in folder.glob("*.whl"):
        package, release, *_ = wheel.name.split("-")
        if (canonical(package), release.split("+")[0]) == (name, version):
            return wheel
    return None


def slimmed(wheel: Path, folder: Path) -> Path:
    """Return vLLM's wheel without what LEFT_OUT names, its compiled modules by LZMA."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w") as new:
        for info in kept(old):
            method = zipfile.ZIP_LZMA if info.filename.endswith(".so") else zipfile.ZIP_DEFLATED
            content = old.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                content = _record(content)
            new.writestr(info, content, compress_type=method, compresslevel=9)
    return target


def kept(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [info for info in archive.infolist() if not LEFT_OUT.match(info.filename)]


def _record(content: bytes) -> bytes:
    """Return the list of a wheel's files without those that are left out."""
    rows = [row for row in csv.reader(io.StringIO(content.decode())) if not LEFT_OUT.match(row[0])]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def write_parts(
    wheels: Iterable[tuple[str, Path]], out: Path, options: argparse.Namespace
) -> Manifest:
    """Cut the stream of all wheels into parts, and write them with their list."""
    part_bytes, stream, listed = options.part_mib * MIB, bytearray(), []
    sums: list[str] = []

    def cut(least: int) -> None:
        while len(stream) >= least and stream:
            part = bytes(stream[:part_bytes])
            del stream[:part_bytes]
            sums.append(hashlib.sha256(part).hexdigest())
            (out / f"part-{len(sums)}").write_bytes(part)

    for group, wheel in wheels:
        content = wheel.read_bytes()
        listed.append(Wheel(wheel.name, group, len(content), hashlib.sha256(content).hexdigest()))
        stream += content
        cut(part_bytes)
    cut(1)
    manifest = Manifest(options.python, options.torch, part_bytes, tuple(sums), tuple(listed))
    manifest.write(out)
    return manifest


def verify(out: Path, wheels: Iterable[tuple[str, Path]]) -> int:
    """Compare all files of the parts' wheels with those published; return their number."""
    published = {wheel.name: wheel for _, wheel in wheels}
    num_files = 0
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        for wheel in unpack(out, Path(folder)):
            with zipfile.ZipFile(published.pop(wheel.name)) as old, zipfile.ZipFile(wheel) as new:
                expected = kept(old) if wheel.name.startswith("vllm-") else old.infolist()
                names = [info.filename for info in expected]
                if names != new.namelist():
                    raise ValueError(f"{wheel.name} has other files than were packed")
                for name in names:
                    is_record = name.endswith(".dist-info/RECORD")
                    if not is_record and _digest(old, name) != _digest(new, name):
                        raise ValueError(f"{name} of {wheel.name} is not what was published")
                num_files += len(names)
            wheel.unlink()
    if published:
        raise ValueError(f"not in the parts: {', '.join(published)}")
    return num_files


def _digest(archive: zipfile.ZipFile, name: str) -> bytes:
    return hashlib.sha256(archive.read(name)).digest()


def report(out: Path, manifest: Manifest) -> Iterator[str]:
    """Yield a line per part and per group."""
    for number in range(1, len(manifest.part_sha256) + 1):
        yield f"part-{number}: {(out / f'part-{number}').stat().st_size / MIB:.1f} MiB"
    for group in WANTED:
        wheels = [wheel for wheel in manifest.wheels if wheel.group == group]
        size = sum(wheel.num_bytes for wheel in wheels) / MIB
        needs = ", ".join(map(str, manifest.parts_of(group)))
        yield f"{group}: {len(wheels)} wheels, {size:.1f} MiB, in part {needs or 'none'}"


def main(tokens: list[str] | None = None) -> int:
    options, started = read_options(tokens), time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    wheels = download(options.groups, options)
    downloaded = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        packed = [
            (group, slimmed(wheel, Path(folder)) if wheel.name.startswith("vllm-") else wheel)
            for group, wheel in wheels
        ]
        manifest = write_parts(packed, options.out, options)
    written = time.monotonic()
    num_files = verify(options.out, wheels)
    print(*report(options.out, manifest), sep="\n")
    print(
        f"{num_files} files as published; downloaded in {downloaded - started:.0f} s, packed in "
        f"{written - downloaded:.0f} s, verified in {time.monotonic() - written:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
