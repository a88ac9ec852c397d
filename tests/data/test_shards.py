from __future__ import annotations

import numpy as np
import pytest

from athanor.base.errors import InputError
from athanor.data.shards import ShardWriter, TokenStream, open_train, open_val, token_dtype
from athanor.sharding import shard_gate
from tests.data.conftest import BOS, EOS, documents


def test_dtype_is_the_smallest_that_holds_every_id():
    assert token_dtype(65536) == np.dtype("<u2") and token_dtype(65537) == np.dtype("<u4")


def test_stream_gives_back_every_document_across_shards(shard_folder, shard_documents):
    stream = open_train(shard_folder)
    assert len(list((shard_folder / "train").glob("*.bin"))) > 3
    assert stream.documents == len(shard_documents)
    for number, ids in enumerate(shard_documents):
        assert stream.document(number).tolist() == ids.tolist()
    whole = np.concatenate(shard_documents)
    assert stream.tokens == len(whole)
    assert stream.read(0, stream.tokens).tolist() == whole.tolist()
    assert stream.read(400, 300).tolist() == whole[400:700].tolist()


def test_a_stream_of_many_files_needs_few_open(tmp_path, few_files):
    ids, dtype = documents(300), token_dtype(320)
    writer = ShardWriter(tmp_path / "train", dtype, 1, sources=True)
    for number, document in enumerate(ids):
        writer.add(document, number % 3)
    writer.close()
    stream = TokenStream(tmp_path / "train", dtype)
    assert writer.shards == 300 > 2 * few_files
    assert [stream.document(number).tolist() for number in range(300)] == [document.tolist() for document in ids]
    assert stream.read(0, stream.tokens).tolist() == np.concatenate(ids).tolist()
    assert stream.sources.tolist() == [0, 1, 2] * 100
    assert shard_gate.check_files(tmp_path / "train", dtype, 320, BOS, EOS, 3)["documents"].tolist() == [100] * 3


def test_document_of_a_position(shard_folder, shard_documents):
    expected = np.repeat(np.arange(len(shard_documents)), [len(ids) for ids in shard_documents])
    stream = open_train(shard_folder)
    assert stream.document_of(np.arange(stream.tokens)).tolist() == expected.tolist()


def test_reading_past_the_end_is_refused(shard_folder):
    stream = open_train(shard_folder)
    with pytest.raises(IndexError):
        stream.read(stream.tokens - 1, 2)
    with pytest.raises(IndexError):
        stream.read(-1, 1)


def test_source_numbers_stand_beside_the_documents(shard_folder, shard_documents):
    numbers = [np.load(path) for path in sorted((shard_folder / "train").glob("*.src.npy"))]
    assert np.concatenate(numbers).tolist() == [number % 2 for number in range(len(shard_documents))]


def test_validation_streams_are_those_with_documents(shard_folder):
    assert {name: stream.documents for name, stream in open_val(shard_folder).items()} == {"a": 5}


def test_a_torn_shard_and_missing_shards_are_input_errors(shard_folder):
    path = shard_folder / "train" / "00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match="00001.bin: length differs"):
        open_train(shard_folder)
    for part in (shard_folder / "train").iterdir():
        part.unlink()
    with pytest.raises(InputError, match="no token shards"):
        open_train(shard_folder)
