"""A small LLM inference engine, made to be read: vLLM's two generations on the same request, decision by decision.

The names below are imported when they are first used, so that a command which needs no engine starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refengine.config import EngineConfig as EngineConfig
    from refengine.errors import CheckpointError as CheckpointError
    from refengine.errors import ConfigError as ConfigError
    from refengine.errors import IntegrityError as IntegrityError
    from refengine.errors import PartError as PartError
    from refengine.errors import RefengineError as RefengineError
    from refengine.errors import RequestError as RequestError
    from refengine.llm import LLM as LLM
    from refengine.outputs import RequestOutput as RequestOutput
    from refengine.sampling import SamplingParams as SamplingParams

_HOME = {
    "LLM": "llm",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "EngineConfig": "config",
    "IntegrityError": "errors",
    "PartError": "errors",
    "RefengineError": "errors",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "sampling",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"refengine has no {name!r}")
    return getattr(import_module(f"refengine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
