"""Several drafters at equal total work, and one run through the whole pipeline."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from draftline.config.schema import (
    AverageSync,
    CopySync,
    DataConfig,
    GradientSync,
    PipelineConfig,
    RunConfig,
    SyncConfig,
)
from draftline.data.manifest import DatasetManifest
from draftline.data.shards import Sample, TokenDataset
from draftline.drafter.schedule import schedule_factor
from draftline.drafter.sync import Replica, Synchronizer
from draftline.export.zlab import load_export
from draftline.pipeline.coordinator import train
from draftline.pipeline.runplan import make_run_plan
from lab import Lab
from parts import ABLATION_SETS
from states import rows_in_turn
from training import SCHEDULE, OurTrainer, compute_dtype, synchronize, warmed_s
from variants import PLAIN

Figures = dict[str, Any]
EVERY_ROWS = {"average": 50, "often": 10, "copy": 100}
SYNCS: dict[str, SyncConfig] = {
    "average": AverageSync(every_rows=EVERY_ROWS["average"]),
    "often": AverageSync(every_rows=EVERY_ROWS["often"]),
    "copy": CopySync(every_rows=EVERY_ROWS["copy"]),
    "gradient": GradientSync(),
}


def replicas(lab: Lab, kind: str, drafters: int, peak_rate: float, n_rows: int) -> Figures:
    """`drafters` replicas that train `n_rows` rows between them, in turn on one device.

    The learning rate follows the rows, whoever trained them, as the pipeline's does.
    """
    trainers = [lab.trainer(PLAIN, peak_rate) for _ in range(drafters)]
    warm_s = warmed_s(trainers[0], lab.device)
    members = [Replica(i, trainer.optimizer) for i, trainer in enumerate(trainers)]
    synchronizer = Synchronizer(SYNCS[kind])
    synchronizer.begin(members)
    begin, meetings = time.perf_counter(), 0
    every = 1 if kind == "gradient" else EVERY_ROWS[kind]
    done = 0
    while done < n_rows:
        rate = peak_rate * schedule_factor(SCHEDULE, (done + 0.5) / n_rows)
        _one_row_each(lab, trainers, members, done, None if kind == "gradient" else rate)
        done += drafters
        if (done // drafters) % every == 0 or done >= n_rows:
            synchronizer.run(members, rate)
            meetings += 1
    synchronize(lab.device)
    training_s = time.perf_counter() - begin
    found: Figures = {"sync": kind, "drafters": drafters, "rows": done, "meetings": meetings, "warm_s": warm_s}
    found |= {"training_s": training_s, "learning_rate": peak_rate}
    spec, weights = trainers[0].spec, trainers[0].weights()
    found["walked"] = lab.scorer.walk(spec, weights, ABLATION_SETS, (lab.settings.budget,))
    print(f"  {kind} x{drafters}: chain {found['walked']['gsm8k']['chain']['acceptance_length']:.3f}", flush=True)
    return found


def _one_row_each(
    lab: Lab, trainers: Sequence[OurTrainer], members: Sequence[Replica], done: int, rate: float | None
) -> None:
    """A row for every drafter; `rate` None leaves the step to the synchronizer."""
    for offset, (trainer, member) in enumerate(zip(trainers, members, strict=True)):
        row = rows_in_turn(lab.rows["train"], PLAIN.seed, done + offset)
        trainer.absorb_row(row)
        if rate is not None:
            trainer.optimizer.step(rate)
        member.supervised_tokens += sum(row.lengths)


class HeldDataset(TokenDataset):
    """Samples in memory behind the interface of prepared data."""

    def __init__(self, samples: Sequence[Sample], vocab_size: int) -> None:
        self._samples = list(samples)
        lengths = np.array([len(s.input_ids) for s in samples], np.int32)
        supervised = np.array([int(s.loss_mask.sum()) for s in samples], np.int32)
        manifest = DatasetManifest(
            tokenizer_fingerprint="held in memory",
            template_hash="held in memory",
            vocab_size=vocab_size,
            max_tokens=int(lengths.max()),
            n_samples=len(samples),
            n_tokens=int(lengths.sum()),
            n_supervised=int(supervised.sum()),
            shards=(),
        )
        super().__init__(Path("held"), manifest, [])
        self.lengths, self.supervised = lengths, supervised

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, index: int) -> Sample:
        """Sample `index`."""
        return self._samples[index]

    def count_token(self, token_id: int) -> int:
        """How often a token stands in the data."""
        return sum(int(np.count_nonzero(s.input_ids == token_id)) for s in self._samples)


def pipeline_run(lab: Lab, peak_rate: float, n_rows: int) -> Figures:
    """The plain recipe through `draftline train`'s own coordinator: target and drafter share the device."""
    settings, output = lab.settings, lab.files.folder / "pipeline-run"
    shutil.rmtree(output, ignore_errors=True)
    samples = lab.samples["train"]
    rows_an_epoch = max(1, len(lab.rows["train"]))
    config = RunConfig(
        output=output,
        epochs=-(-n_rows // rows_an_epoch) + 1,
        max_rows=n_rows,
        target=lab.target_config,
        data=DataConfig(path=output / "held", row_tokens=settings.row_tokens),
        drafter=PLAIN.drafter(settings),
        objective=PLAIN.objective(settings),
        optimizer=PLAIN.optimizer_config(peak_rate).model_copy(update={"schedule": SCHEDULE}),
        pipeline=PipelineConfig(
            target_devices=(str(lab.device),),
            drafter_devices=(str(lab.device),),
            compile=lab.device.type == "cuda",
        ),
    )
    begin = time.perf_counter()
    plan = make_run_plan(config, dataset=HeldDataset(samples, lab.target.vocab_size))
    result = train(plan)
    whole_s = time.perf_counter() - begin
    drafter = load_export(result.export, lab.device, compute_dtype(lab.device))
    weights = {name: value.float() for name, value in drafter.state_dict().items()}
    found: Figures = {"rows": n_rows, "training_s": result.training_s, "whole_s": whole_s, "tokens": result.tokens}
    found |= {"ledger": str(result.ledger), "learning_rate": peak_rate}
    found["walked"] = lab.scorer.walk(drafter.spec, weights, ABLATION_SETS, (settings.budget,))
    print(f"  pipeline: {n_rows} rows in {result.training_s:.1f} s", flush=True)
    return found
