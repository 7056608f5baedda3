"""Files of examples/ for Kubernetes and SkyPilot: their schemas, and what they would start."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubeflow_trainer_api.models import IoK8sApiCoreV1PodTemplateSpec, JobsetV1alpha2JobSet

from tests.cuda.stack import unpack
from tests.unit.test_examples import EXAMPLES, plan_of

SKYPILOT, KUBEFLOW = "0.14.1", "1.9.4"
NODES = "10.0.0.1\n10.0.0.2"
# File -> what a machine sees, by its number, and the address of the first one.
MACHINES: dict[str, tuple[dict[str, str], str, str]] = {
    "kubernetes/jobset.yaml": ({}, "JOB_COMPLETION_INDEX", "mcore-rl-machines-0-0.mcore-rl"),
    "kubernetes/pytorchjob.yaml": (
        {"MASTER_ADDR": "mcore-rl-master-0"},
        "RANK",
        "mcore-rl-master-0",
    ),
    "skypilot/two_machines.yaml": (
        {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": NODES},
        "SKYPILOT_NODE_RANK",
        "10.0.0.1",
    ),
}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return found


def pods_of(name: str) -> list[dict[str, Any]]:
    """The templates of a file's pods."""
    spec = read(name)["spec"]
    if name.endswith("jobset.yaml"):
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    return [replica["template"] for replica in spec["pytorchReplicaSpecs"].values()]


def code_of(name: str) -> str:
    """What each machine runs by bash."""
    if name.startswith("skypilot/"):
        return str(read(name)["run"])
    codes = set()
    for pod in pods_of(name):
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["bash", "-c"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        codes |= set(container["args"])
    (code,) = codes
    return code


def classes_of(source: Path) -> dict[str, dict[str, Any]]:
    """The literals of each class of a generated module."""
    return {
        node.name: {
            each.targets[0].id: ast.literal_eval(each.value)
            for each in node.body
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        }
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def schema_in(node: ast.AST) -> Any:
    """A schema as far as it is literal; what the code computes permits everything."""
    if isinstance(node, ast.Dict):
        entries = zip(node.keys, node.values, strict=True)
        found = {
            key.value: schema_in(value) for key, value in entries if isinstance(key, ast.Constant)
        }
        return {key: value for key, value in found.items() if value is not ...}
    if isinstance(node, ast.List):
        return [schema_in(each) for each in node.elts]
    return node.value if isinstance(node, ast.Constant) else ...


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    unpack("skypilot", SKYPILOT, folder)
    unpack("kubeflow-training", KUBEFLOW, folder)
    return folder


def test_jobset_has_its_schema() -> None:
    """What a class does not know it leaves out."""
    given = read("kubernetes/jobset.yaml")
    found = JobsetV1alpha2JobSet.from_dict(given)
    assert found is not None and found.to_dict() == given


@pytest.mark.slow
def test_pytorchjob_has_its_schema(packages: Path) -> None:
    spec = read("kubernetes/pytorchjob.yaml")["spec"]
    folder = packages / "kubeflow" / "training" / "models"

    def names(module: str) -> set[str]:
        (found,) = classes_of(folder / f"kubeflow_org_v1_{module}.py").values()
        return set(found["attribute_map"].values())

    assert spec.keys() <= names("py_torch_job_spec")
    assert spec["runPolicy"].keys() <= names("run_policy")
    assert spec["pytorchReplicaSpecs"].keys() == {"Master", "Worker"}
    for replica in spec["pytorchReplicaSpecs"].values():
        assert replica.keys() <= names("replica_spec")
        template = IoK8sApiCoreV1PodTemplateSpec.from_dict(replica["template"])
        assert template is not None and template.to_dict() == replica["template"]
    assert sum(each["replicas"] for each in spec["pytorchReplicaSpecs"].values()) == 2


@pytest.mark.slow
def test_skypilot_task_has_its_schema(packages: Path) -> None:
    code = ast.parse((packages / "sky" / "utils" / "schemas.py").read_text())
    task = read("skypilot/two_machines.yaml")
    parts = {
        "get_task_schema": task,
        "_get_single_resources_schema": task["resources"],
        "get_storage_schema": task["file_mounts"]["/data"],
    }
    for function in code.body:
        if isinstance(function, ast.FunctionDef) and function.name in parts:
            returned = [node for node in ast.walk(function) if isinstance(node, ast.Return)][-1]
            assert returned.value is not None
            jsonschema.validate(parts.pop(function.name), schema_in(returned.value))
    assert not parts


@pytest.mark.parametrize("name", MACHINES)
def test_file_starts_a_job_that_fits_and_resumes(name: str, tmp_path: Path) -> None:
    variables, number, first = MACHINES[name]
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/bash\nprintf '%s\\t' \"$@\"\n")
    program.chmod(0o755)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for node in range(2):
        run = subprocess.run(
            ["bash", "-c", code_of(name)],
            cwd=tmp_path,
            env={"PATH": f"{program.parent}:{os.defpath}", number: str(node), **variables},
            capture_output=True,
            text=True,
        )
        assert (run.returncode, run.stderr) == (0, "")
        words = run.stdout.rstrip("\t").split("\t")
        launcher = ("-m mcore_rl.launch --nproc-per-node 8 --nnodes 2 --node-rank", str(node))
        expected = (
            f"{' '.join(launcher)} --master-addr {first} --master-port 29500 -m mcore_rl.train"
        )
        assert words[: len(expected.split())] == expected.split()
    for flag in ("--rl-run-dir", "--load", "--rl-load-or-start"):
        assert flag in words
    found = plan_of(words, "qwen3-30b-a3b", 16, tmp_path / "plan.json")
    assert found["fits"] is True and found["problems"] == []
