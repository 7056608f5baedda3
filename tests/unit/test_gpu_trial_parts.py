"""Parts of the GPU trial: how wheels are packed, cut, carried one after the other and installed."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_trial import driver, pack, parts
from scripts.gpu_trial.stages import STAGES, waits_for
from tests.rank_pool import ROOT

STAGE = {stage.name: stage for stage in STAGES}
HERE = ".".join(map(str, sys.version_info[:2]))


def make_wheel(folder: Path, package: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel that pip installs."""
    folder.mkdir(exist_ok=True)
    info = f"{package}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    files = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_hash(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def noise(num_bytes: int, seed: int) -> bytes:
    """Bytes that do not compress."""
    return hashlib.shake_256(bytes([seed])).digest(num_bytes)


@pytest.fixture
def wheels(tmp_path: Path) -> list[tuple[str, Path]]:
    """One wheel that fits into the first part of 1 MiB, and vLLM's, which spans all three."""
    vllm = {
        "vllm_of_a_test/__init__.py": b"name = 'vllm'\n",
        "vllm_of_a_test/_C.so": noise(2 << 20, 1),
    }
    return [
        (
            "megatron",
            make_wheel(tmp_path / "w", "first_of_a_test", {"first_of_a_test.py": b"x = 1\n"}),
        ),
        ("engine", make_wheel(tmp_path / "w", "vllm_of_a_test", vllm)),
    ]


def options_of(tmp_path: Path, **changes: Any) -> Any:
    machine = tmp_path / "machine.txt"
    machine.write_text("torch==2.11.0\n")
    tokens = ["--torch", "2.11", "--python", HERE, "--part-mib", "1", "--machine", str(machine)]
    return pack.read_options([*tokens, "--out", str(tmp_path / "parts")])


@pytest.fixture
def packed(tmp_path: Path, wheels: list[tuple[str, Path]]) -> Path:
    options = options_of(tmp_path)
    options.out.mkdir()
    pack.write_parts(wheels, options.out, options)
    return Path(options.out)


def test_parts_are_full_but_for_last_and_have_first_group_first(packed: Path) -> None:
    manifest = parts.Manifest.read(packed)
    sizes = [(packed / f"part-{n}").stat().st_size for n in (1, 2, 3)]
    assert sizes[:2] == [pack.MIB] * 2 and 0 < sizes[2] < pack.MIB
    assert sum(sizes) == sum(wheel.num_bytes for wheel in manifest.wheels)
    assert (manifest.parts_of("megatron"), manifest.parts_of("engine")) == ([1], [1, 2, 3])


def test_wheels_are_unpacked_as_their_parts_arrive(
    packed: Path, wheels: list[tuple[str, Path]], tmp_path: Path
) -> None:
    target = tmp_path / "unpacked"
    target.mkdir()
    (packed / "part-2").rename(tmp_path / "later")
    assert [wheel.name for wheel in parts.unpack(packed, target)] == [wheels[0][1].name]
    assert parts.waiting(packed) == {"vllm": "part 2 of 3"}
    (tmp_path / "later").rename(packed / "part-2")
    (second,) = parts.unpack(packed, target, but=[wheels[0][1].name])
    assert second.read_bytes() == wheels[1][1].read_bytes()
    assert parts.waiting(packed) == {}


def test_packed_files_are_compared_with_published_ones(
    packed: Path, wheels: list[tuple[str, Path]]
) -> None:
    assert pack.verify(packed, wheels) == 4 + 5
    part = packed / "part-2"
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    with pytest.raises(ValueError, match="part-2 is damaged"):
        pack.verify(packed, wheels)
    part.unlink()
    with pytest.raises(ValueError, match="not in the parts: vllm_of_a_test"):
        pack.verify(packed, wheels)


def test_vllm_is_packed_without_what_a_trial_does_not_use(tmp_path: Path) -> None:
    files = {
        "vllm/__init__.py": b"",
        "vllm/_C_stable_libtorch.abi3.so": bytes(1000),
        "vllm/vllm-rs": b"a server",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"version 2",
        "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": b"version 3",
        "vllm/third_party/deep_gemm/include/a.cuh": b"source",
        "vllm/third_party/deep_gemm/__init__.py": b"",
    }
    wheel = make_wheel(tmp_path / "w", "vllm", files, "0.32.0")
    (tmp_path / "slim").mkdir()
    slim = pack.slimmed(wheel, tmp_path / "slim")
    with zipfile.ZipFile(slim) as archive:
        names = set(archive.namelist())
        rows = archive.read("vllm-0.32.0.dist-info/RECORD").decode().split()
        listed = {row.split(",")[0] for row in rows}
        (module,) = [i for i in archive.infolist() if "_C_stable" in i.filename]
    assert listed == names and module.compress_type == zipfile.ZIP_LZMA
    assert {name for name in files if name not in names} == {
        "vllm/vllm-rs",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "vllm/third_party/deep_gemm/include/a.cuh",
    }
    options = options_of(tmp_path)
    options.out.mkdir()
    pack.write_parts([("engine", slim)], options.out, options)
    assert pack.verify(options.out, [("engine", wheel)]) == len(names)


def test_wanted_wheels_are_pinned_and_those_of_the_machine_left_out(tmp_path: Path) -> None:
    pins = pack.read_list(ROOT / "scripts" / "requirements-cuda.txt")
    wanted = {name for group in pack.WANTED.values() for name in group}
    assert wanted - pins.keys() == set()
    machine = pack.read_list(ROOT / "scripts" / "gpu_trial" / "torch-2.11.txt")
    assert machine["torch"] == "2.11.0" and "vllm" not in machine
    (tmp_path / "list").write_text("# comment\nPy_YAML==6.0\nours @ file:///x\nname\n\n")
    assert pack.read_list(tmp_path / "list") == {"py-yaml": "6.0", "ours": "file:///x", "name": ""}


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--torch", "2.9"], ["--torch 2.9", "--machine FILE"]),
        (["--torch", "2.11", "--part-mib", "0"], ["--part-mib 0", "at least 1"]),
        (["--torch", "2.11", "--platform", "win32"], ["--platform win32", "manylinux_2_39"]),
    ],
)
def test_invalid_arguments_of_pack_are_refused(
    tokens: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pack.read_options([*tokens, "--out", str(tmp_path / "new")])
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(word in message for word in words)


def test_parts_for_another_python_are_refused(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (packed / parts.MANIFEST).read_text().replace(f'"{HERE}"', '"3.8"')
    (packed / parts.MANIFEST).write_text(text)
    assert parts.install(packed, tmp_path / "state") == 1
    assert f"--python {HERE}" in capsys.readouterr().out


def test_stage_waits_for_parts_that_bring_what_it_lacks() -> None:
    facts: dict[str, Any] = {"missing": {"vllm": "x"}, "waits": {"vllm": "part 2, 3 of 3"}}
    assert waits_for(STAGE["train"], facts) == "part 2, 3 of 3"
    assert waits_for(STAGE["gpu-tests"], facts) is None
    assert waits_for(STAGE["train"], {**facts, "waits": {}}) is None
    assert waits_for(STAGE["train"], {**facts, "missing": {"vllm": "x", "torch": "x"}}) is None


@pytest.mark.slow
def test_visits_install_what_has_arrived_and_run_what_has_not_run(
    packed: Path, tmp_path: Path
) -> None:
    """In an environment without packages and without a registry."""
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    (packed / "part-3").rename(tmp_path / "later")
    state = tmp_path / "state"

    def visit() -> str:
        command = [str(python), "scripts/gpu_trial/parts.py", str(packed), str(state)]
        variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def has(module: str) -> bool:
        return not subprocess.run([str(python), "-c", f"import {module}"], stderr=-3).returncode

    assert visit() == "parts 1, 2 of 3: 1 wheels installed\n"
    assert has("first_of_a_test") and not has("vllm_of_a_test")
    assert parts.waiting(state / parts.KEPT) == {"vllm": "part 3 of 3"}
    (packed / "part-1").unlink()
    (packed / "part-2").unlink()
    assert visit() == "parts 1, 2 of 3: 0 wheels installed\n"
    (tmp_path / "later").rename(packed / "part-3")
    assert visit() == "parts 1, 2, 3 of 3: 1 wheels installed\n"
    assert has("vllm_of_a_test") and parts.waiting(state / parts.KEPT) == {}
    # Packed anew, for another machine.
    manifest = dataclasses.replace(parts.Manifest.read(packed), torch="2.12")
    manifest.write(packed)
    assert visit() == "parts 3 of 3: 0 wheels installed\n"
    assert parts.waiting(state / parts.KEPT)["vllm"] == "part 1, 2 of 3"


def test_driver_with_parts_leaves_out_what_has_run(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {
        "missing": {"vllm": "x"},
        "waits": {"vllm": "part 3 of 3"},
        "has_cuda": True,
        "devices": 1,
    }
    monkeypatch.setattr(driver.Trial, "_read_facts", lambda self: facts)
    monkeypatch.setenv("MCORE_RL_ENV", sys.prefix)
    stage = driver.Stage

    def visit(*tokens: str) -> dict[str, str]:
        options = driver.read_options(
            ["--parts", str(packed), "--out", str(tmp_path / "out"), *tokens]
        )
        options.stages = (
            stage("environment", "", "true", packages=()),
            stage("gpu-tests", "", 'echo "$MCORE_RL_ADMIT_TORCH"', (r"^2\.11$",), packages=()),
            stage("train", "", "echo ran", packages=("vllm",)),
        )
        driver.Trial(options).run()
        results = json.loads((tmp_path / "out" / "trial.json").read_text())
        return {r["stage"]: r["status"] for r in results if "status" in r}

    first = {"environment": "passed", "gpu-tests": "passed"}
    assert visit() == {**first, "train": "waiting"}
    assert "1 waiting" in (tmp_path / "out" / "trial.md").read_text()
    log = next((tmp_path / "out").glob("*-gpu-tests.log"))
    log.unlink()
    facts["missing"] = {}
    assert visit() == {**first, "train": "passed"}
    assert not log.exists()  # it was not run again
    assert visit("--seconds", "1") == {**first, "environment": "skipped", "train": "passed"}


def test_result_is_written_when_a_signal_ends_the_visit(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(  # an environment whose first stage does not end
        '#!/bin/sh\ncase "$*" in *find_spec*) exit 0;; *) echo begun; exec sleep 1000;; esac\n'
    )
    python.chmod(0o755)
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "scripts/gpu_trial/driver.py", "--only", "environment", "--out", str(out)],
        cwd=ROOT,
        env={"MCORE_RL_ENV": str(tmp_path), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    log = out / "01-environment.log"
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
    process.terminate()
    assert process.wait() == 128 + 15
    result = json.loads((out / "trial.json").read_text())[0]
    assert (result["status"], result["why"]) == ("interrupted", "ended by signal 15")
    assert "| environment | interrupted |" in (out / "trial.md").read_text()
