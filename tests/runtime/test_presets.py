"""The params file and every preset: complete, consistent between sections, pinned, and of the promised size."""

from __future__ import annotations

import copy
import functools
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from athanor.base.errors import ParamsError
from athanor.base.strict import build, read_yaml
from athanor.runtime import presets
from athanor.runtime.schema import check_values, schemas
from athanor.sources.addresses import is_local
from athanor.sources.exercises.build import BATTERY_ONLY, CATEGORIES, battery_items, training_conversations
from athanor.sources.fetch import check_pinned
from athanor.sources.instruct_params import ExercisesSource, MessagesSource
from athanor.sources.params import HuggingFaceSource, names_of
from tests.runtime.view import ROOT

PARAMETERS = {"plasma-1.0": 235_705_344, "plasma-1.1": 521_570_560, "plasma-1.2": 756_442_112}
PLASMA = [ROOT / "presets" / f"{name}.yaml" for name in PARAMETERS]
LORA = [ROOT / "presets" / f"{name}.yaml" for name in ("lora-mi50", "qlora-24gb")]
LADDER = [
    ROOT / "presets" / f"{name}.yaml" for name in ("evening", "one-gpu-day", "one-gpu-hour")
]  # tests/cli/test_recipe.py
PRESETS = [*(ROOT / "presets" / f"{name}.yaml" for name in ("default", "micro", "own-text")), *LORA, *PLASMA, *LADDER]
FILES = [ROOT / "params.yaml", *PRESETS]
# UTF-8 bytes that a token stands for, on the high side, so that a budget that passes is enough.
BYTES_PER_TOKEN = {"web": 4.8, "prose": 4.8, "qa": 4.2, "code": 3.6, "math": 3.6}
KEPT_BY_CLEAN = 0.85
# Keys that an overlay repeats for the sake of their comment.
WITH_A_REASON = {
    "val_fraction",
    "max_source_share",
    "warmup_fraction",
    "precision",
    "lr",
    "batch_tokens",
    "cooldown_fraction",
}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_preset = pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
each_plasma = pytest.mark.parametrize("path", PLASMA, ids=lambda path: path.stem)


@functools.cache
def load(path: Path) -> dict[str, Any]:
    """The sections of a file, built; frozen, so that tests can share them."""
    return check_values(raw(path))


@functools.cache
def raw(path: Path) -> dict[str, Any]:
    return read_yaml(path) if path.stem == "params" else presets.values(path)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.stem == "params" else presets.complete(path)


def built(data: dict[str, Any]) -> dict[str, Any]:
    return {name: build(schema, data[name], name) for name, schema in schemas().items()}


def hub_sources(sections: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """(dataset, revision) of every source that is fetched from the hub."""
    for source in (*sections["download"].sources, *sections["download"].labels):
        if isinstance(source, HuggingFaceSource) and not is_local(source.dataset):
            yield source.dataset, source.revision
    for source in sections["instruct"].sources:
        if isinstance(source, MessagesSource) and source.hub_id is not None:
            yield source.hub_id, source.revision
    for benchmark in sections["battery"].benchmarks:
        yield benchmark.hub_id, benchmark.revision


def disagreements(sections: dict[str, Any]) -> set[str]:
    """What the sections say differently of the same thing; no section's own schema can see it."""
    texts = set(sections["download"].names)
    chats = {source.name for source in sections["instruct"].sources}
    exercises = {name for s in sections["instruct"].sources if isinstance(s, ExercisesSource) for name in s.categories}
    battery, context = set(sections["battery"].categories), sections["model"].context_tokens
    facts = {*sections["clean"].decontamination.fact_categories, *sections["sft_data"].decontamination.fact_categories}
    checks = {
        "mixture": set(sections["mixture"].sources) == texts,
        "source_priority": set(sections["clean"].source_priority) <= texts,
        "sft_data sources": set(sections["sft_data"].sources) == chats,
        "sft_data context": sections["sft_data"].context_tokens == context,
        "pretrain batch": sections["pretrain"].batch_tokens % context == 0,
        "sft batch": sections["sft"].batch_tokens % context == 0,
        "vocabulary": sections["model"].vocab_size in (None, sections["tokenizer"].vocab_size),
        "exercises": exercises <= set(CATEGORIES),
        "battery": battery - set(BATTERY_ONLY) <= exercises,  # never asked in a form that was not trained
        "reward questions": set(sections["grpo_data"].categories) <= exercises,
        "fact categories": facts <= set(CATEGORIES),
        "answers": sections["eval"].max_new_tokens < context,
    }
    # Nothing is asked of another model in the form of our battery.
    excused = set() if sections["side"].base == "models/export/hf" else {"battery", "reward questions"}
    return {name for name, holds in checks.items() if not holds} - excused


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@each_file
def test_file_is_valid_without_a_network(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("validation opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert list(load.__wrapped__(path)) == list(schemas())


@each_file
def test_sections_agree(path: Path) -> None:
    assert disagreements(load(path)) == set()


@each_file
def test_file_means_the_same_to_every_yaml_reader(path: Path) -> None:
    """YAML 1.2 and 1.1 read the same numbers: 1e-3 without a point is text in 1.1, `no` is a truth value."""
    data = raw(path)
    assert yaml.safe_load(text(path)) == data
    for leaf in leaves(data):
        assert not (isinstance(leaf, str) and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", leaf)), leaf
        assert not isinstance(leaf, float) or leaf == leaf  # no .nan


@each_preset
def test_first_line_says_what_the_preset_is(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(r"# [A-Z].*[^.]\.", first) and len(first) <= 120


def test_params_yaml_is_the_default_preset() -> None:
    assert (ROOT / "params.yaml").read_bytes() == (ROOT / "presets" / "default.yaml").read_bytes()


@each_preset
def test_there_are_as_many_exercises_as_are_asked_for(path: Path) -> None:
    """A count above what a category holds would end the first download with an error."""
    sections = load(path)
    seed, fraction, battery = sections["instruct"].seed, sections["instruct"].val_fraction, sections["battery"]
    for source in sections["instruct"].sources:
        if isinstance(source, ExercisesSource):
            assert training_conversations(source, seed, fraction, battery)
    assert battery_items(battery)


def test_no_preset_goes_unchecked() -> None:
    assert sorted((ROOT / "presets").glob("*.yaml")) == sorted(PRESETS)


@each_plasma
def test_parameter_count_is_exact(path: Path) -> None:
    sections = load(path)
    config = sections["model"].config(sections["tokenizer"].vocab_size)
    assert config.parameter_count() == PARAMETERS[path.stem]
    assert f"{PARAMETERS[path.stem]:,}" in path.read_text(encoding="utf-8").splitlines()[0]


@each_file
def test_every_hub_source_is_pinned(path: Path) -> None:
    found = list(hub_sources(load(path)))
    assert bool(found) == (path in (*PLASMA, *LADDER, *LORA))  # the default and micro need no network
    assert all(re.fullmatch(r"[0-9a-f]{40}", str(revision)) for _, revision in found)


def test_a_data_set_has_one_revision_everywhere() -> None:
    revisions: dict[str, set[str | None]] = {}
    for path in PLASMA:
        for dataset, revision in hub_sources(load(path)):
            revisions.setdefault(dataset, set()).add(revision)
    assert {dataset: found for dataset, found in revisions.items() if len(found) > 1} == {}
    pinned = [next(iter(found)) for found in revisions.values()]
    assert len(set(pinned)) == len(pinned)  # a revision belongs to one data set


@each_plasma
def test_the_download_holds_enough_text(path: Path) -> None:
    """The least that a source may give, cleaned and repeated as often as allowed, covers its share of the run."""
    sections = load(path)
    shard, pretrain, mixture = sections["shard"], sections["pretrain"], sections["mixture"]
    steps = pretrain.tokens // pretrain.batch_tokens
    last = int(steps * pretrain.cooldown_fraction) * pretrain.batch_tokens if mixture.cooldown else 0
    streams = [(shard.train_tokens, pretrain.tokens - last, mixture.sources)]
    streams += [(shard.cooldown_tokens, last, mixture.cooldown.sources)] if mixture.cooldown else []
    for source in sections["download"].sources:
        for stream, trained, shares in streams:
            assert stream >= trained
            if source.name in shares:
                total = sum(share.share for share in shares.values())
                wanted = shares[source.name].share / total * stream * BYTES_PER_TOKEN[source.kind]
                given = source.min_bytes * KEPT_BY_CLEAN * shares[source.name].max_epochs
                assert given >= wanted, f"{source.name}: {given / wanted:.2f} of what is needed"
        assert source.max_bytes is None or source.min_bytes < source.max_bytes


@each_plasma
def test_budgets_are_the_promised_ones(path: Path) -> None:
    pretrain = load(path)["pretrain"]
    billions = {"plasma-1.0": 3.3, "plasma-1.1": 10.7, "plasma-1.2": 30.0}[path.stem]
    assert round(pretrain.tokens / 1e9, 1) == billions
    assert pretrain.tokens % pretrain.batch_tokens == 0
    assert pretrain.warmup_tokens == 2000 * pretrain.batch_tokens


def _rename(old: str, new: str, *keys: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in keys:
            data = data[key]
        data[new] = data.pop(old)

    return change


def _set(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in keys[:-1]:
            data = data.setdefault(key, {}) if isinstance(data, dict) else data[key]
        data[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_rename("arxiv", "archive", "mixture", "sources"), "mixture"),
        (_set(["code", "wiki"], "clean", "source_priority"), "source_priority"),
        (_rename("magpie", "magpies", "sft_data", "sources"), "sft_data sources"),
        (_set(2048, "sft_data", "context_tokens"), "sft_data context"),
        (_set(33000, "pretrain", "batch_tokens"), "pretrain batch"),
        (_set(33000, "sft", "batch_tokens"), "sft batch"),
        (_set(32000, "tokenizer", "vocab_size"), "vocabulary"),
        (_rename("addition", "additions", "instruct", "sources", -2, "categories"), "exercises"),
        (_set(5, "battery", "categories", "division"), "battery"),
        (_set(5, "grpo_data", "categories", "division"), "reward questions"),
        (_set(["recall"], "sft_data", "decontamination", "fact_categories"), "fact categories"),
        (_set(1024, "eval", "max_new_tokens"), "answers"),
    ],
)
def test_a_planted_disagreement_is_found(change: Callable[[dict[str, Any]], None], found: str) -> None:
    data = copy.deepcopy(raw(ROOT / "presets" / "plasma-1.1.yaml"))
    change(data)
    assert found in disagreements(built(data))


@pytest.mark.parametrize("revision", ["main", "87f0914", "87F09149EF4734204D70ED1D046DDC9CA3F2B8F9"])
@pytest.mark.parametrize(("section", "key"), [("download", "dataset"), ("instruct", "hub_id")])
def test_a_moving_revision_is_refused(section: str, key: str, revision: str) -> None:
    data = copy.deepcopy(raw(ROOT / "presets" / "plasma-1.1.yaml"))
    data[section]["sources"][0]["revision"] = revision
    with pytest.raises(ParamsError, match=rf"does not pin .*{re.escape(data[section]['sources'][0][key])}") as caught:
        built(data)
    assert caught.value.where == f"{section}.sources[0].revision"


def pinned(sections: dict[str, Any]) -> None:
    check_pinned(*(sections[name] for name in ("download", "instruct", "battery")))


@pytest.mark.parametrize(("section", "key"), [("download", "dataset"), ("instruct", "hub_id")])
def test_a_set_without_a_revision_is_a_valid_file_and_refused_before_any_work(section: str, key: str) -> None:
    data = copy.deepcopy(raw(ROOT / "presets" / "plasma-1.1.yaml"))
    assert pinned(built(data)) is None
    data[section]["sources"][0]["revision"] = None
    sections = built(data)
    with pytest.raises(ParamsError, match=re.escape(f"{data[section]['sources'][0][key]} is not pinned")) as caught:
        pinned(sections)
    assert caught.value.where == f"{section}.sources[0].revision" and "athanor pin" in caught.value.fix


@pytest.mark.parametrize("path", PLASMA[1:], ids=lambda path: path.stem)
def test_the_fuller_presets_name_the_reference_sources(path: Path) -> None:
    """Those of the reference run's main mixture and tuning, but for the ones that the file says are left out."""
    texts = set(load(path)["download"].names)
    assert texts >= {"fineweb-edu", "fineweb", "wikipedia", "stackexchange", "code", "finemath", "cosmopedia", "arxiv"}
    assert ("books" in texts) == (path.stem == "plasma-1.2")
    chats = {source.name for source in load(path)["instruct"].sources}
    assert chats >= {"dolly", "no-robots", "oasst", "slimorca", "ultrachat", "alpaca", "wizardlm", "metamath"}
    edu = next(source for source in load(path)["download"].sources if names_of(source) == ("fineweb-edu",))
    assert [(rule.column, rule.min) for rule in edu.select.filters] == [("score", 3.0)]


@each_preset
@pytest.mark.parametrize("override", ["sft.seed=77", "clean.rules.code.min_words=77", "model.layers=77"])
def test_dvc_changes_one_line_and_leaves_the_rest(tmp_path, path, override):
    """DVC writes the file anew for `-S`: comments within and after a list, flow lists and indented lists do not survive."""
    from dvc.utils.hydra import apply_overrides

    before, params = presets.complete(path), tmp_path / "params.yaml"
    params.write_text(before)
    apply_overrides(params, [override])
    before, after = before.splitlines(), params.read_text().splitlines()
    assert len(after) == len(before)
    changed = [new for old, new in zip(before, after, strict=True) if new != old]
    assert len(changed) == 1 and "77" in changed[0]


OVERLAYS = [path for path in PRESETS if path.stem != "default"]
DEFAULT = ROOT / "presets" / "default.yaml"


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_says_nothing_that_its_base_says(path: Path) -> None:
    """Each key of it, taken away, changes the params file; what does not belongs into no overlay."""
    own = read_yaml(path)
    base = presets.values(path.with_name(f"{own.pop('base', 'default')}.yaml"))
    same = [
        f"{section}.{key}" for section in own for key in own[section] if own[section][key] == base[section].get(key, "")
    ]
    assert not [name for name in same if name.rpartition(".")[2] not in WITH_A_REASON], same


def test_the_default_is_written_as_every_other_preset_is() -> None:
    head, comments = presets._comments(DEFAULT.read_text(encoding="utf-8"))
    assert head + presets._with_comments(presets.values(DEFAULT), comments) == DEFAULT.read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "default.yaml").write_text(
        "# The default.\n\nmixture:                          # shares\n  seed: 1\n  sources:\n    a: {share: 0.4, max_epochs: 4.0}\n"
        "    b: {share: 0.6, max_epochs: 2.0}\n\nmodel:\n  layers: 5                       # blocks\n  dim: 8\n"
        "\ndownload:\n  sources:\n  - type: files\n    name: a\n    min_chars: 1\n  - type: files\n    name: b\n    min_chars: 2\n"
    )
    return tmp_path


def overlay(folder: Path, text: str, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(f"# Mine.\n{text}")
    return path


def test_settings_are_merged_and_tables_and_lists_taken_whole_with_what_their_entries_do_not_say(folder: Path) -> None:
    path = overlay(
        folder,
        "mixture:\n  sources:\n    b: {share: 1.0}\n    c: {share: 2.0, max_epochs: 1.0}\n"
        "download:\n  sources:\n  - {name: b, min_chars: 7}\n  - {type: http, name: a, url: x}\n",
    )
    assert presets.values(path) == {
        "mixture": {
            "seed": 1,
            "sources": {"b": {"share": 1.0, "max_epochs": 2.0}, "c": {"share": 2.0, "max_epochs": 1.0}},
        },
        "model": {"layers": 5, "dim": 8},
        "download": {
            "sources": [{"type": "files", "name": "b", "min_chars": 7}, {"type": "http", "name": "a", "url": "x"}]
        },
    }


def test_an_overlay_may_lie_on_another_one(folder: Path) -> None:
    overlay(folder, "model: {layers: 6}\n", "first")
    assert presets.values(overlay(folder, "base: first\nmodel: {dim: 16}\n"))["model"] == {"layers": 6, "dim": 16}


def test_the_complete_file_keeps_comments_of_both_and_the_newer_one_of_a_key(folder: Path) -> None:
    path = overlay(folder, "\nmodel:\n  layers: 6                       # more of them\n  # wide\n  dim: 16\n")
    text = presets.complete(path)
    assert text.startswith("# Mine.\n\nmixture:                          # shares\n  seed: 1\n")
    assert "\n\nmodel:\n  layers: 6                       # more of them\n  # wide\n  dim: 16\n\n" in text


@pytest.mark.parametrize(
    ("text", "what", "fix"),
    [
        ("base: defualt\n", "no preset 'defualt'", "did you mean 'default'?"),
        ("base: mine\n", "'mine' is a base of itself", "name another preset, or none"),
    ],
)
def test_a_base_that_is_none_is_refused(folder: Path, text: str, what: str, fix: str) -> None:
    with pytest.raises(ParamsError, match=what) as caught:
        presets.values(overlay(folder, text))
    assert caught.value.fix == fix and str(caught.value.where).endswith("mine.yaml: base")


@each_file
def test_first_weights_from_pairs_fit_the_model(path):
    """With one matrix for both the stage would refuse, after all that comes before it."""
    values = load(path)
    assert not (values["pretrain"].bigram_tokens and values["model"].tied_embeddings)
