"""Prints what of our patches and engine arguments does not fit the vLLM that Python finds: rows of
`other_vllm.Difference`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from tests.cuda import standins

standins.transformer_engine_extension()
standins.vllm_libraries()
standins.cuda_device()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from mcore_rl.common import vllm_version  # noqa: E402
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, engine_arguments  # noqa: E402
from mcore_rl.model.speculation import Speculation  # noqa: E402
from mcore_rl.patches.vllm import patches, platform, rank_map  # noqa: E402
from tests.model_shapes import CONFIGS  # noqa: E402


def unfit_patches() -> list[tuple[str, str, str]]:
    """Those are applied, in order, that this version would need on CPU, if it were supported."""
    rows = []
    for patch in patches():
        if not patch.name.startswith("vllm.") or not (patch is rank_map.PATCH or patch.needed()):
            continue
        place = f"patches/{patch.name.replace('.', '/')}.py"
        try:
            patch.apply()
        except Exception as error:
            rows.append(("patch", place, f"{type(error).__name__}: {error}"))
    return rows


def unknown_arguments() -> list[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CONFIGS / "deepseek-v3.json", Path(folder) / "config.json")
        given = engine_arguments(
            EngineConfig(
                Path(folder),
                dp_size=2,
                all2all_backend="x",
                dtype="float16",
                timeout_seconds=1,
                speculation=Speculation("mtp", 1),
            )
        )
    known = EngineArgs.__dataclass_fields__
    place = "mcore_rl/hybrid_engine/vllm/startup.py"
    return [
        ("engine argument", place, f"EngineArgs has no {name}")
        for name in sorted(given)
        if name not in known
    ]


found = unknown_arguments()
with mock.patch.object(type(current_platform), "is_cpu", lambda self: True):
    with mock.patch.object(platform, "is_supported", lambda version: True):
        with mock.patch.object(vllm_version, "PACKAGES", ("vllm",)):  # not the environment's
            found += unfit_patches()
print(json.dumps(found))
