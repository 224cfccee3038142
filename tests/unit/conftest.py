"""A checkpoint of a random tiny model, written once for all tests that need a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from refengine import LLM
from tests.unit.models import save_model

STEP_LIMIT = 1000


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def llm(model_dir: Path) -> LLM:
    """A fresh engine with 4-token blocks that checks its integrity after every step.

    It refuses to step for ever: a request that is lost must fail its test and not hang it.
    """
    llm = LLM(str(model_dir), block_size=4, num_blocks=65, check_integrity=True, hash_seed="0")
    step, left = llm.engine.step, iter(range(STEP_LIMIT))

    def limited() -> Any:
        assert next(left, None) is not None, f"the engine did not come to an end within {STEP_LIMIT} steps"
        return step()

    llm.engine.step = limited  # type: ignore[method-assign]
    return llm
