"""A checkpoint of a random tiny model, written once for all tests that need a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from refengine import LLM
from tests.unit.models import limit_steps, save_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def llm(model_dir: Path) -> LLM:
    """A fresh engine with 4-token blocks that checks its integrity after every step."""
    return limit_steps(LLM(str(model_dir), block_size=4, num_blocks=65, check_integrity=True, hash_seed="0"))
