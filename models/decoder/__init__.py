"""A decoder in Flax NNX, its checkpoints, and the decoder as a model of the engine."""

from models.decoder.adapter import EngineModel, engine_config, engine_model
from models.decoder.attend import Attend, dense_attend
from models.decoder.checkpoint import load_checkpoint, save_checkpoint
from models.decoder.config import ModelConfig
from models.decoder.decoder import Decoder
from models.decoder.draft_head import DraftHead, engine_draft, load_draft_head
from models.decoder.sharding import repeat_kv_heads
from models.files import CheckpointError

__all__ = [
    "Attend",
    "CheckpointError",
    "Decoder",
    "DraftHead",
    "EngineModel",
    "ModelConfig",
    "dense_attend",
    "engine_config",
    "engine_draft",
    "engine_model",
    "load_checkpoint",
    "load_draft_head",
    "repeat_kv_heads",
    "save_checkpoint",
]
