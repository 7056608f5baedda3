"""Carries out the Dockerfile without Docker, on a Debian in a folder, and checks the result:

    python scripts/test_dockerfile.py FOLDER [--suite bookworm] [--with-te]

Needs root, debootstrap, bubblewrap, Debian's packages, PyPI, 20 GiB for FOLDER, which is kept, and
about 15 minutes. In the FOLDER of an earlier call, what is installed stays installed. It does what
the Dockerfile says, except that FROM is a Debian, with its Python in place of the Dockerfile's
(bookworm: 3.11, trixie: 3.13); that Transformer Engine is compiled, and then required, only by
--with-te, in 25 minutes of one core; and that there are no layers. Exit code 1 if an instruction or
a check failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = {"bookworm": "python3.11", "trixie": "python3.13"}
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEEDS_TE = "python -m pip show --quiet transformer-engine-torch"
HAS_FLASHINFER = "from vllm.utils.flashinfer import has_flashinfer as has"
# Shell commands in the image with its environment.
CHECKS = {
    "nvcc of CUDA_HOME is in PATH": '[ "$(command -v nvcc)" = "$CUDA_HOME/bin/nvcc" ]',
    "vLLM has FlashInfer": "python -c 'HAS; assert has()'",
    "and none without nvcc": 'PATH=$(dirname "$(command -v python)"):/bin; unset CUDA_HOME\n'
    "python -c 'HAS; assert not has()'",
    # Fails if nvcc and its headers do not fit, or a library is not found. Only the name of the
    # driver's library is needed, which a container has from its machine.
    "FlashInfer compiles a kernel": """mkdir -p /tmp/driver
gcc -shared -x c /dev/null -Wl,-soname,libcuda.so.1 -o /tmp/driver/libcuda.so
export LIBRARY_PATH=/tmp/driver FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/tmp/jit
python -c 'from flashinfer.jit.page import gen_page_module as module; module().build()'""",
    "tests/gpu can be collected": "python -m pytest -q --disable-warnings --collect-only tests/gpu",
    "the trial finds the environment": "bash scripts/gpu_trial.sh --only environment --out /tmp/t",
    "benchmarks of the trial start": "python benchmarks/step_time.py --help",
    "mcore-rl starts": "mcore-rl --version",
}


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Instructions with their arguments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


def is_ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves out `path`: the last pattern that it or a parent matches."""
    ignored = False
    for pattern in patterns:
        expression = ""
        for part in re.split(r"(\*\*/|\*\*|\*)", pattern.removeprefix("!")):
            expression += {"**/": "(.*/)?", "**": ".*", "*": "[^/]*"}.get(part, re.escape(part))
        if re.fullmatch(rf"{expression}(/.*)?", path):
            ignored = not pattern.startswith("!")
    return ignored


@dataclass
class Image:
    """A root file system, and what ARG, ENV and WORKDIR have set so far."""

    root: Path
    machine: dict[str, str]  # variables for RUN alone, unlike the image's
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/root"})
    args: dict[str, str] = field(default_factory=dict)

    def do(self, word: str, rest: str) -> None:
        """Carry out one instruction; raises CalledProcessError if a command fails."""
        if word == "RUN":
            self.run(rest)
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                self.copy(source, target)
        elif word == "WORKDIR":
            self.workdir = rest
            self.path(rest).mkdir(parents=True, exist_ok=True)
        elif word in ("ARG", "ENV"):
            pairs = [pair.split("=", 1) for pair in shlex.split(rest)]
            # All values of one instruction are those from before it.
            (self.args if word == "ARG" else self.env).update(
                {name: self.expand(value) for name, value in pairs}
            )
        elif word not in ("FROM", "CMD"):
            raise ValueError(f"{word} is unknown here: add it to scripts/test_dockerfile.py")

    def run(self, command: str) -> None:
        """Run a shell command in the image, by namespaces that end with it."""
        settings = {**self.args, **self.machine, **self.env}
        cage = ["bwrap", "--die-with-parent", "--unshare-pid", "--cap-add", "ALL", "--clearenv"]
        cage += ["--bind", str(self.root), "/", "--proc", "/proc", "--dev", "/dev"]
        for file in ("/etc/resolv.conf", "/etc/hosts"):
            cage += ["--ro-bind", file, file]
        for name, value in settings.items():
            cage += ["--setenv", name, value]
        subprocess.run([*cage, "--chdir", self.workdir, "/bin/sh", "-c", command], check=True)

    def copy(self, source: str, target: str) -> None:
        """Copy a file, or all files of a folder that .dockerignore leaves in."""
        patterns = (ROOT / ".dockerignore").read_text().split()
        folder = ROOT / source if (ROOT / source).is_dir() else None
        for file in folder.rglob("*") if folder else [ROOT / source]:
            if file.is_dir() or is_ignored(str(file.relative_to(ROOT)), patterns):
                continue
            place = self.path(target) / (file.relative_to(folder) if folder else "")
            if not folder and target.endswith("/"):
                place /= file.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)

    def path(self, path: str) -> Path:
        return self.root / os.path.join(self.workdir, path).lstrip("/")

    def expand(self, text: str) -> str:
        values = {**self.args, **self.env}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], ""), text)


def network(root: Path) -> dict[str, str]:
    """Variables by which this machine reaches its indexes, with certificates within the image."""
    variables = {
        name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")
    }
    if certificates := os.environ.get("SSL_CERT_FILE"):
        shutil.copy(certificates, root / "certificates.crt")
        variables |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT"), "/certificates.crt")
    return variables


def carry_out(image: Image, name: str, word: str, rest: str) -> bool:
    started = time.monotonic()
    try:
        image.do(word, rest)
    except subprocess.CalledProcessError as error:
        print(f"== failed with exit code {error.returncode}: {name}", flush=True)
        return False
    print(f"== {time.monotonic() - started:.0f} s: {name}", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--suite", choices=PYTHONS, default="bookworm")
    parser.add_argument("--with-te", action="store_true")
    options = parser.parse_args()
    root = options.folder.absolute()
    if not (root / "bin").exists():
        subprocess.run(["debootstrap", "--variant=minbase", options.suite, str(root)], check=True)
    image = Image(root, network(root))
    if not options.with_te:  # setup_env.sh continues without it
        image.machine |= {"CC": "false", "CXX": "false"}
    dockerfile = (ROOT / "Dockerfile").read_text()
    for word, rest in instructions(re.sub(r"python3\.\d+", PYTHONS[options.suite], dockerfile)):
        if rest == NEEDS_TE and not options.with_te:
            continue
        if not carry_out(image, f"{word} {' '.join(rest.split())}"[:90], word, rest):
            return 1
    image.machine.clear()  # checks need no network
    failed = [
        name
        for name, command in CHECKS.items()
        if not carry_out(image, f"check: {name}", "RUN", command.replace("HAS", HAS_FLASHINFER))
    ]
    print(f"== failed: {'; '.join(failed)}" if failed else "== all instructions and checks passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
