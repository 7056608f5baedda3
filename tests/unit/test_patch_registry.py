"""The registry of patches, with the small package `packaging` as the target."""

from __future__ import annotations

import logging

import packaging
import packaging.version
import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.patches import registry
from mcore_rl.patches.registry import Patch, applied_patches, apply_all, apply_patch

HERE = packaging.__version__


@pytest.fixture
def calls(monkeypatch):
    """Collects what patches do, with an empty record of applied patches."""
    monkeypatch.setattr(registry, "_applied", {})
    return []


def _patch(calls, name="test.patch", **changes) -> Patch:
    fields = dict(
        packages=("packaging",),
        versions=f"=={HERE}",
        reason="a reason",
        apply=lambda: calls.append(name),
    )
    return Patch(name=name, **{**fields, **changes})


def test_patch_is_applied_once_and_logged(calls, caplog):
    patch = _patch(calls)
    with caplog.at_level(logging.INFO):
        assert apply_patch(patch)
        assert not apply_patch(patch)
    assert calls == ["test.patch"]
    assert [r.getMessage() for r in caplog.records] == [
        f"[Patch] test.patch applied to packaging {HERE}: a reason"
    ]
    assert applied_patches() == {"test.patch": f"packaging {HERE}"}


def test_apply_all_returns_newly_applied_patches(calls):
    first, second = _patch(calls, "first"), _patch(calls, "second")
    apply_patch(first)
    assert apply_all([first, second]) == ("second",)
    assert calls == ["first", "second"]


def test_unknown_version_is_refused_with_remedy(calls):
    with pytest.raises(UsageError) as error:
        apply_patch(_patch(calls, versions="==0.1"))
    message = str(error.value)
    assert "packaging 0.1" in message
    assert HERE in message
    assert "install one of those versions" in message
    assert calls == []


def test_unneeded_patch_does_not_check_versions(calls):
    patch = _patch(calls, versions="==0.1", packages=("no-such-package",), needed=lambda: False)
    assert not apply_patch(patch)
    assert calls == []


def test_missing_package_is_refused(calls):
    with pytest.raises(UsageError, match="no-such-a or no-such-b, which is not installed"):
        apply_patch(_patch(calls, packages=("no-such-a", "no-such-b")))


def test_any_name_of_package_is_accepted(calls):
    assert apply_patch(_patch(calls, packages=("no-such-package", "packaging")))


@pytest.mark.parametrize(
    ("versions", "version", "expected"),
    [
        (">=0.16,<0.20", "0.19.2", True),
        (">=0.16,<0.20", "0.20.0", False),
        ("==0.32.0", "0.32.0+cpu", True),
        (">=0.16", "0.17.0rc1", True),
        ("==0.32.0", "0.32.1", False),
    ],
)
def test_supports_accepts_local_labels_and_prereleases(calls, versions, version, expected):
    assert _patch(calls, versions=versions).supports(version) == expected


def test_target_with_other_parameters_is_refused(calls):
    def target(layer, keep):
        return layer, keep

    def apply():
        registry.require_parameters(target, "layer remove_weight")

    with pytest.raises(UsageError, match=r"takes layer, keep, not layer, remove_weight"):
        apply_patch(_patch(calls, apply=apply))
    assert not applied_patches()


def _by_code(calls, **changes) -> Patch:
    """A patch that goes by what the code looks like."""
    return _patch(calls, **{"versions": None, **changes})


def test_patch_by_code_accepts_any_version(calls):
    assert apply_patch(_by_code(calls)) and calls == ["test.patch"]


def refuse_parameters():
    registry.require_parameters(len, "nothing")


def refuse_source():
    registry.require_source(packaging.version.parse, "return  Version(version)", "nowhere")


def refuse_what_has_no_source():
    made = {"__name__": "made"}
    exec("def target(): pass", made)
    registry.require_source(made["target"], "anything")


@pytest.mark.parametrize("when", ["needed", "apply"])
@pytest.mark.parametrize(
    ("look", "reason"),
    [
        (refuse_parameters, "builtins.len takes obj, not nothing"),
        (refuse_source, "packaging.version.parse no longer has `nowhere`"),
        (refuse_what_has_no_source, "made.target comes without its source"),
        (lambda: __import__("packaging.nowhere"), "No module named 'packaging.nowhere'"),
        (lambda: packaging.nowhere, "module 'packaging' has no attribute 'nowhere'"),
    ],
)
def test_unknown_code_is_refused_with_reason(calls, when, look, reason):
    with pytest.raises(UsageError) as error:
        apply_patch(_by_code(calls, **{when: look}))
    assert error.value.fault.startswith("patch test.patch (a reason) ")
    assert f"packaging {HERE}: {reason}" in str(error.value)
    assert "install one of 0.18.0 to 0.20.0" in str(error.value)
    assert not applied_patches()


def test_error_of_patch_with_versions_is_not_converted(calls):
    with pytest.raises(AttributeError, match="nowhere"):
        apply_patch(_patch(calls, apply=lambda: packaging.nowhere))


def test_require_parameters_needs_same_names_in_order():
    def target(layer, keep):
        return layer, keep

    def refused(names):
        try:
            registry.require_parameters(target, names)
        except UsageError:
            return True
        return False

    expectations = ["layer keep", "keep layer", "layer", "layer keep more", ""]
    assert [names for names in expectations if not refused(names)] == ["layer keep"]


def test_record_of_patches_is_read_only():
    with pytest.raises(TypeError):
        applied_patches()["x"] = "y"
