"""`against_vllm --codemap`: runs without vLLM, says what it compared, and notices a range that has moved."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from refengine.trace import codemap
from refengine.trace.codemap import Place
from tests.conformance import against_vllm

SOURCE = "class Pool:\n    def free(self):\n        return 1\n"


@pytest.fixture()
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked release 9.8.7 with one module, of which the code map names one function."""
    folder = tmp_path / "9.8.7"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "pool.py").write_text(SOURCE, encoding="utf-8")
    place = Place("Pool.free", "vllm/pool.py", 2, 3)
    monkeypatch.setattr(codemap, "places_in", lambda name: [place] if name == "9.8.7" else [])
    return folder


def test_a_true_map_passes(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against_vllm.main(["--codemap", str(release)]) == 0
    assert capsys.readouterr().out == "vLLM 9.8.7: 1 of 1 line ranges are the named definition.\n"


def test_a_range_that_moved_is_named(release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (release / "vllm" / "pool.py").write_text("\n" + SOURCE, encoding="utf-8")
    assert against_vllm.main(["--codemap", str(release)]) == 1
    out = capsys.readouterr().out
    assert "Pool.free, pool.py 2-3: it is at 3-4" in out and "0 of 1" in out


def test_the_release_may_be_said_by_the_metadata(release: Path) -> None:
    moved = release.rename(release.parent / "src")
    (moved / "vllm-9.8.7.dist-info").mkdir()
    assert against_vllm.main(["--codemap", str(moved)]) == 0


def test_what_cannot_be_checked_is_not_reported_as_passed(
    release: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert against_vllm.main(["--codemap", str(tmp_path / "nothing")]) == 2
    (release.parent / "1.2.3").mkdir()
    assert against_vllm.main(["--codemap", str(release.parent / "1.2.3")]) == 2
    release.rename(release.parent / "2.3.4")
    assert against_vllm.main(["--codemap", str(release.parent / "2.3.4")]) == 2
    assert against_vllm.main(["--codemap", "a", "b"]) == 2
    assert capsys.readouterr().err.count("was not checked") == 3


def test_the_map_holds_for_the_vllm_that_is_installed() -> None:
    try:
        distribution("vllm")
    except PackageNotFoundError:
        assert against_vllm.main(["--codemap"]) == 2
        pytest.skip("vllm is not installed")
    assert against_vllm.main(["--codemap"]) == 0
