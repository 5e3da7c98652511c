"""What a release promises: a wheel that works where nothing but torch is installed, and one version everywhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import ddpnopt

ROOT = Path(__file__).parents[2]
STEP = """
import sys, torch, ddpnopt
assert "wheel-venv" in ddpnopt.__file__, ddpnopt.__file__
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
opt = ddpnopt.DDPNOpt(model)
before = model[0].weight.detach().clone()
torch.nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.randint(2, (16,))).backward()
opt.step()
assert not torch.equal(before, model[0].weight)
extras = {"pandas", "matplotlib", "typer", "rich", "sklearn", "pyarrow", "mkdocs", "playwright"}
print(ddpnopt.__version__, sorted(extras & set(sys.modules)))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    # In this environment, not in one that pip would have to fetch first: works without a network.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w"]
    built = subprocess.run([*command, str(out), str(source)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="the source archive is built by hatchling")
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = out.glob("*.tar.gz")
    return found


def test_the_source_archive_gives_the_same_wheel_and_has_what_the_readme_points_to(
    source_archive: Path, wheel: Path, tmp_path: Path
) -> None:
    with tarfile.open(source_archive) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    links = re.findall(r"\]\(([^)#]+)", (unpacked / "README.md").read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (unpacked / link).exists()] == []
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w"]
    built = subprocess.run([*command, str(tmp_path), str(source_archive)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (again,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and, by a path to this one's packages, torch."""
    home = tmp_path_factory.mktemp("wheel-venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    packages = next((home / "lib").glob("python*/site-packages"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(packages)]
    subprocess.run([*install, str(wheel)], check=True)
    (packages / "torch-of-the-tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return home / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([str(python), *arguments], cwd=cwd, env=clean, capture_output=True, text=True)


def test_the_wheel_imports_and_steps_in_an_empty_environment_with_torch_alone(python: Path, tmp_path: Path) -> None:
    done = run(python, "-c", STEP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ddpnopt.__version__} []"


def test_the_wheel_has_the_types_and_the_parts_of_the_page(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "ddpnopt/py.typed" in names
    assets = {f"ddpnopt/lab/page/assets/{path.name}" for path in (ROOT / "src").rglob("page/assets/*")}
    assert len(assets) >= 6
    assert assets <= names
    assert not [name for name in names if name.startswith(("tests", "docs")) or "__pycache__" in name]


def test_the_command_line_of_the_wheel_answers(python: Path, tmp_path: Path) -> None:
    done = run(python, "-m", "ddpnopt", "report", "--results", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no folder none" in done.stderr


def test_a_task_of_ones_own_is_compared_and_a_run_is_viewed_from_the_wheel(python: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "examples" / "compare" / "my_task.py", tmp_path)
    options = ("--steps", "3", "--seeds", "1", "--methods", "ddpnopt,adam@0.01", "--out", "out")
    done = run(python, "-m", "ddpnopt", "compare", "my_task.py", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "DDPNOpt" in done.stdout
    (tmp_path / "run.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n', encoding="utf-8")
    done = run(python, "-m", "ddpnopt", "view", "run.jsonl", "--page", "run.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Loss of the batch" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_version_changelog_and_citation_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == ddpnopt.__version__
    assert f"## {ddpnopt.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["preferred-citation"]["authors"][0]["family-names"] == "Liu"


def test_workflows_and_templates_can_be_read_and_cover_the_promised_versions() -> None:
    for path in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict), path
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.10", "3.11", "3.12", "3.13"]
    pinned = re.search(r'dependencies = \["torch>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert pinned is not None
    assert matrix["torch"][0] == f"{pinned[1]}.*"
    assert len(matrix["torch"]) >= 3
