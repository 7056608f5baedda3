"""What older supported versions of vLLM lack is refused by name."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from mcore_rl.common import vllm_version
from mcore_rl.common.errors import UsageError
from mcore_rl.common.vllm_version import Capability
from mcore_rl.config import RLConfig
from mcore_rl.job.engines import check_engine
from mcore_rl.model.config_json import model_shape
from tests.model_shapes import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
# model, version, on CUDA, --rl-routing-replay -> the start of the refusal; "" if there is none
CASES = [
    ("deepseek-v3", "0.30.0", False, "r3", ""),
    ("deepseek-v3", "0.30.0+cu130", True, "r3", "--rl-routing-replay r3 needs vllm 0.31.0 or"),
    ("deepseek-v3", "0.31.0", True, "r3", ""),
    ("qwen3-30b-a3b", "0.30.0", True, "r2", ""),
    ("qwen3-0.6b", "0.30.0", True, "r3", ""),
]


def test_the_page_of_versions_has_all_capabilities() -> None:
    page = (ROOT / "docs" / "using" / "scope.md").read_text()
    rows = [line for line in page.splitlines() if re.search(r"\| \d+\.\d+\.\d+ \|$", line)]
    found = [each for each in vars(vllm_version).values() if isinstance(each, Capability)]
    assert len(rows) == len(found) >= 4
    for each in found:
        start, end = f"| {each.what} ", f" | {each.since_cpu} | {each.since_cuda} |"
        assert any(row.startswith(start) and row.endswith(end) for row in rows), each


@pytest.mark.parametrize(("model", "version", "cuda", "replay", "refusal"), CASES)
def test_what_a_version_lacks_is_refused_by_name(
    model: str, version: str, cuda: bool, replay: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(package: str) -> str:
        if package != "vllm":
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    file = CONFIGS / f"{model}.json"
    shape = model_shape(json.loads(file.read_text()), file)
    config = RLConfig.of(hf_checkpoint="folder", routing_replay=replay)
    if not refusal:
        check_engine(config, shape, cuda=cuda)
        return
    with pytest.raises(UsageError, match=refusal) as refused:
        check_engine(config, shape, cuda=cuda)
    assert f"the installed {version} cannot" in refused.value.found
    assert "scripts/setup_env.sh, which installs 0.32.0, or" in refused.value.remedy
