"""Each property of the shards' gate, with its defect planted in files on disk."""

from __future__ import annotations

import numpy as np
import pytest

from athanor.data.shard_gate import check_disjoint, check_epochs, check_files, check_shares
from athanor.errors import GateError

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
    check_disjoint({b"a"}, {b"b"})
    with pytest.raises(GateError, match="1 documents are in both"):
        check_disjoint({b"a", b"c"}, {b"b", b"c"})
