"""`draftline prepare`: conversations in, token shards with loss masks out.

    sources ─> chunks of raw rows ─> [ rows checked ─> ids + mask, proven ] x workers ─> identical ones dropped
      ─> train or validation shards (─> mixed by weight) ─> manifest

A few chunks are held at a time, and about 200 bytes for each row seen. What is written does not depend on the number
of workers: they give outcomes in the order of the rows, and everything that remembers happens here.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import Literal, cast

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from draftline.config.schema import TargetConfig
from draftline.data import mixing
from draftline.data.conversations import IdRegistry, Tally, empty_source, raw_rows
from draftline.data.decontaminate import DEFAULT_WORDS, read_decontaminator
from draftline.data.manifest import DatasetFacts, Decontamination, SourceRecord
from draftline.data.options import PrepareOptions
from draftline.data.parallel import row_workers
from draftline.data.parts import VALIDATION_FOLDER, Parts, SampleFacts, open_parts
from draftline.data.report import PrepareReport
from draftline.data.shards import ShardWriter
from draftline.data.template import ChatTemplate
from draftline.data.work import Chunk, ChunkResult, WorkSpec
from draftline.errors import UserError

CHUNK_BYTES = 1 << 20
CHUNK_ROWS = 1024
_STAGE = "unmixed"


def prepare(
    sources: Sequence[str],
    output: Path,
    *,
    target: TargetConfig,
    max_tokens: int,
    turns: str = "all",
    skip_bad_rows: bool = False,
    validation_fraction: float = 0.0,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    min_supervised_tokens: int = 0,
    weights: Sequence[float] | None = None,
    decontaminate: Sequence[str] = (),
    decontaminate_words: int = DEFAULT_WORDS,
    workers: int = 1,
    progress: bool = False,
) -> PrepareReport:
    """Write the conversations of `sources` as a data set for `target` into the folder `output`.

    Args:
        sources: see `conversations`.
        output: must not hold anything yet; appears only when everything is written.
        max_tokens: longer samples are cut at the end and marked; those left without labels are dropped and counted.
        turns: `all` or `last`: which assistant turns are supervised.
        skip_bad_rows: count bad rows instead of refusing them.
        validation_fraction: share of conversations for `output/validation`; 0 makes none.
        seed: of the split and of the mix.
        max_prompt_tokens: samples whose first answer begins behind so many tokens are dropped and counted.
        min_supervised_tokens: samples with fewer labels are dropped and counted.
        weights: one a source: their shares in the data set; see `mixing`. None keeps everything.
        decontaminate: files of evaluation prompts to keep clear of; see `decontaminate`.
        decontaminate_words: words of a shared run that counts.
        workers: processes that work on rows; the data set is the same for any number.
        progress: show progress on standard error if that is a terminal.

    Raises:
        UserError: bad input, or an output that cannot be written.
        RunFailedError: a worker process was killed.
    """
    options = PrepareOptions(
        max_tokens=max_tokens,
        turns=turns,
        skip_bad_rows=skip_bad_rows,
        validation_fraction=validation_fraction,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        min_supervised_tokens=min_supervised_tokens,
        weights=None if weights is None else tuple(weights),
        decontaminate=tuple(decontaminate),
        decontaminate_words=decontaminate_words,
        workers=workers,
    )
    return _prepare(list(sources), output, load_template(target), options, progress)


def _prepare(
    sources: list[str], output: Path, template: ChatTemplate, options: PrepareOptions, progress: bool
) -> PrepareReport:
    if not sources:
        raise UserError("no source was given", mend="name at least one file or data set")
    options.check(len(sources))
    spec = _spec(template, options)
    tally = Tally(options.skip_bad_rows)
    with ExitStack() as stack:
        final = stack.enter_context(ShardWriter(output))
        staged = final.staging_path / _STAGE
        first = final if options.weights is None else stack.enter_context(ShardWriter(staged))
        parts = open_parts(stack, first, options.validation_fraction)
        work = stack.enter_context(row_workers(spec, options.workers))
        recorder = _Recorder(sources, parts, tally)
        with _shown(work(_chunks(sources)), "preparing", progress) as results:
            for result in results:
                recorder.take(result)
        _require_samples(parts, tally, output)
        facts = _facts(spec, zip(sources, recorder.in_rows, strict=True), options, tally)
        manifest, validation = parts.finish(facts)
        if options.weights is not None:
            mixed = open_parts(stack, final, options.validation_fraction)
            _mix(staged, parts, mixed, sources, options, tally)
            shutil.rmtree(staged)
            manifest, validation = mixed.finish(facts.model_copy(update={"rejected": dict(tally.rejected)}))
    return PrepareReport(output, manifest, validation, tally.in_rows, dict(tally.rejected), tally.first_bad)


def load_template(config: TargetConfig) -> ChatTemplate:
    """The target's tokenizer and chat template, with every stop token that is known without its weights.

    Raises:
        UserError: no tokenizer, or none with a chat template.
    """
    from draftline.target.facts import generation_eos_ids, model_source
    from draftline.target.load import load_tokenizer, tokenizer_stop_ids

    tokenizer = load_tokenizer(config)
    stops = set(tokenizer_stop_ids(tokenizer))
    if model_source(config).gguf_file is None:
        stops.update(generation_eos_ids(config, None))
    return ChatTemplate(tokenizer, template_kwargs=config.chat_template_kwargs, stop_token_ids=sorted(stops))


class _Recorder:
    """Everything that remembers: ids given out, conversations seen, counts, and where each sample goes.

    Attributes:
        in_rows: rows read, by index of the source.
    """

    def __init__(self, sources: Sequence[str], parts: Parts, tally: Tally) -> None:
        self._sources, self._parts, self._tally = sources, parts, tally
        self._ids = IdRegistry()
        self._seen: set[bytes] = set()
        self.in_rows = [0] * len(sources)

    def take(self, result: ChunkResult) -> None:
        """Count the outcomes of a chunk and write its samples."""
        tally, source, place = self._tally, self._sources[result.source], 0
        tally.in_rows += len(result.outcomes)
        self.in_rows[result.source] += len(result.outcomes)
        for outcome in result.outcomes:
            ids = result.ids[place : place + outcome.n_tokens]
            mask = result.mask[place : place + outcome.n_tokens]
            place += outcome.n_tokens
            name = self._ids.unique(outcome.name) if outcome.name else ""
            if outcome.is_bad:
                tally.reject(outcome.reason or "", outcome.detail or "", f"{source}:{outcome.line}")
            elif outcome.content in self._seen:
                tally.drop("duplicate")
            else:
                self._seen.add(outcome.content)
                if outcome.reason is not None:
                    tally.drop(outcome.reason, f"{source}:{outcome.line}: {outcome.detail}")
                    continue
                facts = SampleFacts(
                    source=result.source,
                    n_prompt_tokens=outcome.n_prompt_tokens,
                    n_turns=outcome.n_turns,
                    turns_left_out=outcome.turns_left_out,
                    is_cut=outcome.is_cut,
                    category=outcome.category,
                )
                self._parts.part_of(outcome.opening).add(name, ids, mask, facts)


def _chunks(sources: Sequence[str]) -> Iterator[Chunk]:
    """Raw rows of all sources in order, about a megabyte together."""
    for index, source in enumerate(sources):
        rows: list[tuple[int, object]] = []
        n_bytes, is_empty = 0, True
        for line, raw in raw_rows(source):
            is_empty = False
            rows.append((line, raw))
            n_bytes += len(raw) if isinstance(raw, bytes) else CHUNK_BYTES // 256
            if n_bytes >= CHUNK_BYTES or len(rows) >= CHUNK_ROWS:
                yield Chunk(index, rows)
                rows, n_bytes = [], 0
        if is_empty:
            raise empty_source(source)
        if rows:
            yield Chunk(index, rows)


def _spec(template: ChatTemplate, options: PrepareOptions) -> WorkSpec:
    files = options.decontaminate
    return WorkSpec(
        template=template,
        max_tokens=options.max_tokens,
        turns=cast(Literal["all", "last"], options.turns),
        max_prompt_tokens=options.max_prompt_tokens,
        min_supervised_tokens=options.min_supervised_tokens,
        split_seed=options.seed,
        decontaminator=read_decontaminator(files, options.decontaminate_words) if files else None,
    )


def _facts(spec: WorkSpec, sources: Iterable[tuple[str, int]], options: PrepareOptions, tally: Tally) -> DatasetFacts:
    weights: Iterable[float | None] = options.weights or repeat(None)
    files = tuple(_record(name, 0, None) for name in options.decontaminate)
    return DatasetFacts(
        tokenizer_fingerprint=spec.template.fingerprint,
        template_hash=spec.template.template_hash,
        vocab_size=len(spec.template.tokenizer),
        max_tokens=spec.max_tokens,
        turns=spec.turns,
        sources=tuple(_record(*source, weight) for source, weight in zip(sources, weights, strict=False)),
        in_rows=tally.in_rows,
        rejected=dict(tally.rejected),
        validation_fraction=options.validation_fraction,
        seed=options.seed,
        max_prompt_tokens=options.max_prompt_tokens,
        min_supervised_tokens=options.min_supervised_tokens,
        decontamination=Decontamination(files=files, n_words=options.decontaminate_words) if files else None,
    )


def _record(name: str, in_rows: int, weight: float | None) -> SourceRecord:
    return SourceRecord(name=name, in_rows=in_rows, sha256=file_sha256(name), weight=weight)


def _mix(
    staged: Path, before: Parts, after: Parts, sources: Sequence[str], options: PrepareOptions, tally: Tally
) -> None:
    """Copy the chosen samples of each staged part, and count the others."""
    places = (staged, staged / VALIDATION_FOLDER)
    for place, old, new in zip(places, before.named, after.named, strict=False):
        left_out = mixing.copy_mixed(place, old, new, names=sources, weights=options.weights or (), seed=options.seed)
        if left_out:
            tally.rejected[mixing.REASON] += left_out


def _require_samples(parts: Parts, tally: Tally, output: Path) -> None:
    """Refuse (UserError) a data set without samples, with the reasons and the first of them in full."""
    if any(part.writer.n_samples for part in parts.named):
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.rejected.items())) or "none"
    first = f"; the first: {tally.first_dropped}" if tally.first_dropped else ""
    raise UserError(
        "the data set would have no samples",
        where=str(output),
        mend=f"{tally.in_rows} rows were read; rejected: {reasons}{first}",
    )


def file_sha256(name: str) -> str | None:
    """Hash of a source that is one file; None for others."""
    path = Path(name)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _shown(results: Iterator[ChunkResult], label: str, enabled: bool) -> Iterator[Iterable[ChunkResult]]:
    """The results, with their rows counted in a progress line on standard error if that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (enabled and console.is_terminal)) as bar:
        task = bar.add_task(label, total=None)

        def counted() -> Iterator[ChunkResult]:
            for result in results:
                yield result
                bar.advance(task, len(result.outcomes))

        yield counted()
