"""Known troubles: each is found by its own example and by nothing else, and healthy machines show none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from athanor.base.errors import InputError, ParamsError
from athanor.base.strict import build, read_yaml
from athanor.hardware.pci import ADDRESS
from athanor.runtime import process
from athanor.troubles import trouble as engine
from athanor.troubles.trouble import BLOCKING, Example, Trouble, search, shown, troubles
from athanor.troubles.world import ROOT, Condition, World, here, version
from tools import troubles_doc

HEALTHY = Path(__file__).parent / "healthy"
REPOSITORY = Path(__file__).resolve().parents[2]
TREES = read_yaml(HEALTHY / "trees.yaml")


def link_devices(root: Path) -> None:
    """/sys/bus/pci/devices has a link to each device, which lies below the bridges that lead to it."""
    bus = root / "sys/bus/pci/devices"
    for device in (path for path in (root / "sys/devices").glob("pci*/**/*") if ADDRESS.fullmatch(path.name)):
        bus.mkdir(parents=True, exist_ok=True)
        if not (bus / device.name).exists():
            (bus / device.name).symlink_to(device)


def world_of(example: Example, root: Path) -> World:
    """A machine that has what the example names and nothing else; its files are written below `root`."""
    for name, text in {**(example.files or {}), **dict.fromkeys(example.denied, "")}.items():
        (root / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / name.lstrip("/")).write_text(text, encoding="utf-8")
    link_devices(root)
    packages, nvidia = example.packages or {}, example.nvidia or {}
    refused = {root / name.lstrip("/") for name in example.denied}
    return World(
        root, example.env or {}, example.settings or {}, Path("/work"), lambda: example.cards,
        lambda name: packages.get(name, ""), lambda field: nvidia.get(field, "").splitlines(), refused.isdisjoint,
    )  # fmt: skip


@pytest.mark.parametrize("trouble", troubles(), ids=lambda trouble: trouble.name)
def test_its_example_finds_it_and_no_other(trouble: Trouble, tmp_path: Path) -> None:
    world = world_of(trouble.example, tmp_path)
    assert [found.name for found in shown(world)] == [trouble.name] * trouble.on_machine
    hits = search(trouble.example.log, world)
    assert [hit.trouble.name for hit in hits] == [trouble.name] * (not trouble.on_machine)
    assert all(hit.text and hit.text in trouble.example.log for hit in hits)


@pytest.mark.parametrize("path", sorted(HEALTHY.glob("*.log")), ids=lambda path: path.stem)
def test_a_healthy_log_tells_none(path: Path) -> None:
    assert search(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("name", TREES)
def test_a_healthy_machine_shows_none(name: str, tmp_path: Path) -> None:
    assert shown(world_of(build(Example, TREES[name], name), tmp_path)) == []


def test_there_are_as_many_as_promised() -> None:
    assert len(troubles()) >= 60 and len(TREES) + len(list(HEALTHY.glob("*.log"))) >= 30


def test_no_file_of_them_is_taken_for_a_pipeline() -> None:
    """DVC reads each dvc.yaml of a checkout, wherever it lies, and refuses every command when one is none."""
    names = {path.name for path in Path(engine.__file__).parent.rglob("*.yaml")}
    assert "several.yaml" in names and "dvc.yaml" not in names


@pytest.mark.parametrize("trouble", troubles(), ids=lambda trouble: trouble.name)
def test_it_has_a_source_and_words_for_one_screen(trouble: Trouble) -> None:
    source = trouble.source
    assert re.fullmatch(r"https://\S+", source) or (REPOSITORY / source).is_file()
    assert len(trouble.cause) <= 260 and len(trouble.fix) <= 330 and len(trouble.title) <= 90


def test_the_page_of_docs_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert troubles_doc.PAGE.read_text(encoding="utf-8") == troubles_doc.page(), "run python -m tools.troubles_doc"


# -- what is told first -----------------------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    return [hit.trouble.name for hit in search(text)]


def test_a_cause_comes_before_what_follows_from_it_and_before_a_bare_status() -> None:
    peer = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1\n"
    memory = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    warning = "UserWarning: Attempting to use hipBLASLt on an unsupported architecture!\n"
    status = "failed to run: python -m stages.pretrain, exited with -9\n"
    assert names(warning + peer + memory + status) == [
        "out-of-memory-among-several", "peer-is-gone", "killed-for-memory", "hipblaslt-unsupported",
    ]  # fmt: skip


def test_a_status_is_read_wherever_it_is_told() -> None:
    for text in ("exited with -9", "(exitcode: -9)", "exit code 137", "make: *** [Makefile:30: repro] Error 137"):
        assert names(text) == ["killed-for-memory"], text
    for text in ("exited with 1", "exited with 75", "exited with -90", "exit code 1370", "step 137"):
        assert names(text) == [], text
    assert [names(f"exited with {status}") for status in (-7, 134, 139)] == [
        ["bus-error"], ["aborted"], ["crashed-in-native-code"],
    ]  # fmt: skip


def test_the_line_is_named() -> None:
    [hit] = search("one\ntwo\n  OSError: [Errno 122] Disk quota exceeded\nfour")
    assert (hit.line, hit.text) == (3, "OSError: [Errno 122] Disk quota exceeded")


# -- conditions and entries -------------------------------------------------------------------------------------------


def test_conditions(tmp_path: Path) -> None:
    files = {"/a/1/n": "width: 4\n", "/a/2/n": "width: 16\n", "/k": "6.14.0-27-generic"}
    example = Example(
        files=files, denied=("/d",), env={"E": "1"}, cards=("gfx906", "sm_90"), packages={"torch": "2.9.1+rocm6.3"}
    )
    world = world_of(example, tmp_path)
    for text, expected in {
        "file=/a/*/n": True, "file=/nothing": False, "file=/nothing missing=1": True,
        "file=/a/*/n matches=width:.(\\d+) below=8": True, "file=/a/*/n matches=width:.(\\d+) above=16": False,
        "file=/a/*/n matches=width at_least=2": True, "file=/a/*/n matches=width at_least=3": False,
        "file=/a/*/n absent=16": False, "file=/a/*/n absent=32": True, "file=/nothing absent=x": False,
        "file=/k older=6.18.4": True, "file=/k older=6.14": False, "file=/k since=6.14": True,
        "env=E matches=^1$": True, "env=F missing=1": True, "env=F absent=1": False,
        "env=E matches=1 missing=1": False, "env=E matches=0 missing=1": True,
        "card=gfx": True, "card=. at_least=2": True, "card=gfx at_least=2": False,
        "package=torch matches=rocm(.*) older=6.4": True, "package=numpy": False,
        "file=/d denied=1": True, "file=/k denied=1": False, "setting=launch.nodes above=1": False,
    }.items():  # fmt: skip
        pairs = [word.split("=", 1) for word in text.split()]
        kinds = {"below": float, "above": float, "at_least": int, "missing": bool, "denied": bool}
        condition = Condition(**{key: kinds.get(key, str)(value) for key, value in pairs})
        assert condition.holds(world) is expected, text
    assert version("torch 2.13.0+cpu") == (2, 13, 0) and version("none") == ()


def test_what_cannot_be_read_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(PermissionError))
    assert not any(Condition(file="/f", **{key: "y"}).holds(World(tmp_path)) for key in ("absent", "matches"))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"fixx": "a"}, "fixx"), ({"fix": ""}, "fix"), ({"log": []}, "log"), ({"log": ["("]}, "log"),
        ({"severity": "bad"}, "severity"), ({"when": [{}]}, "when"), ({"when": [{"file": "a", "env": "b"}]}, "when"),
        ({"when": [{"file": "a", "matches": "("}]}, "when"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_refused(change: dict, where: str) -> None:
    entry = {"name": "n", "title": "t", "severity": "note", "cause": "c", "fix": "f", "source": "s", "log": ["x"]}
    build(Trouble, entry, "n")
    with pytest.raises(ParamsError, match=where):
        build(Trouble, {**entry, **change}, "n")


# -- before a training ------------------------------------------------------------------------------------------------


@pytest.fixture
def two_mi50(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on a faked machine: two MI50 behind an IOMMU."""
    root, checkout = tmp_path / "machine", tmp_path / "checkout"
    for number in (1, 2):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        (node / "properties").write_text("simd_count 240\ngfx_target_version 90006\n")
    (root / "sys/kernel/iommu_groups/7").mkdir(parents=True)
    (root / "sys/kernel/iommu_groups/7/type").write_text("DMA-FQ\n")
    (root / "proc").mkdir()
    (root / "proc/cmdline").write_text("ro quiet splash\n")
    checkout.mkdir()
    for name in ("NCCL_P2P_DISABLE", "HSA_OVERRIDE_GFX_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(ROOT, str(root))
    monkeypatch.setenv("DVC_ROOT", str(checkout))
    return checkout


def test_what_freezes_stops_a_training_and_names_the_way_out(two_mi50: Path) -> None:
    settings = two_mi50 / "machine.yaml"
    settings.write_text("launch: {processes: 2}\n")
    with pytest.raises(InputError, match=r"iommu=pt.*known_troubles: \[amd-cards-behind-iommu\]"):
        process._refuse_troubles()
    settings.write_text("launch: {processes: 2}\nknown_troubles: [amd-cards-behind-iommu]\n")
    process._refuse_troubles()


@pytest.mark.parametrize("settings", ["", "launch: {processes: 2}\ndevice: cpu\n"])
def test_a_training_that_it_does_not_concern_is_not_stopped(two_mi50: Path, settings: str) -> None:
    (two_mi50 / "machine.yaml").write_text(settings or "{}\n")
    process._refuse_troubles()


def test_known_troubles_may_stand_in_the_environment(two_mi50: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATHANOR_LAUNCH", "processes=2")
    monkeypatch.setenv("ATHANOR_KNOWN_TROUBLES", "one-core amd-cards-behind-iommu")
    process._refuse_troubles()


def test_all_that_stop_a_training_are_cheap_to_look_at() -> None:
    """They run before each training: files, variables and one question to nvidia-smi, no search through folders."""
    for trouble in troubles():
        if trouble.severity in BLOCKING and trouble.on_machine:
            assert all("**" not in condition.file for condition in trouble.when)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    assert isinstance(shown(here({"device": "auto"}, tmp_path)), list)
