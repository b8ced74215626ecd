"""The sections that say where hidden states come from: the target, how it runs, and states on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: frozen; an unknown key is an error, and so is a number that is not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class LocalBackend(Section):
    """The target runs in this process."""

    kind: Literal["local"] = "local"


class VllmBackend(Section):
    """States come from a running vLLM that extracts them (`hs-connectors`); docs/states.md tells how to start it."""

    kind: Literal["vllm"] = "vllm"
    endpoint: str = Field(default="http://localhost:8000/v1", description="Of its OpenAI-compatible API.")
    aux_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="Layers that it extracts, in its counting (one higher than drafter.taps), in order."
    )
    concurrent_requests: int = Field(default=8, ge=1, description="Samples asked for at once, per target worker.")
    timeout_s: float = Field(default=120.0, gt=0, description="For one answer.")
    max_retries: int = Field(default=3, ge=0, description="Of a request that fails.")


class FilesBackend(Section):
    """States come from `hs_N.safetensors`, as speculators' offline data generation writes them."""

    kind: Literal["files"] = "files"
    path: Path = Field(description="Folder of the files.")
    aux_layer_ids: tuple[int, ...] = Field(
        min_length=1, description="Layers in them, in speculators' counting (one higher than drafter.taps), in order."
    )


TargetBackend = Annotated[LocalBackend | VllmBackend | FilesBackend, Field(discriminator="kind")]


class TargetConfig(Section):
    """The frozen model that will be accelerated."""

    model: str = Field(description="Folder, hub id, or path of a .gguf file.")
    revision: str | None = Field(default=None, description="Hub revision.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: bfloat16 on a GPU, float32 on the CPU."
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto", description="Attention backend of the target's forward."
    )
    quantization: Literal["int8", "int8_dynamic"] | None = Field(
        default=None,
        description="Linear weights quantised when loaded, by torchao (extra `quantized`); null: as the files are. "
        "int8_dynamic also rounds what goes into them.",
    )
    fused_norms: bool = Field(
        default=False,
        description="Capture with RMS norms in one kernel each: less time, and states that differ by roundings.",
    )
    trust_remote_code: bool = Field(default=False, description="Run code from the model repository. Never implied.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the chat template in training and serving, e.g. enable_thinking."
    )
    backend: TargetBackend = LocalBackend()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantization is not None and self.backend.kind != "local":
            raise ValueError(
                f"target.quantization is for a target that runs here, target.backend is {self.backend.kind}; "
                "set target.quantization: null"
            )
        if self.fused_norms and self.backend.kind != "local":
            raise ValueError(
                f"target.fused_norms is for a target that runs here, target.backend is {self.backend.kind}; "
                "set target.fused_norms: false"
            )
        return self


class StatesConfig(Section):
    """Hidden states on disk, captured once and trained many times."""

    mode: Literal["online", "cache", "offline"] = Field(
        default="online",
        description="online: the target runs; cache: it runs for what is not in path yet, and that is added; "
        "offline: only what `draftline capture` wrote is read, and no target is loaded.",
    )
    path: Path | None = Field(default=None, description="Folder of the states.")
    dtype: Literal["target", "bfloat16", "fp8"] = Field(
        default="target", description="Numbers on disk: the target's own, or fp8 with a scale for each token and tap."
    )
    shard_bytes: int = Field(default=1 << 29, ge=1, description="A file is written once it holds so much.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mode != "online" and self.path is None:
            raise ValueError(f"states.mode {self.mode} needs states.path, the folder of the states")
        return self
