from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from athanor.base.artifacts import write_manifest
from athanor.base.errors import InputError, ParamsError
from athanor.data import rows
from athanor.data.sampler import NO_DOCUMENT, PretrainSampler, SftSampler
from athanor.data.shards import open_cooldown

T = 16


def test_each_window_once_per_epoch_and_every_target_once(shard_folder, shard_documents):
    stream = np.concatenate(shard_documents)
    sampler = PretrainSampler(shard_folder, T, seed=1)
    for epoch in range(2):
        tokens, *_ = sampler.batch(epoch * sampler.tokens_per_epoch, sampler.tokens_per_epoch)
        expected = [stream[i * T : i * T + T + 1].tolist() for i in range((len(stream) - 1) // T)]
        assert sorted(tokens.tolist()) == sorted(expected)


def test_epochs_and_seeds_differ_in_order(shard_folder):
    sampler, other = PretrainSampler(shard_folder, T, seed=1), PretrainSampler(shard_folder, T, seed=2)
    n = sampler.tokens_per_epoch
    first = sampler.batch(0, n).tokens_BS
    assert not np.array_equal(first, sampler.batch(n, n).tokens_BS)
    assert not np.array_equal(first, other.batch(0, n).tokens_BS)
    assert sampler.epoch(n // 2 * 3) == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_a_batch_is_a_pure_function_of_its_position(shard_folder, sft_folder, kind):
    def make():
        return PretrainSampler(shard_folder, T, 1) if kind == "pretrain" else SftSampler(sft_folder, 31, 1)

    sampler = make()
    t = sampler.context_tokens
    start = sampler.tokens_per_epoch - 4 * t  # crosses into the next epoch
    whole = sampler.batch(start, 8 * t)
    for position in (5, 0, 7, 3):  # any order, a new process each time
        single = make().batch(start + position * t, t)
        for a, b in zip(single[:-1], whole[:-1], strict=True):
            assert np.array_equal(a[0], b[position])
    again = sampler.batch(start, 8 * t)  # and after other positions were read
    assert all(np.array_equal(a, b) for a, b in zip(again, whole, strict=True))


def test_document_ids_change_exactly_where_documents_do(shard_folder):
    tokens, documents, *_ = PretrainSampler(shard_folder, T, 1).batch(0, 20 * T)
    starts = tokens[:, 1:] == 2
    assert np.array_equal(np.diff(documents, axis=1) == 1, starts)
    assert starts.any()


def test_positions_off_the_grid_and_too_little_data_are_errors(shard_folder):
    sampler = PretrainSampler(shard_folder, T, 1)
    for position, batch in ((1, T), (0, T + 1), (-T, T)):
        with pytest.raises(ParamsError, match="multiple of the context"):
            sampler.batch(position, batch)
    with pytest.raises(InputError, match="fewer than one window"):
        PretrainSampler(shard_folder, 100_000, 1)


def test_the_cooldown_reads_its_own_stream_from_its_start(cooldown_folder, shard_folder):
    main, start = PretrainSampler(shard_folder, T, 1), 24 * T
    sampler = PretrainSampler(cooldown_folder, T, 1, start)
    assert np.array_equal(sampler.batch(start - 4 * T, 4 * T).tokens_BS, main.batch(start - 4 * T, 4 * T).tokens_BS)
    stream = open_cooldown(cooldown_folder)
    n = (stream.tokens - 1) // T
    whole = sampler.batch(start, n * T)
    windows = [stream.read(i * T, T + 1).tolist() for i in range(n)]
    assert sorted(whole.tokens_BS.tolist()) == sorted(windows)
    for place in (n - 1, 0, 5):  # any order, a new object each time
        single = PretrainSampler(cooldown_folder, T, 1, start).batch(start + place * T, T)
        assert all(np.array_equal(a[0], b[place]) for a, b in zip(single[:-1], whole[:-1], strict=True))
    again = sampler.batch(start + n * T, n * T).tokens_BS  # the second epoch
    assert sorted(again.tolist()) == sorted(windows) and not np.array_equal(again, whole.tokens_BS)
    epochs = {"epochs": start / main.tokens_per_epoch, "cooldown_epochs": 1.5}
    assert sampler.epochs(start + n * T * 3 // 2) == pytest.approx(epochs, abs=0.01)
    assert main.epochs(start) == {"epochs": main.epoch(start)}


def test_data_that_is_left_out_moves_a_batch_on_in_its_own_stream(cooldown_folder, sft_folder):
    start = 24 * T
    sampler, main = PretrainSampler(cooldown_folder, T, 1, start), PretrainSampler(cooldown_folder, T, 1, 10**6 * T)
    for position in (8 * T, start - 2 * T):  # the later one would come into the cooldown's stream
        expected = main.batch(position + 4 * T, 2 * T)
        got = sampler.batch(position, 2 * T, 4 * T)
        assert all(np.array_equal(a, b) for a, b in zip(got, expected, strict=True))
    assert np.array_equal(sampler.batch(start, T, 4 * T).tokens_BS, sampler.batch(start + 4 * T, T).tokens_BS)
    rows = SftSampler(sft_folder, 31, 1)
    assert np.array_equal(rows.batch(31, 62, 62).tokens_BS, rows.batch(93, 62).tokens_BS)


def test_documents_of_a_batch_have_names(cooldown_folder, sft_folder, shard_documents):
    start = 24 * T
    sampler = PretrainSampler(cooldown_folder, T, 1, start)
    for row, number in enumerate(sampler.batch(0, 20 * T).document_BS[:, 5].tolist()):
        name = sampler.document_name(row * T, 0, number)
        assert name == f"document {number} of train ({('even', 'odd')[number % 2]})"
        tokens = sampler.batch(row * T, T).tokens_BS[0, 5:7].tolist()
        assert tokens[0] in shard_documents[number]
    assert sampler.document_name(start + T, 0, 3) == "document 3 of cooldown (source-0)"  # its manifest names no source
    rows = SftSampler(sft_folder, 31, 1)
    for row in range(5):
        ids, _, documents, *_ = rows.batch(row * 31, 31)
        for place in set(documents[0].tolist()) - {NO_DOCUMENT}:
            number = int(ids[0][documents[0] == place][2]) - 20
            assert rows.document_name(row * 31, 0, place) == f"conversation {number} of conversations"


def test_a_replay_piece_is_named_as_text(tmp_path):
    """A piece of pretraining text that spoilt a step was reported as a conversation that nobody could find."""
    entries = [([2, 5, 20, 7, 6, 100, 7], [0] * 5 + [1, 1]), ([2, 30, 31, 3], [0, 1, 1, 1])]
    rows.write_split(tmp_path, "train", entries, [[0, 1]], 320, [1, 2])
    facts = {"dtype": "uint16", "pad_id": 0, "stop_id": 7, "context_tokens": 31, "sources": ["chat", "sums"]}
    write_manifest(tmp_path, kind=rows.KIND, version=rows.VERSION, counts={}, replay_sources=["prose"], **facts)
    sampler = SftSampler(tmp_path, 31, 1)
    assert [sampler.document_name(0, 0, place) for place in (0, 1)] == ["conversation 0 of sums", "text 1 of prose"]


def test_what_stands_for_the_trunk_does_not_know_the_cooldown(cooldown_folder, shard_folder):
    with_it, without = (PretrainSampler(folder, T, 1, 8 * T) for folder in (cooldown_folder, shard_folder))
    assert with_it.trunk_manifest == without.trunk_manifest == without.manifest != with_it.manifest


def test_a_cooldown_stream_without_a_cooldown_is_refused(cooldown_folder):
    with pytest.raises(ParamsError, match="pretrain.schedule: .*no cooldown.*mixture.cooldown to null"):
        PretrainSampler(cooldown_folder, T, 1)
    with pytest.raises(InputError, match="cooldown: .*fewer than one window"):
        PretrainSampler(cooldown_folder, 1500, 1, 0)


def test_sft_rows_hold_whole_isolated_conversations(sft_folder):
    sampler = SftSampler(sft_folder, 31, seed=1)
    ids, mask, documents, *_ = sampler.batch(0, sampler.tokens_per_epoch)
    assert ids.shape == mask.shape == documents.shape == (sampler.samples, 32)
    seen = []
    for row in range(len(ids)):
        for place in range(documents[row].max() + 1):
            part = ids[row][documents[row] == place]
            assert part[0] == 2 and part[-1] == 7 and (part == 2).sum() == 1
            assert mask[row][documents[row] == place].tolist() == [0] * 5 + [1] * (len(part) - 5)
            seen.append(int(part[2]) - 20)
    assert sorted(seen) == sorted([*range(30), 29])


def test_padding_belongs_to_no_document_and_is_not_supervised(sft_folder):
    sampler = SftSampler(sft_folder, 31, seed=1)
    ids, mask, documents, *_ = sampler.batch(0, sampler.tokens_per_epoch)
    padding = documents == NO_DOCUMENT
    assert padding.any()
    assert (ids[padding] == 0).all() and (mask[padding] == 0).all()
    assert not (ids[~padding] == 0).any()


def test_rows_packed_for_another_context_are_refused(sft_folder):
    with pytest.raises(ParamsError, match="packed for a context of 31"):
        SftSampler(sft_folder, 64, seed=1)


def test_the_data_package_needs_nothing_but_numpy():
    code = (
        "import sys, pkgutil, importlib, athanor.data\n"
        "for m in pkgutil.iter_modules(athanor.data.__path__): importlib.import_module('athanor.data.' + m.name)\n"
        "bad = {'torch', 'pyarrow', 'sentencepiece', 'safetensors', 'ruamel', 'yaml'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
