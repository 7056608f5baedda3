"""Imports vLLM and Transformer Engine as Megatron does, and tells which ones it found."""

from __future__ import annotations

import json

from tests.cuda import standins

needed = {
    "transformer_engine": standins.transformer_engine_extension(),
    "vllm": standins.vllm_libraries(),
}
standins.cuda_device()

import torch  # noqa: E402
import transformer_engine  # noqa: E402
import transformer_engine.pytorch  # noqa: E402
import transformer_engine_torch as compiled  # noqa: E402
import vllm  # noqa: E402
from megatron.core.extensions import transformer_engine as extension  # noqa: E402
from vllm import _custom_ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

print(
    json.dumps(
        {
            "standins": needed,
            "torch": torch.__version__,
            "vllm": [vllm.__version__, vllm.__file__],
            "transformer_engine": [transformer_engine.__version__, transformer_engine.__file__],
            "have_te": extension.HAVE_TE,
            "extension": [getattr(compiled, "__file__", None), len(dir(compiled))],
            "platform": [
                type(current_platform).__name__,
                current_platform.device_type,
                list(current_platform.get_device_capability()),
            ],
            "operators": [hasattr(torch.ops._C, name) for name in ("silu_and_mul", "rms_norm")],
            "custom_ops": _custom_ops.__name__,
        }
    )
)
