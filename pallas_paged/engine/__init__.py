"""Continuous batching for any JAX model, over a paged KV cache."""

from pallas_paged.attention.partition import sources_key
from pallas_paged.engine.async_engine import AsyncEngine
from pallas_paged.engine.config import EngineConfig
from pallas_paged.engine.device.executor import EngineDeadError
from pallas_paged.engine.draft_head import DraftHead
from pallas_paged.engine.engine import Engine
from pallas_paged.engine.model import Attend, KVCacheSpec, Model
from pallas_paged.engine.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    LogprobSequence,
    RequestOutput,
)
from pallas_paged.engine.requests.detokenizer import Tokenizer
from pallas_paged.engine.requests.request import Request
from pallas_paged.engine.requests.structured_outputs import StructuredOutputsParams
from pallas_paged.engine.rollouts import Rollouts
from pallas_paged.engine.sampling_params import PoolingParams, SamplingParams
from pallas_paged.engine.stats import EngineStats, PoolMap

__all__ = [
    "AsyncEngine",
    "Attend",
    "CompletionOutput",
    "DraftHead",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "KVCacheSpec",
    "Logprob",
    "LogprobSequence",
    "Model",
    "PoolMap",
    "PoolingParams",
    "Request",
    "RequestOutput",
    "Rollouts",
    "SamplingParams",
    "StructuredOutputsParams",
    "Tokenizer",
    "sources_key",
]
