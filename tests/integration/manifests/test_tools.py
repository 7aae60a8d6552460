"""Manifests and the Dockerfile in third-party tools: kustomize, hadolint, the checks of an API server."""

import subprocess
from pathlib import Path

import pytest

from tests.support.manifests.rendering import documents, of_readme, render, with_components
from tests.support.tools import tool

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = sorted(path.parent for path in (ROOT / "k8s").glob("overlays/*/kustomization.yaml"))


@pytest.mark.parametrize("overlay", OVERLAYS, ids=[path.name for path in OVERLAYS])
def test_kustomize_renders_the_checked_manifests(overlay):
    assert kustomized(overlay) == sorted(render(overlay), key=by_name)


def test_components_render_the_same(tmp_path):
    expected = with_components(tmp_path, "gpu-2x8")
    assert kustomized(tmp_path) == sorted(expected, key=by_name)


def test_kustomizations_in_the_readme_render_the_same(tmp_path):
    expected = of_readme(tmp_path)
    assert kustomized(tmp_path) == sorted(expected, key=by_name)


def by_name(document):
    return document["kind"], document["metadata"]["name"]


def kustomized(folder):
    command = [tool("kubectl"), "kustomize", str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stderr
    return sorted(documents(found.stdout), key=by_name)


def test_hadolint_reports_nothing():
    command = [tool("hadolint"), "--failure-threshold", "style", str(ROOT / "docker" / "Dockerfile")]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (found.stdout, found.returncode) == ("", 0)


def test_missing_tool_skips_or_fails_if_all_are_required(monkeypatch):
    monkeypatch.delenv("REQUIRE_TOOLS", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not installed"):
        tool("no-such-tool")
    monkeypatch.setenv("REQUIRE_TOOLS", "1")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_TOOLS"):
        tool("no-such-tool")
