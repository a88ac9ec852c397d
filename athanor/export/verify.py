"""Does an exported file come from where it says? Its own metadata against itself, the checkout and the Git history.

Every check makes one line: it matches, it differs, or it cannot be checked
here and why. Nothing in the file is believed because it is in the file; the
seals only say whether somebody changed it since.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from athanor.artifacts import MANIFEST, digest, read_json, sha256_file, verify_files
from athanor.errors import AthanorError, InputError
from athanor.export import history, seal
from athanor.export.lineage import MANIFESTS, MODEL, TOKENIZER, dvc_hash, path_of

OWN = "athanor.json"  # of a Hugging Face directory
MATCHES, DIFFERS, UNCHECKED = "matches", "differs", "unchecked"
OLD = "it was written by an earlier version, which stored none"


@dataclass(frozen=True)
class Line:
    status: str
    what: str
    detail: str


@dataclass(frozen=True)
class Claims:
    """What a file says of itself. `name`: how it is called in the report."""

    name: str
    path: Path
    model: str
    dtype: str  # of a Hugging Face directory, or the GGUF type
    tokenizer_digest: str
    template_hash: str
    lineage: Mapping[str, str]
    lock: Mapping[str, str] = field(default_factory=dict)


def verify(path: str | Path, *, data: bool = False) -> list[Line]:
    """Check an export folder, a Hugging Face directory or a GGUF file against the checkout in the working directory.

    data: also hash again every file that a matching manifest lists, not only the models'.
    InputError for what no export stage wrote.
    """
    path = Path(path)
    lines: list[Line] = []
    if path.is_file():
        claims = [_gguf(path, lines)]
    elif (path / OWN).is_file():
        claims = [_huggingface(path, lines)]
    elif (path / MANIFEST).is_file() and _mapping(path / MANIFEST).get("kind") == "export":
        claims = list(_folder(path, lines))
    else:
        fix = "name models/export, a Hugging Face directory in it, or a GGUF file"
        raise InputError("neither a file nor a folder made by the export stage", where=str(path), fix=fix)
    _agree(claims, lines)
    lines += _lineage(claims[0], data)
    whole = path.is_dir() and not (path / OWN).is_file()
    found = history.find(claims[0].lock, Path.cwd(), dvc_hash(path) if whole else None)
    lines.append(Line(found.status, "commit", found.detail))
    if found.exact is not None:
        text = "the folder as a whole is" if found.exact else "the folder as a whole is not"
        lines.append(Line(_is(found.exact), history.OUT, f"{text} what that dvc.lock recorded"))
    lines += _code(claims[0])
    for claim in claims:
        lines.append(_remade(claim))
    return lines


def _is(status: bool) -> str:
    return MATCHES if status else DIFFERS


def _mapping(path: Path, *parts: str) -> dict[str, Any]:
    """A JSON file that holds a mapping, with mappings under the names given."""
    found = read_json(path)
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in parts):
        raise InputError("not what the export stage writes", where=str(path), fix="dvc checkout models/export")
    return found


# -- what a file says, and whether it was changed since -----------------------


def _folder(path: Path, lines: list[Line]) -> Iterator[Claims]:
    manifest = _mapping(path / MANIFEST, "files", "parents")
    listed = manifest["files"]
    there = {f.relative_to(path).as_posix() for f in path.rglob("*") if f.is_file() and f.name != MANIFEST}
    for name in sorted(there | set(listed)):
        if name not in listed:
            lines.append(Line(DIFFERS, name, "the manifest knows no such file: added or renamed"))
        elif name not in there:
            lines.append(Line(DIFFERS, name, "missing: the manifest lists it"))
        else:
            same = sha256_file(path / name) == listed[name]["sha256"]
            text = f"{listed[name]['bytes']:,} bytes as in the manifest" if same else "changed since it was written"
            lines.append(Line(_is(same), name, text))
    found = [_huggingface(path / "hf", lines)] if (path / "hf" / OWN).is_file() else []
    found += [_gguf(file, lines) for file in sorted(path.glob("*.gguf"))]
    if not found:
        raise InputError("no file with a lineage is left in it", where=str(path), fix="dvc checkout models/export")
    artifacts = {name: value for name, value in found[0].lineage.items() if name in MANIFESTS}
    same = manifest["parents"] == artifacts
    text = "the same parents as the files name" if same else f"other parents than {found[0].name} names"
    lines.append(Line(_is(same), MANIFEST, text))
    yield from found


def _huggingface(path: Path, lines: list[Line]) -> Claims:
    facts = _mapping(path / OWN)
    name = path.name
    sealed = {key: value for key, value in facts.items() if key != "sha256"}
    if "sha256" in facts:
        same = facts["sha256"] == digest(sealed)
        lines.append(Line(_is(same), f"{name}/{OWN}", "as written" if same else "edited: its own hash is another"))
    else:
        lines.append(Line(UNCHECKED, f"{name}/{OWN}", f"no hash of its content; {OLD}"))
    listed = facts.get("files", {})
    there = {file.name for file in path.iterdir() if file.name != OWN} if listed else set()
    for file in sorted(there | set(listed)):
        if file not in listed or file not in there:
            text = "unknown to athanor.json: added or renamed" if file not in listed else "missing"
            lines.append(Line(DIFFERS, f"{name}/{file}", text))
        elif sha256_file(path / file) != listed[file]:
            lines.append(Line(DIFFERS, f"{name}/{file}", "not the hash in athanor.json"))
    if listed and not any(line.status == DIFFERS and line.what.startswith(f"{name}/") for line in lines):
        lines.append(Line(MATCHES, name, f"{len(listed)} files with the hashes in {OWN}"))
    return _claims(name, path, facts, facts.get("dtype"))


def _gguf(path: Path, lines: list[Line]) -> Claims:
    from gguf import GGUFReader

    from athanor.export.gguf import FILE_TYPES, K_TYPES
    from athanor.export.gguf_check import broken_seals, contents

    try:
        reader = GGUFReader(path)
        found = contents(reader)
        broken = broken_seals(reader)
    except Exception as error:  # the reader lets whatever a torn file leads to through
        fix = "dvc checkout models/export"
        raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix=fix) from None
    if not any(key.startswith("athanor.") for key in found):
        raise InputError("a GGUF file without a lineage", where=str(path), fix="name one that the export stage wrote")
    words = {
        seal.WEIGHTS: ("the weights are those that were written", "the weights were changed, or quantised again"),
        seal.METADATA: ("the metadata is what was written", "the metadata was edited"),
    }
    for key, (good, bad) in words.items():
        if key not in found:
            lines.append(Line(UNCHECKED, path.name, f"no {key}; {OLD}"))
        else:
            lines.append(Line(_is(key not in broken), path.name, bad if key in broken else good))
    if "athanor.file" in found:
        same = found["athanor.file"] == path.name
        text = "under its own name" if same else f"renamed: it was written as {found['athanor.file']}"
        lines.append(Line(_is(same), path.name, text))
    types = {int(number): name for name, (_, number) in FILE_TYPES.items()}
    types |= {int(number): name for name, number in K_TYPES.items()}
    dtype = types.get(found.get("general.file_type"))
    facts = {
        "name": found.get("general.name", ""),
        "tokenizer_digest": found.get("athanor.tokenizer_digest"),
        "template_hash": found.get("athanor.template_hash"),
        **{
            part: {key.removeprefix(start): v for key, v in found.items() if key.startswith(start)}
            for part, start in (("lineage", "athanor.lineage."), ("lock", "athanor.lock."))
        },
    }
    return _claims(path.name, path, facts, dtype)


def _claims(name: str, path: Path, facts: Mapping[str, Any], dtype: str | None) -> Claims:
    try:
        keys = ("name", "tokenizer_digest", "template_hash", "lineage")
        model, tokenizer, template, lineage = (facts[key] for key in keys)
        if not (isinstance(tokenizer, str) and isinstance(template, str)):
            raise KeyError("tokenizer_digest and template_hash")
        return Claims(name, path, model, dtype or "", tokenizer, template, dict(lineage), dict(facts.get("lock", {})))
    except (KeyError, TypeError) as error:
        raise InputError(f"its metadata lacks {error}", where=str(path), fix="dvc checkout models/export") from None


def _agree(claims: list[Claims], lines: list[Line]) -> None:
    """All files of a folder have to tell the same story."""
    for other in claims[1:]:
        for part in ("model", "tokenizer_digest", "template_hash", "lineage", "lock"):
            if getattr(other, part) != getattr(claims[0], part):
                what = part.replace("_", " ")
                lines.append(Line(DIFFERS, other.name, f"names another {what} than {claims[0].name}"))


# -- the checkout --------------------------------------------------------------


def _lineage(claims: Claims, data: bool) -> Iterator[Line]:
    if not claims.lineage:
        yield Line(UNCHECKED, "lineage", "the file names no inputs")
    for name, expected in claims.lineage.items():
        try:
            path = path_of(name)
        except InputError as error:
            yield Line(DIFFERS, name, error.what)
            continue
        if not path.is_file():
            yield Line(UNCHECKED, str(path), "not in this checkout")
        elif sha256_file(path) != expected:
            yield Line(DIFFERS, str(path), f"is {sha256_file(path)[:12]}; the file was made from {expected[:12]}")
        elif path.name != MANIFEST:
            yield Line(MATCHES, str(path), expected[:12])
        elif not (data or path.parts[0] == "models"):
            yield Line(MATCHES, str(path), f"{expected[:12]} (--data also hashes the files it lists)")
        else:
            yield _listed(path.parent, expected)


def _listed(folder: Path, expected: str) -> Line:
    """A matching manifest: are the files that it lists still what it says?"""
    files = read_json(folder / MANIFEST)["files"]
    if not any((folder / name).exists() for name in files):
        return Line(MATCHES, str(folder / MANIFEST), f"{expected[:12]}; the files that it lists are not here")
    try:
        verify_files(folder)
    except InputError as error:
        return Line(DIFFERS, error.where, error.what)
    return Line(MATCHES, str(folder / MANIFEST), f"{expected[:12]}, and its {len(files)} files")


def _code(claims: Claims) -> Iterator[Line]:
    """Tokenizer and template, as the code and the files here have them."""
    from athanor.tokenizer.chat import template_hash
    from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

    inside = claims.path / MODEL_FILE
    path = inside if inside.is_file() else TOKENIZER / MODEL_FILE
    if not path.is_file():
        yield Line(UNCHECKED, "tokenizer", f"no {path} here")
        yield Line(UNCHECKED, "chat template", "needs the tokenizer")
        return
    tokenizer = Tokenizer(path.read_bytes(), str(path))
    same = tokenizer.digest == claims.tokenizer_digest
    text = claims.tokenizer_digest[:12] if same else f"{path} is another tokenizer ({tokenizer.digest[:12]})"
    yield Line(_is(same), "tokenizer", text)
    same = template_hash(tokenizer) == claims.template_hash
    text = claims.template_hash[:12] if same else "this code renders chats in another layout, or with other control ids"
    yield Line(_is(same), "chat template", text)


def _remade(claims: Claims) -> Line:
    """The strongest check: write the file again from the model here and compare."""
    from athanor.export.gguf_check import check_gguf
    from athanor.export.huggingface import write_huggingface
    from athanor.export.source import load_source

    if not claims.lock:
        return Line(UNCHECKED, claims.name, f"cannot be made again: no hashes of dvc.lock in it; {OLD}")
    for folder in (MODEL, TOKENIZER):
        manifest = folder / MANIFEST
        name = next(key for key, value in MANIFESTS.items() if value == folder)
        if not manifest.is_file() or sha256_file(manifest) != claims.lineage.get(name):
            return Line(UNCHECKED, claims.name, f"cannot be made again: {folder} here is not what it was made from")
    if not claims.dtype:
        return Line(DIFFERS, claims.name, "of a type that the export stage does not write")
    try:
        source = load_source(MODEL, TOKENIZER, claims.model, claims.lineage, claims.lock)
        if claims.path.is_file():
            check_gguf(claims.path, source, claims.dtype)
            return Line(MATCHES, claims.name, f"every key and weight is that of {MODEL}")
        with tempfile.TemporaryDirectory(prefix="athanor-verify-") as scratch:
            write_huggingface(scratch, source, claims.dtype)
            for file in sorted(Path(scratch).iterdir()):
                theirs = claims.path / file.name
                if not theirs.is_file() or theirs.read_bytes() != file.read_bytes():
                    return Line(DIFFERS, f"{claims.name}/{file.name}", f"is not what this code makes of {MODEL}")
        return Line(MATCHES, claims.name, f"byte for byte what this code makes of {MODEL}")
    except KeyError as error:
        return Line(DIFFERS, claims.name, f"of a type that the export stage does not write ({error})")
    except AthanorError as error:
        return Line(DIFFERS, claims.name, f"is not what this code makes of {MODEL}: {error.what}")
