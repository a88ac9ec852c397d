"""The invalidation table: everything is changed once, and DVC must call stale what invalidation.yaml declares.

DVC is asked in-process, with its own lock, status and graph. The outputs are
placeholders that `dvc commit` accepted, so nothing is trained. Stages that DVC
calls changed, plus everything behind them in its graph, are what would run if
all bytes came out different (equal bytes stop the wave earlier).
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import networkx
import pytest

from athanor.base.strict import read_yaml
from athanor.runtime import presets
from tests.e2e.clone import Clone, make_clone
from tests.runtime.view import ROOT

TABLE_FILE = "tests/runtime/invalidation.yaml"
READ = ("corpus/", "battery/", "recipes/")  # what stages read, beside modules
TABLE = read_yaml(ROOT / TABLE_FILE)
STAGES = list(TABLE["follows"])
PLACEHOLDERS = ("manifest.json", "part")
Key = tuple[str | int, ...]


class Pipeline:
    """A clone with placeholder outputs and a real lock, and DVC opened on it."""

    def __init__(self, clone: Clone) -> None:
        self.clone, self.path = clone, clone.path
        self.open()
        self._make_outputs()
        self.repo.commit(force=True)
        self.open()

    def open(self) -> None:
        from dvc.dependency import ParamsDependency
        from dvc.repo import Repo

        self.repo = Repo(str(self.path))
        self.stages = {stage.name: stage for stage in self.repo.index.stages}
        made = {Path(out.fs_path) for stage in self.stages.values() for out in stage.outs}
        self.deps: dict[str, dict[str, list[Any]]] = {"params": {}, "source": {}}
        for name, stage in self.stages.items():
            deps = [dep for dep in stage.deps if not made & {Path(dep.fs_path), *Path(dep.fs_path).parents}]
            self.deps["params"][name] = [dep for dep in deps if isinstance(dep, ParamsDependency)]
            self.deps["source"][name] = [dep for dep in deps if not isinstance(dep, ParamsDependency)]

    def _make_outputs(self) -> None:
        for stage in self.stages.values():
            for out in stage.outs:
                path = Path(out.fs_path)
                path.parent.mkdir(parents=True, exist_ok=True)
                if out.metric or out.plot:
                    path.write_text(f"{path.stem}\n")
                    continue
                if path.suffix:
                    path.write_text(f"{path}\n")
                    continue
                path.mkdir()
                for name in PLACEHOLDERS:
                    (path / name).write_text(f"{path} {name}")
        # Files inside outputs that a stage depends on by name.
        for stage in self.stages.values():
            for dep in stage.deps:
                path = Path(dep.fs_path)
                if not path.exists():
                    path.write_text(str(path))

    def status(self) -> dict[str, dict[str, set[str]]]:
        """What DVC calls changed: stage -> "changed deps", "changed outs" or "changed command" -> the names in it."""
        found: dict[str, dict[str, set[str]]] = {}
        with self.repo.lock:
            for name, stage in self.stages.items():
                for cause in (cause for causes in stage.status().values() for cause in causes):
                    named = {cause: {}} if isinstance(cause, str) else cause
                    found.setdefault(name, {}).update({kind: set(what) for kind, what in named.items()})
        return found

    def stale(self, kind: str) -> set[str]:
        """The stages with a changed dependency of one kind, by DVC's status of each: params, or source (no output).

        A quicker look than `status`, for the hundreds that differ in nothing else.
        """
        return {name for name, deps in self.deps[kind].items() if any(dep.status() for dep in deps)}

    def behind(self, names: set[str]) -> set[str]:
        """Every stage after these in DVC's own graph, whose edges point from a stage to what it needs."""
        graph = self.repo.index.graph
        after = {stage.name for name in names for stage in networkx.ancestors(graph, self.stages[name])}
        return after - names

    @contextlib.contextmanager
    def edited(self, name: str, text: str = "\nX = 1\n", whole: bool = False) -> Iterator[None]:
        """`text` appended to a file, or in the place of its content; a file that is not there is made."""
        path = self.path / name
        before = path.read_bytes() if path.exists() else None
        after = text.encode() if whole else (before or b"") + text.encode()
        path.unlink(missing_ok=True)  # an output is read-only, and may share its bytes with DVC's cache
        path.write_bytes(after)
        try:
            yield
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    import dvc.dependency.param as params

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DVC_SITE_CACHE_DIR", str(tmp_path_factory.mktemp("site")))
        clone = make_clone(tmp_path_factory.mktemp("invalidation"))
        (clone.path / "params.yaml").write_text(json.dumps(named()))
        patch.chdir(clone.path)  # DVC names files relative to the working directory
        # Nine stages would parse params.yaml nine times for each leaf: remember the last text.
        parsed: dict[str, Any] = {}
        real = params.load_path

        def load_path(path: str, fs: Any, **how: Any) -> Any:
            text = Path(path).read_text()
            if text not in parsed:
                parsed.clear()
                parsed[text] = real(path, fs, **how)
            return parsed[text]

        patch.setattr(params, "load_path", load_path)
        yield Pipeline(clone)


def preset(name: str) -> dict[str, Any]:
    return presets.values(ROOT / "presets" / f"{name}.yaml")


def named() -> dict[str, Any]:
    """The default with what micro names besides."""
    return presets._merged(preset("default"), read_yaml(ROOT / "presets" / "micro.yaml"), set())


def expand(stages: Sequence[str] | str) -> set[str]:
    return set(STAGES) if stages == "all" else set(stages)


def follows(stages: set[str]) -> set[str]:
    return {after for name in stages for after in TABLE["follows"][name]} - stages


def entry(section: str, name: str) -> Any:
    """The one entry of a table that `name` matches."""
    patterns = [pattern for pattern in TABLE[section] if fnmatch.fnmatchcase(name, pattern)]
    if len(patterns) != 1:
        what = f"matches {' and '.join(patterns)}" if patterns else "is not declared"
        pytest.fail(f"{name} {what}. Fix: say once under '{section}' in {TABLE_FILE} which stages it belongs to")
    return patterns[0] if section == "nothing" else TABLE[section][patterns[0]]


def check_patterns_match(section: str, names: Sequence[str]) -> None:
    idle = [pattern for pattern in TABLE[section] if not fnmatch.filter(names, pattern)]
    assert not idle, f"patterns under '{section}' in {TABLE_FILE} that match nothing: {idle}"


def compare(what: str, got: set[str], want: set[str]) -> list[str]:
    words = [", ".join(sorted(stages, key=STAGES.index)) or "nothing" for stages in (got, want)]
    return [f"{what}: DVC says {words[0]}; declared is {words[1]}"] if got != want else []


# -- parameters -----------------------------------------------------------------------------------------------------


def nodes(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Leaves, and the lists and mappings that hold them; an empty list is a leaf."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield from nodes(child, (*key, name))
    yield key, value


def other(value: Any) -> Any:
    """Another value of the same type; a list or mapping loses its last element."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict) and value:
        return dict(list(value.items())[:-1])
    if isinstance(value, list):
        return value[:-1] if value else ["x"]
    return {int: lambda: value + 1, float: lambda: value * 2 + 0.001, str: lambda: value + "x"}.get(
        type(value), lambda: 1
    )()


def replaced(values: Any, key: Key, value: Any) -> Any:
    if not key:
        return value
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    new = {name: replaced(child, key[1:], value) if name == key[0] else child for name, child in pairs}
    return new if isinstance(values, dict) else list(new.values())


def leaves(name: str) -> dict[Key, Any]:
    return {key: value for key, value in nodes(preset(name)) if not isinstance(value, (dict, list)) or not value}


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "presets").glob("*.yaml")))
def test_every_parameter_of_every_preset_is_declared_once(name):
    names = [".".join(map(str, key)) for key in leaves(name)]
    for leaf in names:
        entry("params", leaf)
    check_patterns_match("params", names)


def test_every_parameter_makes_stale_what_is_declared(pipeline):
    values, wrong = named(), []
    with pipeline.edited("params.yaml", json.dumps(values, indent=4), whole=True):
        assert pipeline.status() == {}  # another layout, no other value
    sections = set()
    for key, value in nodes(values):
        if len(key) < 2:
            continue
        name, direct = ".".join(map(str, key)), expand(entry("params", ".".join(map(str, key))))
        with pipeline.edited("params.yaml", json.dumps(replaced(values, key, other(value))), whole=True):
            got = pipeline.stale("params")
            if key[0] not in sections:  # parameters change nothing else
                assert pipeline.status() == {stage: {"changed deps": {"params.yaml"}} for stage in got}
                sections.add(key[0])
        wrong += compare(name, got, direct) + compare(f"after {name}", pipeline.behind(got), follows(direct))
    assert not wrong, "\n".join(wrong)


# -- code -----------------------------------------------------------------------------------------------------------


def modules(path: Path) -> list[str]:
    """Every file of the packages with something in it, templates and the chat page's too."""
    files = [file for package in ("athanor", "stages") for file in (path / package).rglob("*")]
    whole = [file for file in files if file.is_file() and "__pycache__" not in file.parts and file.stat().st_size]
    return sorted(file.relative_to(path).as_posix() for file in whole if file.name != "py.typed")


def test_every_module_makes_stale_what_is_declared(pipeline):
    names, wrong = modules(pipeline.path), []
    assert len(names) > 100
    folders = set()
    for name in names:
        direct = expand(entry("modules", name))
        with pipeline.edited(name):
            got = pipeline.stale("source")
            if Path(name).parent not in folders:  # code changes nothing else
                dep = name if name.startswith("stages/") else "/".join(Path(name).parts[:2])
                assert pipeline.status() == {stage: {"changed deps": {dep}} for stage in got}
                folders.add(Path(name).parent)
        wrong += compare(name, got, direct) + compare(f"after {name}", pipeline.behind(got), follows(direct))
    assert not wrong, "\n".join(wrong)
    check_patterns_match("modules", names)


# -- files and the graph itself -------------------------------------------------------------------------------------


def test_every_output_and_input_makes_stale_what_is_declared(pipeline):
    """Changed in the workspace, an output is made again by its stage, and its readers see another file."""
    names, wrong = ["corpus/new.txt", "corpus/README.md", "battery/written.jsonl"], []
    names += ["recipes/python/exercises.yaml", "recipes/python/identity.yaml"]
    for out in (Path(out.fs_path) for stage in pipeline.stages.values() for out in stage.outs):
        files = sorted(out.iterdir()) if out.is_dir() else [out]
        names += [file.relative_to(pipeline.path).as_posix() for file in files]
    for name in names:
        declared = entry("files", name)
        maker, readers = {declared["made_by"]} - {None}, set(declared["read_by"])
        with pipeline.edited(name, "more"):
            status = pipeline.status()
        wrong += compare(f"{name} made by", {s for s in status if "changed outs" in status[s]}, maker)
        wrong += compare(f"{name} read by", {s for s in status if "changed deps" in status[s]}, readers)
        run = set(status) | pipeline.behind(set(status))
        wrong += compare(name, run, maker | readers | follows(maker | readers))
    assert not wrong, "\n".join(wrong)
    check_patterns_match("files", names)


def test_files_that_no_stage_reads_make_nothing_stale(pipeline):
    listed = pipeline.clone.run("git", "ls-files").stdout.splitlines()
    known = {*modules(pipeline.path), *TABLE["files"], "params.yaml", "dvc.yaml", "dvc.lock"}
    empty = {name for name in listed if name.endswith("__init__.py") and name.startswith(("athanor/", "stages/"))}
    names = [name for name in listed if name not in known | empty and not name.startswith(READ)]
    for name in names:
        entry("nothing", name)
    check_patterns_match("nothing", names)
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(pipeline.edited(name, "\n# changed\n"))
        stack.enter_context(pipeline.edited("machine.yaml", "threads: 1\n"))
        for name in (".loop.py.swp", "loop.py~", ".#loop.py", "#loop.py#", "loop.py.orig", "loop.py.rej", ".DS_Store"):
            stack.enter_context(pipeline.edited(f"athanor/training/{name}", "what an editor left"))
        pipeline.open()
        assert pipeline.status() == {}
    pipeline.open()


def test_a_changed_command_makes_its_stage_stale_and_words_nothing(pipeline):
    text = (pipeline.path / "dvc.yaml").read_text()
    for stage in STAGES:
        command = f"cmd: {pipeline.stages[stage].cmd}\n"
        assert text.count(command) == 1
        with pipeline.edited("dvc.yaml", text.replace(command, command.replace("python", "python -O")), whole=True):
            pipeline.open()
            assert pipeline.status() == {stage: {"changed command": set()}}
    with pipeline.edited("dvc.yaml", text.replace("desc: ", "desc: now "), whole=True):
        pipeline.open()
        assert pipeline.status() == {}
    pipeline.open()


def test_the_table_follows_itself():
    """`follows` is a hand-made list; it must at least be closed: what follows a follower follows."""
    for stage, after in TABLE["follows"].items():
        for name in after:
            assert stage not in TABLE["follows"][name] and set(TABLE["follows"][name]) <= set(after), (stage, name)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("params.yaml", '"lr": 0.004', '"lr": 0.005'),
        ("athanor/model/transformer.py", "", "X = 1\n"),
        ("corpus/new.txt", "", "text"),
        ("data/raw/part", "", "more"),
    ],
)
def test_the_dvc_command_says_the_same(pipeline, name, old, new):
    before = (pipeline.path / name).read_text() if (pipeline.path / name).exists() else ""
    assert old in before
    with pipeline.edited(name, before.replace(old, new) if old else before + new, whole=True):
        inside = set(pipeline.status())
        done = pipeline.clone.dvc("status", "--json", DVC_SITE_CACHE_DIR=os.environ["DVC_SITE_CACHE_DIR"])
    assert inside and set(json.loads(done.stdout)) == inside
