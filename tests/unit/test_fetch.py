"""`refengine fetch`, with a stand-in for the package: a file of a few kilobytes in place of 253 million bytes."""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from refengine import LLM, SamplingParams
from refengine.commands import fetch
from refengine.commands.fetch import FetchOptions, run_fetch
from refengine.errors import CheckpointError, ConfigError
from refengine.model import gemma
from tests.unit.gguf_files import write_gguf
from tests.unit.networks import TOKENS, make_network

pytest.importorskip("gguf")
MODULE = """
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"

def assemble(output_path):
    data = WEIGHTS.read_bytes()
    Path(output_path).write_bytes(data)
    if len(data) < 100:
        raise ValueError("its own sum is wrong")
"""
YES = FetchOptions(accept_terms=True)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A Gemma that is tiny, as a GGUF file."""
    directory = tmp_path_factory.mktemp("gemma")
    make_network(directory, "Gemma3", sliding_window=16, query_pre_attn_scalar=32)
    return write_gguf(directory / "x.gguf", directory, "Q8_0").read_bytes()


@pytest.fixture
def package(tmp_path: Path, weights: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, installed; its folder. The cache folder lies in `tmp_path` too."""
    package = tmp_path / "site" / fetch.PACKAGE
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE)
    (package / "weights").write_bytes(weights)
    (package / "data" / "GEMMA_TERMS.html").write_text("the terms")
    (package / "data" / "secret.txt").write_text("not wanted")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, fetch.PACKAGE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(weights).hexdigest())
    return package


def say(options: FetchOptions = YES, answer: str = "") -> str:
    """What the command prints, with `answer` typed at the keyboard."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(answer))
        run_fetch(options, console)
    return out.getvalue()


def is_untouched(tmp_path: Path) -> bool:
    """Nothing was made, and no half of anything stayed."""
    return not any((tmp_path / "cache").rglob("*")) or not any((tmp_path / "cache" / "refengine").iterdir())


def test_after_it_the_model_runs_by_its_name(package: Path) -> None:
    text = say()
    assert "Gemma Terms of Use" in text and "https://ai.google.dev/gemma/terms" in text
    assert str(package / "data" / "GEMMA_TERMS.html") in text
    made = gemma.cache_directory()
    files = {file.name for file in made.iterdir()}
    assert files == {"config.json", "model.safetensors", "GEMMA_TERMS.html", "NOTICE.txt"}
    assert (made / "GEMMA_TERMS.html").read_text() == "the terms"
    assert "Gemma Terms of Use found at ai.google.dev/gemma/terms" in (made / "NOTICE.txt").read_text()
    assert [path.name for path in made.parent.iterdir()] == [gemma.NAME]
    (output,) = LLM(gemma.NAME, num_blocks=40).generate([TOKENS[:30].tolist()], SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3


def test_a_second_time_it_does_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say()
    before = (gemma.cache_directory() / "model.safetensors").stat()
    (package / "__init__.py").unlink()  # it is not even looked for
    monkeypatch.delitem(sys.modules, fetch.PACKAGE)
    assert "is in" in (text := say(FetchOptions())) and "already" in text and "Terms" not in text
    assert (gemma.cache_directory() / "model.safetensors").stat() == before


def test_it_goes_where_it_is_told(package: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place in (tmp_path / "empty", tmp_path / "a" / "b"):
        text = say(FetchOptions(to=place, accept_terms=True))
        assert f'LLM("{place}")' in text and (place / "model.safetensors").is_file()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("answer", ["y\n", "YES\n", " y "])
def test_whoever_says_yes_gets_it(package: Path, answer: str) -> None:
    assert "Do you accept these terms? [y/N]" in say(FetchOptions(), answer)
    assert gemma.cache_directory().is_dir()


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "no\n", "maybe\n"])
def test_without_a_yes_nothing_is_written(package: Path, tmp_path: Path, answer: str) -> None:
    with pytest.raises(ConfigError, match="the terms were not accepted, so nothing was written"):
        say(FetchOptions(), answer)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("missing", [fetch.PACKAGE, "gguf"])
def test_without_its_packages_it_says_what_to_install(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"is not installed; .* pip install 'refengine\[gemma\]'"):
        say()
    assert not (tmp_path / "cache").exists()


def test_another_file_than_the_pinned_one_is_refused(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that would load: the package's word is not enough."""
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    with pytest.raises(
        CheckpointError, match="brought another file than the one that was checked: its SHA-256 is"
    ):
        say()
    assert is_untouched(tmp_path)


def test_a_damaged_package_is_named(package: Path, tmp_path: Path) -> None:
    (package / "weights").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"the package {fetch.PACKAGE} is damaged: install it anew"):
        say()
    (package / "weights").unlink()
    with pytest.raises(CheckpointError, match="is damaged: install it anew"):
        say()
    assert is_untouched(tmp_path)


@pytest.mark.parametrize("where", ["_verify", "convert"])
def test_an_interrupted_one_leaves_nothing_and_can_be_repeated(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            say()
    assert is_untouched(tmp_path)
    say()
    assert gemma.cache_directory().is_dir()


def test_a_full_disk_is_said(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch, "convert", full)
    with pytest.raises(CheckpointError, match=r"gemma-3-270m could not be written: .*No space left"):
        say()
    assert is_untouched(tmp_path)


def test_what_is_there_is_not_overwritten(package: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for place in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        with pytest.raises(
            ConfigError, match="is there and holds something else; name another place with --to"
        ):
            say(FetchOptions(to=place, accept_terms=True))
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_only_one_model_can_be_fetched() -> None:
    with pytest.raises(ConfigError, match="'gemma-3-1b' cannot be fetched, only 'gemma-3-270m'"):
        say(FetchOptions(name="gemma-3-1b"))


def test_the_pinned_sum_is_a_sum() -> None:
    assert fetch.SHA256.startswith("a5fd3b62") and len(bytes.fromhex(fetch.SHA256)) == 32
