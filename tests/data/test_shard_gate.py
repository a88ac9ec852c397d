"""Each property of the shards' gate, with its defect planted in files on disk."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from athanor.base.errors import GateError
from athanor.sharding.shard_gate import (
    check_complete,
    check_counts,
    check_disjoint,
    check_epochs,
    check_files,
    check_shares,
)

BOS, EOS = 2, 3


def checked(folder):
    return check_files(folder / "train", np.dtype("<u2"), 320, BOS, EOS, 2)


def change(folder, at: int, value: int) -> None:
    tokens = np.memmap(folder / "train" / "00001.bin", dtype="<u2", mode="r+")
    tokens[at] = value
    tokens.flush()


def test_sound_shards_are_counted(shard_folder, shard_documents):
    facts = checked(shard_folder)
    lengths = [len(ids) for ids in shard_documents]
    assert facts["shards"].sum(axis=0).tolist() == [sum(lengths[0::2]), sum(lengths[1::2])]
    assert facts["documents"].tolist() == [40, 40]
    assert facts["longest"] == max(lengths)
    assert facts["histogram"].sum() == sum(lengths) and facts["histogram"][BOS] == 80


def test_id_outside_the_vocabulary(shard_folder):
    change(shard_folder, 1, 320)
    with pytest.raises(GateError, match="'ids'.*id 320"):
        checked(shard_folder)


@pytest.mark.parametrize(("at", "value"), [(0, 50), (-1, 50), (1, BOS), (1, EOS)])
def test_document_without_its_bos_or_eos_or_with_one_inside(shard_folder, at, value):
    change(shard_folder, at, value)
    with pytest.raises(GateError, match="boundaries"):
        checked(shard_folder)


def test_offsets_that_do_not_add_up(shard_folder):
    path = shard_folder / "train" / "00000.idx.npy"
    index = np.load(path)
    index[-1] += 1
    np.save(path, index)
    with pytest.raises(GateError, match="counts"):
        checked(shard_folder)


def test_shares_are_checked_overall_and_in_every_shard():
    targets = [0.5, 0.5]
    check_shares(np.array([[5000, 5100], [5050, 5000]]), ["a", "b"], targets, 0.02, 1)
    with pytest.raises(GateError, match="all shards.*'a' makes up 0.6000"):
        check_shares(np.array([[6000, 4000]] * 2), ["a", "b"], targets, 0.02, 1)
    with pytest.raises(GateError, match="shard 00000"):  # one source after the other: right in total only
        check_shares(np.array([[10000, 0], [0, 10000]]), ["a", "b"], targets, 0.02, 1)


def test_epoch_cap():
    check_epochs({"a": 200}, {"a": 100}, {"a": 2.0})
    with pytest.raises(GateError, match="'a' is seen 2.010 times"):
        check_epochs({"a": 201}, {"a": 100}, {"a": 2.0})


def test_document_in_both_splits():
    def parts(*rows):
        return iter([np.array(part, dtype=np.uint64).reshape(-1, 2) for part in rows])

    # Halves that agree crosswise are other documents.
    check_disjoint(parts([(1, 2), (3, 4)], [(5, 6)]), parts([(1, 4), (3, 6)], [(7, 2)]))
    check_disjoint(parts([(1, 2)]), parts())
    with pytest.raises(GateError, match="2 documents are in both.*for example 0000000000000003000000000000000f"):
        check_disjoint(parts([(1, 2), (3, 15)], [(3, 15), (2**64 - 1, 6)]), parts([(8, 8)], [(2**64 - 1, 6), (3, 15)]))


def test_tokens_that_are_not_the_sum_over_the_documents():
    check_counts({"a": 5}, {"a": 5}, "train")
    with pytest.raises(GateError, match="train: gate 'counts' failed: 4 tokens of 'a', not 5"):
        check_counts({"a": 4}, {"a": 5}, "train")


def test_a_source_that_lost_documents_or_all_of_them():
    found = {"a": SimpleNamespace(documents=2, text_bytes=10)}
    counted = {"a": {"documents": 2, "bytes": 10}}
    check_complete(found, counted, ["a", "in neither"], "train")
    cases = {
        "2 documents of 10 bytes": {"a": {"documents": 3, "bytes": 10}},
        "0 documents of 0 bytes of source 'b'": {**counted, "b": {"documents": 1, "bytes": 1}},
    }
    for have, wrong in cases.items():
        with pytest.raises(GateError, match=f"'complete' failed: {have}"):
            check_complete(found, wrong, ["a", "b"], "train")
    with pytest.raises(GateError, match="clean counted 0 of 0"):
        check_complete(found, {}, ["a"], "val")
