"""What `athanor doctor` says about the hardware profile. Without torch, whose import takes longer than all checks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from athanor.commands.doctor.main import Finding
from athanor.hardware import profile as profiles
from athanor.params.strict import read_yaml

AGAIN = "python -m athanor bench hardware"


def hardware_profile(root: Path) -> Iterator[Finding]:
    """One note: of what the profile is, or why it is not read."""
    path = root / profiles.FILE
    if not path.is_file():
        return
    profile = profiles.read(root)
    where = profiles.FILE.as_posix()
    if profile is None:
        yield Finding("profile", where, "cannot be read, so it is not used", f"{AGAIN} --again", note=True)
        return
    about = profile["fingerprint"]
    shape = read_yaml(root / "params.yaml").get("model", {}) if (root / "params.yaml").is_file() else {}
    reasons = [name for name, value in shape.items() if value is not None and about["model"].get(name, value) != value]
    changed = [f"model.{name} is another" for name in reasons]
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = about["torch"]
    if version.split("+")[0] != about["torch"].split("+")[0]:
        changed.append(f"torch is now {version}")
    if changed:
        yield Finding("profile", where, f"is stale and not used: {', '.join(changed)}", AGAIN, note=True)
        return
    compiled = profile["compile"]
    gain = "not compiled"
    if compiled["works"]:
        gain = f"{compiled['eager_seconds'] / compiled['compiled_seconds']:.2f} times as fast compiled"
    kernel = profile["attention"]["default"]
    what = f"{about['device']}, {about['threads']} threads: {profile['precision']}, {kernel} attention, {gain}"
    yield Finding("profile", where, what, f"{AGAIN} shows all of it", note=True)
