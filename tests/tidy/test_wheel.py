"""The container: what is built and installed is exactly the package `kvfabric`."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("fabric", "tiers", "router", "kernels", "actors")


def test_the_rooms_are_linked_into_the_package() -> None:
    for room in ROOMS:
        link = ROOT / "kvfabric" / room
        assert link.resolve() == ROOT / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # A copy, so that nothing that an earlier build left in build/ can hide what is missing.
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in (*ROOMS, "kvfabric"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("__init__.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"kvfabric/{file.relative_to(source)}"
        for room in ROOMS
        for file in source.glob(f"{room}/**/*.py")
    }
    wanted |= {"kvfabric/__init__.py", "kvfabric/__main__.py", "kvfabric/py.typed"}
    assert not wanted - inside
    metadata = {name for name in inside if ".dist-info/" in name}
    assert {name for name in inside - metadata if name.endswith(".py")} <= wanted
    assert {name.partition("/")[0] for name in inside - metadata} == {"kvfabric"}
    assert any(name.endswith("entry_points.txt") for name in metadata)
    assert any(name.endswith("LICENSE") for name in metadata)


@pytest.mark.slow
def test_an_installed_package_leaves_the_bare_names_alone(tmp_path: Path) -> None:
    program = (
        "import importlib.util as find, kvfabric.tiers.base\n"
        f"print([room for room in {ROOMS} if find.find_spec(room) is not None])"
    )
    # -I: neither this folder nor PYTHONPATH, only what is installed.
    ran = subprocess.run(
        [sys.executable, "-I", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
