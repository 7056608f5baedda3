"""Patches of Megatron change Megatron and nothing else.

Each case runs in a separate process, because a patch stays applied. Those that look at what is
imported, or patch by themselves, start with nothing imported. tests/dist and tests/e2e show that
DeepSeek-V2-Lite can be built and that a checkpoint can be loaded again.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.rank_pool import RankPool

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="these patches apply only without a GPU"
)

# `from m import x` at module level, called from a module that is not Megatron's.
OTHERS_SEE_NO_CUDA = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
assert not torch.cuda.is_available()
assert torch.zeros(1).type() == "torch.FloatTensor"
for call in (torch.cuda.current_device, torch.zeros(1).cuda, torch.nn.Linear(1, 1).cuda):
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        assert "CUDA" in str(error) or "NVIDIA" in str(error), error
    else:
        raise SystemExit(f"{call} did not fail")
try:
    torch.zeros(1, device="cuda")
except (AssertionError, RuntimeError):
    pass
else:
    raise SystemExit("a CUDA tensor was made")
"""
MEGATRON_SEES_THE_CPU = """
from mcore_rl.megatron import adapter as megatron_adapter
import torch
from megatron.core import parallel_state, utils
from megatron.core.optimizer import distrib_optimizer
assert utils.torch is not torch and utils.torch.Tensor is torch.Tensor
seen = distrib_optimizer.torch
assert seen.cuda.current_device() == torch.device("cpu") and seen.cuda.is_available()
assert seen.zeros(2, device="cuda").device.type == "cpu"
assert seen.empty(2, device=seen.cuda.current_device()).device.type == "cpu"
event = seen.cuda.current_stream().record_event()
event.synchronize()
with seen.cuda.stream(seen.cuda.Stream()):
    pass
inside = {"__name__": "megatron.x"}
exec("def of(t): return t.type(), t.cuda()", inside)
tensor = torch.zeros(1)
name, moved = inside["of"](tensor)
assert name == "torch.cuda.FloatTensor" and moved is tensor
"""
WITHOUT_IT_MEGATRON_FAILS = """
import typing, typing_extensions
typing.override = typing_extensions.override
from megatron.core.tensor_parallel import random
try:
    random.torch.cuda.current_device()
except (AssertionError, RuntimeError):
    pass
else:
    raise SystemExit("the test needs a machine without CUDA")
"""
EARLY_IMPORT_IS_REFUSED = """
import mcore_rl
import megatron.training
from mcore_rl.common.errors import UsageError
try:
    from mcore_rl.megatron import adapter as megatron_adapter
except UsageError as error:
    assert "imported before mcore_rl.prepare()" in str(error)
else:
    raise SystemExit("half a Megatron was patched")
"""
TRAINING_NEEDS_OVERRIDE = """
import sys, typing
if sys.version_info < (3, 12):
    assert not hasattr(typing, "override")
from mcore_rl.megatron import adapter as megatron_adapter
import megatron.training.models.gpt
assert typing.override
"""
NO_RANK_IMPORTS_WANDB_UNASKED = """
import sys
import mcore_rl.train, megatron.training.training
assert "wandb" not in sys.modules
from megatron.core import timers
written = []
def write():
    timed = timers.Timers(log_level=2, log_option="max")
    timed("x", log_level=0).start()
    timed("x").stop()
    timed._get_global_min_max_time = lambda *a: {"x": (1.0, 2.0)}
    timed.write(["x"], writer, iteration=7)
import wandb as writer
assert "wandb" in sys.modules
writer.log = lambda *given: written.append(given)
write()
assert written == [({"x-time": 2.0}, 7)], written
class writer: log = writer.log
write()
assert len(written) == 1
"""
HELP_TEXTS_ARE_READ_TO_BE_PRINTED = """
import argparse, inspect, sys
from mcore_rl.megatron import adapter
from megatron.training.arguments import add_megatron_arguments

read, num_read = inspect.getsource, 0
def counting(of):
    global num_read
    num_read += 1
    return read(of)
inspect.getsource = counting
def flags_of(parser, *others):
    names = "option_strings dest nargs const default choices required".split()
    return [
        (type(a), getattr(a.type, "__name__", None), *(getattr(a, n) for n in (*names, *others)))
        for a in parser._actions
    ]
without_it = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(without_it)
assert num_read > 10  # the symptom
num_read = 0
assert flags_of(adapter.make_parser()) == flags_of(without_it) and num_read == 0
sys.argv.append("--help")
assert flags_of(adapter.make_parser(), "help") == flags_of(without_it, "help") and num_read > 10
"""
HELPERS_ARE_NOT_COMPILED = """
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.patches.registry import applied_patches
from megatron.core.datasets.utils import compile_helpers
compile_helpers()
assert applied_patches()["megatron.dataset_helpers"] == "megatron-core 0.19.2"
"""
HELPERS_ARE_NOT_COMPILED_IN_A_CHECKOUT = """
import pathlib, tempfile
from mcore_rl.patches.megatron import typing_override
typing_override.apply()
from megatron.core.datasets import utils
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "Makefile").write_text("all:\\n\\texit 1\\n")
    utils.__file__ = f"{folder}/utils.py"
    from mcore_rl.patches.megatron import dataset_helpers
    from mcore_rl.patches.registry import apply_patch
    assert apply_patch(dataset_helpers.PATCH)
    utils.compile_helpers()
"""
VARIANTS_HAVE_LOCAL_LAYERS = """
from types import SimpleNamespace
import pytest
from mcore_rl.patches import megatron
from mcore_rl.patches.megatron import attention_variant_spec, local_sparse_attention
from mcore_rl.patches.registry import apply_patch
patches = [attention_variant_spec.PATCH, local_sparse_attention.PATCH]
megatron.PATCHES = [each for each in megatron.PATCHES if each not in patches]
megatron.apply()
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.transformer.experimental_attention_variant import absorbed_mla

config = SimpleNamespace(transformer_impl="local", use_kitchen=False)
with pytest.raises(AssertionError, match="only supports transformer engine"):
    specs._get_backend_spec_provider(config)
assert absorbed_mla.TELinear is None
assert all(map(apply_patch, patches))
layers = specs._get_backend_spec_provider(config)
assert layers.linear() is absorbed_mla.TELinear is attention_variant_spec.DuplicatedLinear
norm = layers.layer_norm(rms_norm=False, for_qk=True)
assert norm is attention_variant_spec.LocalLayerNorm
"""
LOCAL_SPEC_HAS_LAYERS_FOR_THE_CPU = """
from mcore_rl.megatron import adapter as megatron_adapter
import types
from mcore_rl.patches.megatron.local_layers import *
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.torch_norm import WrappedTorchNorm

config = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm"
)
layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
assert type(layer.input_layernorm(config=config, hidden_size=8, eps=1e-6)) is LocalRMSNorm
latent = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention.submodules
assert latent.linear_q_down_proj is latent.linear_kv_down_proj is DuplicatedLinear

class Own(DotProductAttention):
    pass

groups = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))
def attention(kind, mask):
    return type(kind(config, 1, attn_mask_type=mask, attention_type="self", pg_collection=groups))
assert attention(layer.self_attention.submodules.core_attention, AttnMaskType.causal) \\
    is SDPACoreAttention
assert attention(Own, AttnMaskType.causal) is Own
assert attention(DotProductAttention, AttnMaskType.padding) is DotProductAttention
config.normalization = "LayerNorm"
config.persist_layer_norm = False
norm = WrappedTorchNorm(config, 8)
assert type(norm).__module__.startswith("torch."), type(norm)
"""
HELPERS_END_THE_PROCESS_WITHOUT_IT = """
import typing, typing_extensions
typing.override = typing_extensions.override
from megatron.core.datasets.utils import compile_helpers
try:
    compile_helpers()
except SystemExit as leave:
    assert leave.code
else:
    raise SystemExit("the wheel has its Makefile now: drop the repair")
"""
PATCHED = {
    "others_see_no_cuda": OTHERS_SEE_NO_CUDA,
    "megatron_sees_the_cpu": MEGATRON_SEES_THE_CPU,
    "helpers_are_not_compiled": HELPERS_ARE_NOT_COMPILED,
    "local_spec_has_layers_for_the_cpu": LOCAL_SPEC_HAS_LAYERS_FOR_THE_CPU,
}
# Each row is one process, which takes most of its time to import Megatron.
FRESH = {
    "without patches, then without make": (
        *(WITHOUT_IT_MEGATRON_FAILS, HELPERS_END_THE_PROCESS_WITHOUT_IT),
        HELPERS_ARE_NOT_COMPILED_IN_A_CHECKOUT,
    ),
    "what a start imports and reads": (
        *(TRAINING_NEEDS_OVERRIDE, NO_RANK_IMPORTS_WANDB_UNASKED),
        HELP_TEXTS_ARE_READ_TO_BE_PRINTED,
    ),
    "early import": (EARLY_IMPORT_IS_REFUSED,),
    "attention variants": (VARIANTS_HAVE_LOCAL_LAYERS,),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PATCHED)
def test_patched_on_cpu(case: str, ranks: RankPool) -> None:
    ranks.run("tests.rank_pool:execute", world_size=1, code=PATCHED[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FRESH)
def test_patches_on_cpu(case: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", "".join(FRESH[case])], capture_output=True, text=True, timeout=500
    )
    assert run.returncode == 0, run.stderr[-3000:]
