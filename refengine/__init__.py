"""A small LLM inference engine, made to be read: vLLM's two generations on the same request, decision by decision."""

from refengine.config import EngineConfig
from refengine.errors import CheckpointError, ConfigError, IntegrityError, PartError, RefengineError, RequestError
from refengine.llm import LLM
from refengine.outputs import RequestOutput
from refengine.sampling import SamplingParams

__all__ = [
    "LLM",
    "CheckpointError",
    "ConfigError",
    "EngineConfig",
    "IntegrityError",
    "PartError",
    "RefengineError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
