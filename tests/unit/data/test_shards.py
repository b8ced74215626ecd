"""Promises of the token shards: what goes in comes out, and nothing damaged, foreign or half-written is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from draftline.data import shards
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter, TokenDataset
from draftline.data.storage import StagingFolder
from draftline.data.template import tokenizer_fingerprint
from draftline.errors import UserError
from tiny_tokenizer import build_tokenizer

FACTS = DatasetFacts(tokenizer_fingerprint="aaaa", template_hash="tt", vocab_size=512, max_tokens=64, in_rows=1)


def random_samples(n: int, seed: int = 0) -> list[tuple[str, np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, n)
    return [(f"s{i}", rng.integers(0, 512, size), rng.random(size) < 0.5) for i, size in enumerate(sizes)]


def write(output: Path, samples: list[tuple[str, np.ndarray, np.ndarray]], shard_tokens: int = 1 << 20) -> None:
    with ShardWriter(output, shard_tokens=shard_tokens) as writer:
        for i, (name, ids, mask) in enumerate(samples):
            writer.add(name, ids, mask, answer_cut=i % 3 == 0)
        writer.finish(FACTS)


def test_samples_come_back_exactly_over_many_batches_and_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "BATCH_SAMPLES", 7)
    samples = random_samples(100)
    write(tmp_path / "data", samples, shard_tokens=500)
    data = TokenDataset.open(tmp_path / "data")
    assert len(data.manifest.shards) > 2
    assert len(data) == data.manifest.n_samples == 100
    assert data.lengths.dtype == data.supervised.dtype == np.int32
    assert data.lengths.tolist() == [len(ids) for _, ids, _ in samples]
    assert data.supervised.tolist() == [int(mask.sum()) for _, _, mask in samples]
    for i, (name, ids, mask) in enumerate(samples):
        sample = data.sample(i)
        assert (sample.sample_id, sample.answer_cut) == (name, i % 3 == 0)
        assert sample.input_ids.dtype == np.int32 and sample.loss_mask.dtype == np.bool_
        assert sample.input_ids.tolist() == ids.tolist() and sample.loss_mask.tolist() == mask.tolist()
    with pytest.raises(IndexError):
        data.sample(100)


def test_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    write(tmp_path / "a", random_samples(10))
    write(tmp_path / "b", random_samples(10))
    write(tmp_path / "c", random_samples(10, seed=1))
    (tmp_path / "b").rename(tmp_path / "moved")
    prints = {name: TokenDataset.open(tmp_path / name).manifest.fingerprint for name in ("a", "moved", "c")}
    assert prints["a"] == prints["moved"] != prints["c"]


def cut_off(folder: Path) -> None:
    file = folder / "shard-00000.arrow"
    file.write_bytes(file.read_bytes()[:-40])


def flip_a_bit(folder: Path) -> None:
    file = folder / "shard-00000.arrow"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def drop_shard(folder: Path) -> None:
    (folder / "shard-00000.arrow").unlink()


def drop_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def edit(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "manifest.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def tear_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"format": "draftl')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_off, r"shard-00000.arrow: shard has \d+ bytes, the manifest says \d+"),
        (flip_a_bit, "shard-00000.arrow: shard was changed"),
        (drop_shard, "shard-00000.arrow: shard is missing"),
        (drop_manifest, "no manifest.json in it; give a folder written by `draftline prepare`"),
        (tear_manifest, "not readable as JSON"),
        (edit(format="parquet"), "not the manifest of a draftline data set"),
        (edit(schema_version=2), "schema version 2 is newer than 1, the newest this draftline reads; update"),
        (edit(schema_version="x"), "unknown schema version 'x'"),
        (edit(n_tokens=1), "the shards do not hold what the manifest says"),
        (edit(n_tokens="many"), "n_tokens: "),
        (edit(in_rows=-1), "in_rows: Input should be greater than or equal to 0"),
        (edit(rejected={"duplicate": -1}), "rejected.duplicate: Input should be greater than or equal to 0"),
        (edit(shards=[{"name": "a\nb", "n_samples": 1, "n_bytes": 1, "sha256": ""}]), "shards.0.name: String should"),
        (edit(n_samples=0), "the data set has no samples"),
    ],
)
def test_damaged_data_is_refused_in_one_line(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    write(tmp_path / "data", random_samples(10))
    damage(tmp_path / "data")
    with pytest.raises(UserError, match=says) as caught:
        TokenDataset.open(tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        TokenDataset.open(tmp_path / "nothing")


def with_manifest(folder: Path, **changes: Any) -> TokenDataset:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return TokenDataset.open(folder)


def test_another_tokenizer_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    write(tmp_path / "data", random_samples(3))
    ours, others = tokenizer_fingerprint(build_tokenizer()), tokenizer_fingerprint(build_tokenizer(lower=True))
    assert ours != others  # the tokens are the same: it is the ids of some texts that tell
    data = with_manifest(tmp_path / "data", tokenizer_fingerprint=others)
    with pytest.raises(UserError, match=f"tokenizer {others[4:16]}, the target has {ours[4:16]}"):
        data.require_tokenizer(build_tokenizer())
    data.require_tokenizer(build_tokenizer(lower=True))


def test_tokens_that_were_appended_since_and_another_way_of_storing_change_no_id_and_are_not_refused(
    tmp_path: Path,
) -> None:
    tokenizer = build_tokenizer()
    made_with, size = tokenizer_fingerprint(tokenizer), len(tokenizer)
    with ShardWriter(tmp_path / "data") as writer:
        writer.add("a", [5, 6, 7], [False, True, True])
        writer.finish(FACTS.model_copy(update={"tokenizer_fingerprint": made_with, "vocab_size": size}))
    data = TokenDataset.open(tmp_path / "data")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    tokenizer.chat_template = "another"
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert tokenizer_fingerprint(tokenizer) != made_with
    data.require_tokenizer(tokenizer)


def test_a_tokenizer_without_a_fast_backend_has_a_fingerprint(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(ByT5Tokenizer()) == tokenizer_fingerprint(ByT5Tokenizer())
    assert tokenizer_fingerprint(ByT5Tokenizer()) != tokenizer_fingerprint(ByT5Tokenizer(extra_ids=3))


def test_ids_that_no_tokenizer_made_are_not_judged(tmp_path: Path) -> None:
    write(tmp_path / "data", random_samples(3))
    tokenizer = Mock(wraps=build_tokenizer())
    TokenDataset.open(tmp_path / "data").require_tokenizer(tokenizer)
    assert not tokenizer.mock_calls
    with pytest.raises(UserError, match="the data was prepared with tokenizer aaaa, the target has"):
        with_manifest(tmp_path / "data", tokenizer_fingerprint="ids:aaaa").require_tokenizer(build_tokenizer())


def test_zero_samples_are_refused_with_the_reasons_and_nothing_is_left(tmp_path: Path) -> None:
    facts = FACTS.model_copy(update={"in_rows": 3, "rejected": {"duplicate": 3}})
    with (
        pytest.raises(UserError, match="no samples; 3 rows were read; rejected: duplicate 3"),
        ShardWriter(tmp_path / "data") as writer,
    ):
        writer.finish(facts)
    assert list(tmp_path.iterdir()) == []


def test_output_of_another_run_is_refused_and_kept(tmp_path: Path) -> None:
    write(tmp_path / "data", random_samples(3))
    with pytest.raises(UserError, match="already holds another run"), ShardWriter(tmp_path / "data"):
        pass
    assert len(TokenDataset.open(tmp_path / "data")) == 3


def test_an_empty_output_folder_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", random_samples(3))
    assert len(TokenDataset.open(tmp_path / "data")) == 3


def test_two_writers_of_one_folder_the_second_is_refused(tmp_path: Path) -> None:
    with StagingFolder(tmp_path / "data"), pytest.raises(UserError, match="another process is writing"):
        StagingFolder(tmp_path / "data").__enter__()


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".data.partial").mkdir()
    (tmp_path / ".data.partial" / "shard-00007.arrow").write_bytes(b"half")
    write(tmp_path / "data", random_samples(3))
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["manifest.json", "shard-00000.arrow"]


def test_an_interrupted_writer_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ShardWriter(tmp_path / "data") as writer:
        writer.add("a", [1], [True])
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from draftline.data.manifest import DatasetFacts
from draftline.data.shards import ShardWriter
from draftline.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with ShardWriter(Path(sys.argv[1])) as writer:
        for i in range(3000):
            writer.add(str(i), list(range(50)), [True] * 50)
        writer.finish(DatasetFacts(tokenizer_fingerprint="a", template_hash="t", vocab_size=512, max_tokens=64))
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "data")], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2, run.stderr
    assert run.stdout == f"{tmp_path / 'data'}: no space left to write; free space or choose another disk\n"
    assert list(tmp_path.iterdir()) == []


def test_an_output_below_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write"):
        StagingFolder(tmp_path / "file" / "data").__enter__()


def test_reading_needs_no_torch() -> None:
    code = "import sys, draftline.data.shards, draftline.data.rows; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=60).returncode == 0
