"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from mcore_rl.common.errors import UsageError
from tests.file_seconds import FileSeconds
from tests.rank_pool import ENVIRONMENT, ROOT, RankPool
from tests.tiers import Tier

pytest.register_assert_rewrite(
    "tests.bad_input_cases", "tests.dist.checkpoints", "tests.versions.tiny_job"
)

os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "MASTER_ADDR"})
# Hundreds of processes import the same packages; each would compile them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes says how busy the machine is.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=["touched"], help="the slow files that tests/tiers.py chooses"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileSeconds(config), "file_seconds")
    if config.getoption("tier"):
        config.pluginmanager.register(Tier(), "tier")


def load_script(name: str) -> ModuleType:
    """Import a module of scripts/, which is not a package."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoint_factory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`factory(arch, size="micro", **options)`: a random checkpoint, made once per test session."""
    script = load_script("make_tiny_deepseek")
    made: dict[str, Path] = {}

    def factory(arch: str = "deepseek_v3", size: str = "micro", **options: object) -> Path:
        key = repr((arch, size, sorted(options.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(arch) / "checkpoint"
            made[key] = script.make_checkpoint(folder, arch=arch, size=size, **options)
        return made[key]

    return factory


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and prompts that pass all checks; see bad_input_folder.py."""
    from tests.bad_input_folder import make_good_folder  # which imports transformers

    here = tmp_path_factory.mktemp("bad_input") / "good"
    make_good_folder(here)
    return here


@pytest.fixture
def here(good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder to spoil; the cache of tokenised prompts is shared."""
    shutil.copytree(good, tmp_path / "case")
    (tmp_path / "cache").symlink_to(good.parent)
    return tmp_path / "case"


@pytest.fixture
def of_user(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, as a user to whom permissions apply; root reads everything."""
    if os.geteuid() != 0:
        yield tmp_path
        return
    folder, nobody = Path(tempfile.mkdtemp()), 65534
    os.chown(folder, nobody, nobody)
    os.seteuid(nobody)
    try:
        yield folder
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that play the ranks of small jobs."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm_python(ranks: RankPool) -> Path:
    """A program like `sys.executable` that has Megatron and vLLM imported already."""
    return ranks.python.program


@pytest.fixture(scope="session")
def warmed_checkpoint() -> Path:
    """Made once, in minutes, and cached where `scripts/run_deepseek_moe.sh` looks for it."""
    if named := os.environ.get("MCORE_RL_TINY_CHECKPOINT"):
        return Path(named)
    script = load_script("make_tiny_deepseek")
    return script.make_checkpoint(cache_of_user() / "tiny_deepseek_v3", warm_up=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, downloaded once and cached where examples/smollm2 looks for it."""
    script = load_script("make_smollm2")
    try:
        return script.make_checkpoint(cache_of_user() / "smollm2_135m_instruct")
    except UsageError as error:
        pytest.skip(str(error))


def cache_of_user() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MCORE_RL_CACHE") or Path(cache) / "mcore_rl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests are quick unless they are slow or want a model that takes a minute to make.

    Files of minutes come first, so that all workers end at about the same time. Unit tests come in
    the order of their files' sizes: in that of their names, those that wait for processes and
    clocks would come together at the end, and leave the cores idle.
    """
    for item in items:
        is_slow = item.get_closest_marker("slow") or "warmed_checkpoint" in item.fixturenames
        if item.nodeid.startswith("tests/unit/") and not is_slow:
            item.add_marker(pytest.mark.quick)
    order = ("tests/e2e/", "tests/cuda/", "tests/versions/", "tests/dist/", "")
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}

    def rank(item: pytest.Item) -> tuple[int, int]:
        folder = next(i for i, folder in enumerate(order) if item.nodeid.startswith(folder))
        return folder, 0 if folder < len(order) - 1 else -sizes[item.path]

    items.sort(key=rank)
