"""`refengine doctor` where another package is called `kernels` too, and what it says about attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from refengine.commands import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a package of the name that Hugging Face uses, as an installer would have left it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("def get_kernel(): ...\n")
    (tmp_path / "kernels-0.9.0.dist-info").mkdir()
    (tmp_path / "kernels-0.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.9.0\n"
    )
    return tmp_path


def finding_with(path: list[Path]) -> str:
    """What is found about `kernels` by a Python that looks into these folders, in this order."""
    code = "from refengine.commands import doctor; print(doctor._kernels())"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = (
        [sys.executable, "-P", "-c", code] if sys.version_info >= (3, 11) else [sys.executable, "-c", code]
    )
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=path[0])
    return done.stdout.strip()


def test_ours_alone() -> None:
    assert doctor._kernels() == doctor.Finding("kernels", "ours")


def test_the_other_one_is_hidden_by_ours(other: Path) -> None:
    assert finding_with([ROOT, other]) == str(
        doctor.Finding(
            "kernels", "ours; the hub's `kernels` 0.9.0 is installed too and hidden in this folder"
        )
    )


def test_the_other_one_comes_first(other: Path) -> None:
    found = finding_with([other, ROOT])
    assert f"another package of this name comes first: {other / 'kernels' / '__init__.py'}" in found
    assert "is_fault=True" in found


def test_attention_is_named() -> None:
    assert not doctor._tiny_model().is_fault
    finding = doctor._attention()
    assert finding.found.startswith("backend cpu on the CPU, ") and not finding.is_fault
