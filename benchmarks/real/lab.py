"""What all parts share: the target, captured states, kept sets, the scorer. Made on first use, once."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.schema import TargetConfig
from draftline.data.shards import Sample
from draftline.drafter.spec import build_spec
from draftline.records import HiddenStateRow
from draftline.target.capture import TargetCapture
from draftline.target.load import LoadedTarget, load_target
from draftline.target.selftest import self_test
from draftline.target.unpack import unpack_target
from prompts import PromptFiles, answer_all, answer_more, describe, load_more, load_samples
from scoring import Kept, Scorer
from settings import KEPT_SETS, Settings
from states import PaddedSamples, capture_rows
from training import OurTrainer, synchronize
from variants import PLAIN, Variant


@dataclass
class Lab:
    """One call of the experiment.

    Attributes:
        target_path: folder or .gguf file of the target.
        times: seconds of what had to be made again in this call.
    """

    settings: Settings
    target_path: Path
    files: PromptFiles
    device: torch.device
    times: dict[str, float] = field(default_factory=dict)

    @functools.cached_property
    def target_config(self) -> TargetConfig:
        """bf16 on a GPU, fp32 on a CPU; a .gguf file is unpacked first, for it takes most of a minute to read."""
        dtype = "float32" if self.device.type == "cpu" else "bfloat16"
        config = TargetConfig(model=str(self.target_path), dtype=dtype)
        folder = self.files.folder / "target"
        if self.target_path.suffix == ".gguf":
            if not (folder / "model.safetensors").is_file():
                self._timed("unpack", lambda: unpack_target(config, folder))
            config = config.model_copy(update={"model": str(folder)})
        return config

    @functools.cached_property
    def target(self) -> LoadedTarget:
        config = self.target_config
        return self._timed("load", lambda: load_target(config, str(self.device)))

    def answer(self) -> dict[str, Any]:
        """The part `answers`."""
        return answer_all(self.files, self.settings, self.target_config, str(self.device))

    @functools.cached_property
    def samples(self) -> dict[str, list[Sample]]:
        if not self.files.answers.is_file():
            self._timed("answers", self.answer)
        return self._timed("samples", lambda: load_samples(self.files, self.settings, self.target_config))

    @functools.cached_property
    def plain_spec(self) -> DrafterSpec:
        """Of the plain recipe; all recipes have its taps."""
        return build_spec(PLAIN.drafter(self.settings), self.target.facts, stop_token_ids=self.target.stop_token_ids)

    @functools.cached_property
    def rows(self) -> dict[str, list[HiddenStateRow]]:
        """States of every role's samples."""
        capture = self._timed("self-test", self._make_capture)
        samples = self.samples
        return self._timed("capture", lambda: {role: self._capture(capture, samples[role]) for role in samples})

    @functools.cached_property
    def more_rows(self) -> list[HiddenStateRow]:
        """States of the answers that are drawn for the long run."""
        where = (self.files, self.settings, self.target_config)
        if not self.files.more_answers.is_file():
            self._timed("more answers", lambda: answer_more(*where, str(self.device)))
        samples = self._timed("more samples", lambda: load_more(*where))
        capture = self._make_capture()
        return self._timed("more capture", lambda: self._capture(capture, samples))

    @functools.cached_property
    def padded(self) -> PaddedSamples:
        """The training states as the peer's loop takes them."""
        return PaddedSamples.of(self.rows["train"], self.settings.peer_tokens)

    @functools.cached_property
    def scorer(self) -> Scorer:
        kept = {name: Kept(self.samples[name], self.rows[name]) for name in (*KEPT_SETS, "dev")}
        capture = functools.partial(self._capture, self._make_capture())
        return Scorer(self.target, kept, capture, self.settings, self.files.folder)

    def trainer(self, variant: Variant, peak_rate: float) -> OurTrainer:
        """A recipe on the training rows."""
        return OurTrainer(self.target, self.rows["train"], variant, self.settings, peak_rate)

    def describe(self) -> dict[str, Any]:
        """The data, and what it took to get here."""
        rows = self.rows["train"]
        row_bytes = sum(row.n_bytes() for row in rows)
        facts: dict[str, Any] = {
            "train_rows": len(rows),
            "train_state_bytes": row_bytes,
            "row_tokens": self.settings.row_tokens,
            "spec": self.plain_spec.model_dump(),
        }
        return facts | {"samples": describe(self.samples), "seconds": dict(self.times)}

    def free(self) -> None:
        """Memory of trainers that are gone."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _make_capture(self) -> TargetCapture:
        taps = self.plain_spec.taps
        return TargetCapture(self.target, taps, want_final=True, layout=self_test(self.target, taps).layout)

    def _capture(self, capture: TargetCapture, samples: list[Sample]) -> list[HiddenStateRow]:
        settings = self.settings
        return capture_rows(
            capture,
            samples,
            row_tokens=settings.row_tokens,
            at_once=settings.rows_captured_at_once,
            pad=self.device.type == "cuda",
        )

    def _timed(self, name: str, make: Any) -> Any:
        begin = time.perf_counter()
        made = make()
        synchronize(self.device)
        self.times[name] = time.perf_counter() - begin
        print(f"  {name}: {self.times[name]:.1f} s", flush=True)
        return made
