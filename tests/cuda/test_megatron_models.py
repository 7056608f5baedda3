"""What we derive for a machine with GPUs passes Megatron's checks, and its models are built of it.

Of the first layers of every published config, and of the presets as they are, DeepSeek-V3 at full
size on a rank of each of its stages (TP8 PP8 EP32 on 256 ranks): with Transformer Engine's layers
and with local ones, with Apex and without. Two processes; see megatron_job.py for what they tell.

Out of reach, as nothing is computed: whether kernels that these flags choose run on a device and
agree with one another (attention and rotation of Transformer Engine, grouped products, Apex's
weight gradients); the optimizer's own kernels and what DDP's buffers take; NCCL's groups.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from mcore_rl.model.families import FAMILIES
from tests.cuda.presets import preset_flags, shape_of
from tests.cuda.stack import Stack
from tests.megatron_parameters import SPECS, stage_parameters
from tests.model_shapes import CONFIGS, published_shape

SPLIT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
EXPERTS = "--expert-model-parallel-size 2".split()
MODELS = [
    name
    for name in sorted(file.stem for file in CONFIGS.iterdir())
    if name not in ("gpt-oss-120b", "qwen3.5-397b-a17b")  # as smaller ones
]


def first_layers(config: str, *more: str, **case: Any) -> dict[str, Any]:
    """Two layers a stage, the first of them dense where the model has such; or four blocks."""
    shape = published_shape(config)
    flags = [*SPLIT, *(EXPERTS if shape.experts else []), *more]
    whole_world = {"world_size": 4, "ranks": list(range(4))}
    num_layers = 8 if shape.blocks else 4
    return {"config": config, "num_layers": num_layers, "flags": flags, **whole_world, **case}


CASES: dict[str, dict[str, Any]] = {
    **{config: first_layers(config) for config in MODELS},
    "critic": first_layers("qwen3-30b-a3b", value_head=True),
    "experts apart": first_layers("deepseek-v3", "--rl-no-moe-grouped-gemm"),
    "fused down projections": first_layers("deepseek-v3", "--mla-down-proj-fusion"),
    "tiny": {
        "config": "moonlight-16b-a3b",  # as the tiny model, without YaRN
        "num_layers": 4,
        "flags": [*preset_flags("tiny"), *preset_flags("tiny-model"), *preset_flags("tiny-task")],
        "world_size": 4,
        "ranks": list(range(4)),
    },
    "v2-lite": {
        "config": "deepseek-v2-lite",
        "flags": preset_flags("v2-lite"),
        "world_size": 8,
        "ranks": list(range(8)),
    },
    "v3": {
        "config": "deepseek-v3",
        "flags": preset_flags("v3"),
        "world_size": 256,
        "ranks": [0, 37, 65, 127, 130, 165, 200, 255],  # of each stage
    },
}


# With Transformer Engine; local layers know neither.
OTHER_SPECS = {
    "experts apart": "transformer_engine_sequential",
    "fused down projections": "transformer_engine_fused_down",
}
# Of those flags, as `stage_parameters` takes them.
_DEGREES = {
    "tiny": {"tp_size": 2, "ep_size": 2},
    "v2-lite": {"tp_size": 4, "ep_size": 4},
    "v3": {"tp_size": 8, "ep_size": 32},
}


def degrees_of(name: str) -> dict[str, int]:
    experts = published_shape(CASES[name]["config"]).experts
    return _DEGREES.get(name, {"tp_size": 2, "ep_size": 2 if experts else 1})


@pytest.fixture(scope="module", params=["transformer_engine", "local"])
def layers(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(
    layers: str, cuda_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("megatron") / "cases.json"
    file.write_text(json.dumps(CASES))
    return cuda_stack.run("megatron_job", layers, str(file), timeout=1800)


def test_every_family_is_examined() -> None:
    assert {shape_of(CASES[name]).architecture for name in CASES} == FAMILIES.keys()


@pytest.mark.timeout(1900)
def test_derived_flags_pass_megatrons_validation(found: dict[str, Any], layers: str) -> None:
    """The job runs it, as a start does, and builds the last stage: with Apex and without."""
    assert found["cases"].keys() == CASES.keys()
    local = "--transformer-impl --no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm"
    for name, case in found["cases"].items():
        shape = shape_of(CASES[name])
        expected = set(local.split()) if layers == "local" else set()
        if shape.indexer or (shape.latent and shape.rope["rope_type"] != "yarn"):
            expected.add("--no-rope-fusion")
        if shape.linear_biases and layers != "local":
            expected.add("--no-bias-dropout-fusion")
        if shape.experts and layers != "local" and name != "experts apart":
            expected.add("--moe-grouped-gemm")
        for platform, flags in case["derived"].items():
            decided_here = {
                flag
                for flag in flags
                if flag.endswith(("-fusion", "-impl", "-layer-norm", "-gemm", "-initialization"))
            }
            without_apex = {"--no-gradient-accumulation-fusion"} if platform == "no_apex" else set()
            assert decided_here == expected | without_apex, (name, platform)


def test_megatron_refuses_what_the_derived_flags_switch_off(
    found: dict[str, Any], layers: str
) -> None:
    said = found["said"]
    assert "fused_weight_gradient_mlp_cuda" in said["gradient_accumulation_fusion"]
    assert "only works with YARN" in said["rope_fusion of moonlight"]
    of_dense = said["rope_fusion of llama"]
    assert "Please install TE" in of_dense if layers == "local" else of_dense == ""


def test_parameters_are_those_that_the_weight_map_expects(
    found: dict[str, Any], layers: str
) -> None:
    """Names and shapes against a table that is written out by hand."""
    for name, case in found["cases"].items():
        if name == "critic":
            continue
        spec = SPECS[OTHER_SPECS.get(name, layers) if layers == "transformer_engine" else layers]
        shape, degrees = shape_of(CASES[name]), degrees_of(name)
        spec = dataclasses.replace(spec, blocks=bool(shape.blocks))
        halves = dataclasses.replace(spec, halves=True)
        for of_class, ranks in ((spec, case["ranks"]), (halves, case["hybrid"])):
            for rank, built in ranks.items():
                assert built["devices"] == ["meta"]
                stage = tuple(sorted(set(built["layers"])))
                assert tuple(built["layers"]) == of_class.numbered(stage)
                expected = stage_parameters(shape, of_class, **degrees, layers=stage)
                shapes = {key: tuple(size) for key, size in built["shapes"].items()}
                assert shapes == expected, (name, rank)


def test_weight_map_places_parameters_where_megatrons_checkpoints_do(
    found: dict[str, Any],
) -> None:
    """Every box of the checkpoint is that of Megatron's `sharded_state_dict`; a neighbour's is not.
    Together the ranks hold everything, and the optimizer knows the experts."""
    for name, case in found["cases"].items():
        for rank, built in (*case["ranks"].items(), *case["hybrid"].items()):
            assert built["elsewhere"] == [], (name, rank)
            assert built["of_neighbour_elsewhere"] > 0, (name, rank)
            assert built["wrong_optimizer"] == [], (name, rank)
            assert built["sinks_not_split"] == [], (name, rank)
        if name != "v3":  # of which there are a few ranks
            assert case["lacking"] == [], name


def test_checkpoints_do_not_depend_on_the_model_class(found: dict[str, Any]) -> None:
    for name, case in found["cases"].items():
        for rank, built in case["hybrid"].items():
            keys = case["ranks"][rank]["checkpoint_keys"]
            assert built["checkpoint_keys"] == keys, (name, rank)


def test_checkpoints_do_not_depend_on_how_experts_are_computed(
    found: dict[str, Any],
) -> None:
    together, apart = (found["cases"][name]["ranks"] for name in ("deepseek-v3", "experts apart"))
    for rank in together:
        assert together[rank]["checkpoint_keys"] == apart[rank]["checkpoint_keys"]
