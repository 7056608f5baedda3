"""Check of the environment that runs it, against a file of pins or everything that must work.

    python -I check.py requirements-cpu.txt cpu|cuda pins|all

Isolated (-I), so that mcore_rl is found only if it is installed, not through the working directory.
"""

# ruff: noqa: F401
import gc
import re
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

gc.disable()  # imports make millions of objects and no garbage
requirements, stack, extent = sys.argv[1:]
setup_py = Path(__file__).parents[2].joinpath("setup.py").read_text(encoding="utf-8")
(pythons,) = re.findall('python_requires="(.+?)"', setup_py)
python = "{}.{}".format(*sys.version_info)
if python not in SpecifierSet(pythons):
    sys.exit(f"Python {python} is not {pythons}")
for line in open(requirements, encoding="utf-8"):
    text = line.split("#")[0].strip()
    if not text:
        continue
    pin = Requirement(text)
    if pin.marker and not pin.marker.evaluate():
        continue
    try:
        found = version(pin.name)
    except PackageNotFoundError:
        sys.exit(f"{pin.name} is not installed")
    if found not in pin.specifier:
        sys.exit(f"{pin} is pinned and {found} is installed")
if stack == "cpu":
    for name in ("torchvision", "torchaudio", "torchcodec"):
        if find_spec(name):
            sys.exit(f"{name} is installed, with which vLLM cannot be imported")
if extent == "all":
    if find_spec("megatron.training") is None:
        sys.exit("megatron-core " + version("megatron-core") + " came without megatron.training")
    if find_spec("mcore_rl") is None:
        sys.exit("mcore_rl is not installed")
    if "mcore_rl" not in entry_points(group="vllm.general_plugins").names:
        sys.exit("mcore_rl is not registered as a vLLM plugin")
    # Here and not before the installation, so that a start and this call one check.
    from mcore_rl.common.errors import UsageError
    from mcore_rl.flags.packages import check_packages

    try:
        check_packages()
    except UsageError as error:
        sys.exit(str(error))
    if stack == "cpu":
        # Before Megatron, which it patches. The imports also compile the bytecode once, before all
        # ranks do at their first start.
        import mcore_rl.train  # isort: skip
        import megatron.training.training
        import vllm.entrypoints.llm
        import vllm.model_executor.models.deepseek_v2
        import vllm.v1.worker.cpu_worker
    import megatron.core
    import vllm
