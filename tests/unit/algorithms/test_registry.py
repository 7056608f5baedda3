"""Names, duplicates, and files of users."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.policy_losses import PolicyLossConfig
from mcore_rl.algorithms.recipes import resolve_algorithm
from mcore_rl.algorithms.registry import (
    advantage_estimator,
    find_advantage_estimator,
    find_policy_loss,
    policy_loss,
)
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.common.errors import UsageError
from mcore_rl.common.user_code import import_user_file
from mcore_rl.rewards.functions import resolve_reward
from tests.unit.algorithms.ragged import ragged, random_ragged
from tests.unit.algorithms.test_estimators import inputs_of

ROOT = Path(__file__).resolve().parents[3]
MINE = """
import torch

from mcore_rl.algorithms.estimators import Discount
from mcore_rl.algorithms.interfaces import AdvantageOutputs, TokenLosses
from mcore_rl.algorithms.registry import advantage_estimator, policy_loss
from mcore_rl.rewards.functions import reward


@advantage_estimator("{name}_constant", Discount(), needs_critic=True)
def constant(inputs, config):
    return AdvantageOutputs(inputs.loss_mask.float() * config.gamma)


@policy_loss("{name}_square")
def square(inputs, config):
    none = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(inputs.log_probs.square(), none, none)


@reward("{name}_length")
def length(*, prompt, response, answer):
    return float(len(response))
"""


pytestmark = pytest.mark.usefixtures("restored_tables")


def test_built_in_names_are_found() -> None:
    assert find_advantage_estimator("gae").needs_critic
    assert find_advantage_estimator("remax").needs_greedy_baseline
    assert find_advantage_estimator("grpo").compares_group
    assert find_policy_loss("gspo").name == "gspo"


@pytest.mark.parametrize(
    "find, message",
    [
        (
            lambda: find_advantage_estimator("rlo"),
            r"--rl-advantage rlo is not a known .* \(did you mean rloo\?\)",
        ),
        (
            lambda: find_policy_loss("ppo"),
            r"--rl-policy-loss ppo is not a known policy loss.*; choose one of cispo, .*sapo$",
        ),
    ],
)
def test_unknown_name_is_refused_with_nearest(find, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        find()


@pytest.mark.parametrize("decorator, name", [(advantage_estimator, "gae"), (policy_loss, "gspo")])
def test_duplicate_name_raises(decorator, name: str) -> None:
    with pytest.raises(ValueError, match=f"called '{name}'; rename one"):
        decorator(name)(lambda inputs, config: None)


def test_user_file_registers_estimator_loss_and_reward(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="first"))
    import_user_file(str(file))
    batch = random_ragged(0)
    inputs = inputs_of(batch)
    config = resolve_algorithm("ppo", {"advantage": "first_constant", "gamma": 0.5})
    entry = find_advantage_estimator("first_constant")
    assert config.needs_critic and entry.needs_critic
    advantages = entry.function(inputs, config.advantage_config).advantages
    assert torch.equal(advantages, 0.5 * batch.loss_mask.float())
    one = ragged([2], [1])
    output = policy_loss_total(
        torch.tensor([2.0, 3.0, float("nan")]),
        torch.zeros(3),
        old_log_probs=torch.zeros(3),
        advantages=torch.zeros(3),
        loss_mask=one.loss_mask,
        lengths=one.lengths,
        denominators=Denominators(2, 1),
        config=PolicyLossConfig("first_square", find_policy_loss("first_square").parameters),
    )
    assert output.loss.item() == 6.5
    assert resolve_reward("first_length")(prompt="", response="four", answer="") == 4.0


def test_user_file_runs_once_for_any_spelling_of_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE.format(name="once"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.py").symlink_to(file)
    found = []
    for spelling in (str(file), "mine.py", "./mine.py", "link.py"):
        import_user_file(spelling)
        found.append(find_policy_loss("once_square").function)
    assert len(set(found)) == 1


def test_user_files_of_same_name_are_separate_modules(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(MINE.format(name=name))
        import_user_file(str(tmp_path / name / "mine.py"))
    assert find_policy_loss("a_square").function is not find_policy_loss("b_square").function


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("gone.py", None, "--rl-import .*gone.py does not exist"),
        ("mine.txt", "", "--rl-import .*mine.txt is not a .py file"),
        ("raises.py", "raise OSError('no disk')", "--rl-import .* raised OSError: no disk"),
        ("exits.py", "import sys; sys.exit(3)", "--rl-import .* raised SystemExit: 3"),
        ("syntax.py", "def", "--rl-import .* raised SyntaxError"),
        (
            "taken.py",
            "from mcore_rl.algorithms.registry import policy_loss\n"
            "policy_loss('sapo')(lambda inputs, config: None)",
            "--rl-import .* raised ValueError: two policy losses are called 'sapo'",
        ),
    ],
)
def test_unusable_user_file_is_refused(
    name: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=f"^{message}"):
        import_user_file(str(tmp_path / name))


@pytest.mark.slow
def test_name_of_built_in_is_refused_before_any_lookup(tmp_path: Path) -> None:
    file = tmp_path / "taken.py"
    file.write_text(
        "from mcore_rl.algorithms.registry import advantage_estimator\n"
        "advantage_estimator('gae')(lambda inputs, config: None)\n"
    )
    program = f"from mcore_rl.common.user_code import import_user_file as i; i({str(file)!r})"
    process = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert "two advantage estimators are called 'gae'" in process.stderr.splitlines()[-1]


def test_user_file_of_rewards_does_not_import_torch(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "from mcore_rl.rewards.functions import reward\n"
        "reward('mine')(lambda *, prompt, response, answer: 1.0)\n"
    )
    program = (
        "import sys\n"
        "from mcore_rl.common.user_code import import_user_file\n"
        f"import_user_file({str(file)!r})\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
