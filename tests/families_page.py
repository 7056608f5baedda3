"""The generated parts of docs/using/families.md: families with their proofs, and refusals.

    python -m tests.families_page

What a family is comes from its table, what is shown of it from the parameters of the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.megatron import adapter  # noqa: F401  (prepares Megatron)
from mcore_rl.model import unsupported
from mcore_rl.model.families import FAMILIES
from mcore_rl.model.family import Family
from scripts.make_tiny_deepseek import hf_config
from tests.cuda import test_megatron_models, test_vllm_models
from tests.cuda.presets import shape_of
from tests.dist import test_families, test_family_invariance, test_sparse_attention
from tests.unit import test_planner

PAGE = Path(__file__).resolve().parents[1] / "docs" / "using" / "families.md"
Proofs = Mapping[str, set[str]]
ROOT = PAGE.parents[2]
RECURRENT, MULTIMODAL = "tests/e2e/test_recurrent_layers.py", "tests/e2e/test_multimodal.py"
GPU = "docs/using/what_was_run.md#on-a-gpu"
REAL_SIZE = "benchmarks/RESULTS.md#real-sizes-seconds-and-host-memory-by-phase"
# How far a family was taken beyond the tests that all of them pass: what -> family -> evidence.
LEVELS: Mapping[str, Mapping[str, str]] = {
    "resumed bit for bit": {
        "deepseek_v3": "tests/e2e/test_resume.py",
        "qwen3_next": RECURRENT,
        "qwen3_5_text": RECURRENT,
        "qwen3_5_moe_text": MULTIMODAL,
        "nemotron_h": RECURRENT,
    },
    "learned a task": {
        "deepseek_v3": "scripts/run_deepseek_moe.sh",
        "llama": "examples/smollm2/run.sh",
        "qwen3_next": RECURRENT,
        "qwen3_5_text": RECURRENT,
        "nemotron_h": RECURRENT,
    },
    "on a GPU": {"deepseek_v3": GPU, "qwen3": GPU, "deepseek_v32": GPU},
    "at real size": {
        "llama": "examples/smollm2/run.sh",
        "qwen3": REAL_SIZE,
        "deepseek_v3": REAL_SIZE,
    },
}


def parameters_of(test: Any) -> list[Any]:
    """The values over which a test is parametrised, by itself or by a fixture of its module."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            return [getattr(each, "values", each) for each in mark.args[1]]
    (name,) = test.__code__.co_varnames[: test.__code__.co_argcount]
    fixture = test.__globals__[name]
    return list(fixture._fixture_function_marker.params)


def _of_outcomes(test: Any) -> set[str]:
    return {_model_type(test_families.CASES[case][0]) for case in parameters_of(test)}


def _model_type(arch: str) -> str:
    return str(hf_config(arch)["model_type"])


def proofs() -> Proofs:
    """Column -> model_types that its tests cover."""
    transformers = _of_outcomes(test_families.test_log_probs_equal_transformers_in_float32)
    sparse = test_sparse_attention.test_log_probs_equal_transformers_and_export_the_checkpoint
    transformers |= {_model_type(arch) for arch in parameters_of(sparse)}
    hand_over = _of_outcomes(test_families.test_verify_finds_equal_what_transformers_saved)
    hand_over &= _of_outcomes(test_families.test_export_is_the_checkpoint_bit_for_bit)
    reloads = parameters_of(
        test_vllm_models.test_reload_leaves_the_bytes_of_vllms_own_load_where_they_were
    )
    of_vllm = {_model_type(test_vllm_models.HOPPER[case]["arch"]) for on, case in reloads
               if on == "9.0"}  # fmt: skip
    of_megatron = {shape_of(case).architecture for case in test_megatron_models.CASES.values()}
    plans = parameters_of(test_planner.test_traffic_of_family_equals_that_of_plan)
    return {
        "transformers": transformers,
        "hand-over": hand_over,
        "vLLM on CPU": _of_outcomes(test_families.test_engine_computes_the_same_model),
        "CUDA contract": of_vllm & of_megatron,
        "plan": {_model_type(arch) for arch in plans},
    }


def splits() -> dict[str, list[str]]:
    """model_type -> splits of `test_family_invariance`, of all its models together."""
    found: dict[str, list[str]] = {}
    test = test_family_invariance.test_update_matches_single_process
    for arch, split, *_ in parameters_of(test):
        of_family = found.setdefault(_model_type(arch), [])
        if split not in of_family:
            of_family.append(split)
    return found


def families_table() -> Iterator[str]:
    shown, in_splits = proofs(), splits()
    columns = ["transformers", "splits", "hand-over", "vLLM on CPU", "CUDA contract", "plan"]
    yield _row(["family (`model_type`)", "models", *columns])
    yield _row(["---"] * (2 + len(columns)))
    for name, family in FAMILIES.items():
        cells = {column: "yes" if name in covered else "no" for column, covered in shown.items()}
        cells["splits"] = ", ".join(in_splits.get(name, [])) or "no"
        yield _row([f"`{name}`", family.models, *(cells[column] for column in columns)])
    yield ""
    yield _row(["family", "layers", "specifics"])
    yield _row(["---"] * 3)
    for name, family in FAMILIES.items():
        yield _row([f"`{name}`", _layers(family), "; ".join(_specifics(family)) or "none"])


def _layers(family: Family) -> str:
    attention = "latent attention" if family.latent_attention else "grouped attention"
    if family.sparse_attention:
        attention = f"sparse {attention}"
    if family.delta_net:
        attention = f"gated delta nets and {attention}"
    if family.one_block_a_layer:
        return f"one block each: Mamba-2, {attention}, dense or experts"
    return f"{attention}, {'dense' if family.router is None else 'experts'}"


def _specifics(family: Family) -> Iterator[str]:
    if family.router:
        router = family.router
        with_bias = " with a bias" if router.score_function == "sigmoid" else ""
        yield f"{router.score_function} router{with_bias}"
        if router.methods:
            yield f"shared experts, `{router.scaling_factor}`" + (
                ", groups" if "n_group" in family.spelt_out or family.latent_attention else ""
            )
        if router.gated_shared_size:
            yield "a shared expert behind a gate"
        if family.names.block != "mlp.":
            yield f"experts are called `{family.names.block}experts.N.{_first(family)}`"
    if family.qk_norm and not family.latent_attention:
        what = "over all heads at once" if family.norms_whole_projection else "of each head"
        yield f"norms of queries and keys {what}{_if(family.qk_norm)}"
    if family.qkv_bias and not family.linear_biases:
        yield f"biases of queries, keys and values{_if(family.qkv_bias)}"
    if family.linear_biases:
        yield "biases of every linear layer"
    if family.squared_relu:
        yield "squared ReLU without a gate"
    if not family.rope_types:
        yield "no rotation of heads"
    if family.output_gate:
        yield "attention with an output gate"
    if family.zero_centered_norms:
        yield "zero-centred norms"
    if family.attention_sinks:
        yield "attention sinks"
    if family.alternates_windows:
        yield "a window in every other layer"
    if family.clamps_glu:
        yield "a clamped SwiGLU"
    if family.stacked_experts:
        yield "experts stacked in one tensor" + (", MXFP4" if family.has_mxfp4 else "")
    if family.partial_rotary_factor != 1.0:
        yield "a part of each head is rotated"
    for kind in family.rope_types:
        if kind != "default":
            yield f"rope scaling of type `{kind}`"
    if family.has_drafter:
        yield "MTP layers are trained or draft on demand"


def _first(family: Family) -> str:
    return family.names.up if family.squared_relu else family.names.gate


def _if(of_family: bool | str) -> str:
    return f" (`{of_family}`)" if isinstance(of_family, str) else ""


def levels_table() -> Iterator[str]:
    """Families that were taken further than all are."""
    yield _row(["family", *LEVELS])
    yield _row(["---"] * (1 + len(LEVELS)))
    for name in FAMILIES:
        found = [level.get(name) for level in LEVELS.values()]
        if any(found):
            yield _row([f"`{name}`", *map(_evidence, found)])


def _evidence(where: str | None) -> str:
    """A link within the site, or the file's name."""
    if where is None:
        return "no"
    link = where.removeprefix("docs/using/")
    return f"[yes]({link})" if link != where else f"`{where.partition('#')[0]}`"


def refusals_table() -> Iterator[str]:
    yield _row(["reason", "architectures"])
    yield _row(["---"] * 2)
    for reason, names in unsupported.NAMES.items():
        yield _row([reason, ", ".join(f"`{name}`" for name in sorted(names.split()))])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


PARTS = {"families": families_table, "levels": levels_table, "refusals": refusals_table}


def rendered(page: str) -> str:
    """The page with its generated parts written anew."""
    for name, part in PARTS.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the page has no part {name}"
        page = before + begin + "\n" + "\n".join(part()) + "\n\n" + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
