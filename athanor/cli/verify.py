"""Check an exported model against its own metadata and this checkout: does it come from where it says?

    python -m athanor verify [PATH] [--data] [--strict]

PATH: models/export, a Hugging Face directory or a GGUF file, also one that was
copied elsewhere. Exit status 0: nothing differs. 1: something does. 2 with
--strict: nothing differs, but not everything could be checked.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from athanor.base.artifacts import MANIFEST, read_json, sha256_file, verify_files
from athanor.base.errors import AthanorError, InputError
from athanor.export.source import MANIFESTS, MODEL, TOKENIZER, path_of

METADATA = "athanor.json"  # of a Hugging Face directory
MATCHES, DIFFERS, UNCHECKED = "matches", "differs", "unchecked"
FIX = "dvc checkout models/export"


@dataclass(frozen=True)
class Check:
    status: str
    subject: str
    detail: str


@dataclass(frozen=True)
class Claims:
    """What the metadata of a file claims. `name` stands for it in the report; `dtype` may be a GGUF type."""

    name: str
    path: Path
    model: str
    dtype: str
    tokenizer_digest: str
    template_hash: str
    lineage: Mapping[str, str]
    lock: Mapping[str, str]


def verify(path: str | Path, *, data: bool = False) -> list[Check]:
    """Check an export folder, a Hugging Face directory or a GGUF file against the checkout in the working directory.

    data: also hash again every file that a matching manifest lists, not only the models'.
    InputError for what no export stage wrote.
    """
    path = Path(path)
    checks: list[Check] = []
    if path.is_file():
        claims = [_gguf(path, checks)]
    elif (path / METADATA).is_file():
        claims = [_huggingface(path, checks)]
    elif (path / MANIFEST).is_file() and _mapping(path / MANIFEST).get("kind") == "export":
        claims = _folder(path, checks)
    else:
        fix = "name models/export, a Hugging Face directory in it, or a GGUF file"
        raise InputError("neither a file nor a folder made by the export stage", where=str(path), fix=fix)
    for other in claims[1:]:  # all files of a folder have to tell the same story
        for field in ("model", "tokenizer_digest", "template_hash", "lineage", "lock"):
            if getattr(other, field) != getattr(claims[0], field):
                detail = f"names another {field.replace('_', ' ')} than {claims[0].name}"
                checks.append(Check(DIFFERS, other.name, detail))
    return [*checks, *_lineage_checks(claims[0], data), *_code_checks(claims[0]), *map(_check_rewritten, claims)]


def _comparison(same: bool, subject: str, if_same: str, if_not: str) -> Check:
    return Check(MATCHES, subject, if_same) if same else Check(DIFFERS, subject, if_not)


def _mapping(path: Path, *required: str) -> dict[str, Any]:
    """A JSON file that holds a mapping, with mappings under the names given."""
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(name), dict) for name in required):
        raise InputError("not what the export stage writes", where=str(path), fix=FIX)
    return content


# -- what a file says, and whether it was changed since -----------------------


def _file_checks(folder: Path, listed: Mapping[str, str], listing: str, prefix: str = "") -> Iterator[Check]:
    """A line for each file of a folder, or that its listing (name -> SHA-256) names."""
    present = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()} - {listing}
    for name in sorted(present | set(listed)):
        if name not in listed:
            yield Check(DIFFERS, prefix + name, f"{listing} knows no such file: added or renamed")
        elif name not in present:
            yield Check(DIFFERS, prefix + name, f"missing: {listing} lists it")
        else:
            same = sha256_file(folder / name) == listed[name]
            yield _comparison(
                same, prefix + name, f"the hash in {listing}", f"not the hash in {listing}: changed since"
            )


def _folder(path: Path, checks: list[Check]) -> list[Claims]:
    manifest = _mapping(path / MANIFEST, "files", "parents")
    checks += _file_checks(path, {name: facts["sha256"] for name, facts in manifest["files"].items()}, MANIFEST)
    claims = [_huggingface(path / "hf", checks)] if (path / "hf" / METADATA).is_file() else []
    claims += [_gguf(file, checks) for file in sorted(path.glob("*.gguf"))]
    if not claims:
        raise InputError("no file with a lineage is left in it", where=str(path), fix=FIX)
    parents = {name: value for name, value in claims[0].lineage.items() if name in MANIFESTS}
    if_same, if_not = "the same parents as the files name", f"other parents than {claims[0].name} names"
    checks.append(_comparison(manifest["parents"] == parents, MANIFEST, if_same, if_not))
    return claims


def _huggingface(path: Path, checks: list[Check]) -> Claims:
    facts = _mapping(path / METADATA, "files")
    checks += _file_checks(path, facts["files"], METADATA, f"{path.name}/")
    return _claims(path.name, path, facts, facts.get("dtype"))


def _gguf(path: Path, checks: list[Check]) -> Claims:
    from gguf import GGUFReader

    from athanor.export.gguf_check import contents
    from athanor.export.gguf_writer import FILE_TYPES, K_TYPES

    try:
        keys = contents(GGUFReader(path))
    except Exception as error:  # the reader lets whatever a torn file leads to through
        raise InputError(f"not a whole GGUF file ({error})", where=str(path), fix=FIX) from None
    if "athanor.file" not in keys:
        raise InputError("a GGUF file without a lineage", where=str(path), fix="name one that the export stage wrote")
    if_same, if_not = "under its own name", f"renamed: it was written as {keys['athanor.file']}"
    checks.append(_comparison(keys["athanor.file"] == path.name, path.name, if_same, if_not))
    types = {int(number): name for name, (_, number) in FILE_TYPES.items()}
    types |= {int(number): name for name, number in K_TYPES.items()}
    facts = {"name": keys.get("general.name", "")}
    facts |= {key: keys.get(f"athanor.{key}") for key in ("tokenizer_digest", "template_hash")}
    for section in ("lineage", "lock"):
        prefix = f"athanor.{section}."
        facts[section] = {key.removeprefix(prefix): value for key, value in keys.items() if key.startswith(prefix)}
    return _claims(path.name, path, facts, types.get(keys.get("general.file_type")))


def _claims(name: str, path: Path, facts: Mapping[str, Any], dtype: str | None) -> Claims:
    try:
        model, lineage, lock = facts["name"], dict(facts["lineage"]), dict(facts["lock"])
        tokenizer, template = facts["tokenizer_digest"], facts["template_hash"]
        if not (isinstance(tokenizer, str) and isinstance(template, str)):
            raise KeyError("tokenizer_digest and template_hash")
        return Claims(name, path, model, dtype or "", tokenizer, template, lineage, lock)
    except (KeyError, TypeError) as error:
        raise InputError(f"its metadata lacks {error}", where=str(path), fix=FIX) from None


# -- the checkout --------------------------------------------------------------


def _lineage_checks(claims: Claims, data: bool) -> Iterator[Check]:
    if not claims.lineage:
        yield Check(UNCHECKED, "lineage", "the file names no inputs")
    for name, expected in claims.lineage.items():
        try:
            path = path_of(name)
        except InputError as error:
            yield Check(DIFFERS, name, error.what)
            continue
        if not path.is_file():
            yield Check(UNCHECKED, str(path), "not in this checkout")
        elif (actual := sha256_file(path)) != expected:
            yield Check(DIFFERS, str(path), f"is {actual[:12]}; the file was made from {expected[:12]}")
        elif path.name != MANIFEST:
            yield Check(MATCHES, str(path), expected[:12])
        elif not (data or path.parts[0] == "models"):
            yield Check(MATCHES, str(path), f"{expected[:12]} (--data also hashes the files it lists)")
        else:
            yield _check_listed_files(path.parent, expected)


def _check_listed_files(folder: Path, expected: str) -> Check:
    """Check the files that a matching manifest lists."""
    files = read_json(folder / MANIFEST)["files"]
    if not any((folder / name).exists() for name in files):
        return Check(MATCHES, str(folder / MANIFEST), f"{expected[:12]}; the files that it lists are not here")
    try:
        verify_files(folder)
    except InputError as error:
        return Check(DIFFERS, error.where, error.what)
    return Check(MATCHES, str(folder / MANIFEST), f"{expected[:12]}, and its {len(files)} files")


def _code_checks(claims: Claims) -> Iterator[Check]:
    """Compare the tokenizer and the chat template with those of this code and these files."""
    from athanor.tokenizer.chat import template_hash
    from athanor.tokenizer.tokenizer import MODEL_FILE, Tokenizer

    inside = claims.path / MODEL_FILE
    path = inside if inside.is_file() else TOKENIZER / MODEL_FILE
    if not path.is_file():
        yield Check(UNCHECKED, "tokenizer", f"no {path} here")
        yield Check(UNCHECKED, "chat template", "needs the tokenizer")
        return
    tokenizer = Tokenizer(path.read_bytes(), str(path))
    if_not = f"{path} is another tokenizer ({tokenizer.digest[:12]})"
    yield _comparison(tokenizer.digest == claims.tokenizer_digest, "tokenizer", claims.tokenizer_digest[:12], if_not)
    if_not = "this code renders chats in another layout, or with other control ids"
    yield _comparison(
        template_hash(tokenizer) == claims.template_hash, "chat template", claims.template_hash[:12], if_not
    )


def _check_rewritten(claims: Claims) -> Check:
    """The strongest check: write the file again from the model here and compare."""
    from athanor.export.gguf_check import check_gguf
    from athanor.export.huggingface import write_huggingface
    from athanor.export.source import load_source

    for folder in (MODEL, TOKENIZER):
        manifest = folder / MANIFEST
        name = next(key for key, value in MANIFESTS.items() if value == folder)
        if not manifest.is_file() or sha256_file(manifest) != claims.lineage.get(name):
            return Check(UNCHECKED, claims.name, f"cannot be made again: {folder} here is not what it was made from")
    if not claims.dtype:
        return Check(DIFFERS, claims.name, "of a type that the export stage does not write")
    try:
        source = load_source(MODEL, TOKENIZER, claims.model, claims.lineage, claims.lock)
        if claims.path.is_file():
            check_gguf(claims.path, source, claims.dtype)
            return Check(MATCHES, claims.name, f"every key and weight is that of {MODEL}")
        with tempfile.TemporaryDirectory(prefix="athanor-verify-") as scratch:
            write_huggingface(scratch, source, claims.dtype)
            for file in sorted(Path(scratch).iterdir()):
                exported = claims.path / file.name
                if not exported.is_file() or exported.read_bytes() != file.read_bytes():
                    return Check(DIFFERS, f"{claims.name}/{file.name}", f"is not what this code makes of {MODEL}")
        return Check(MATCHES, claims.name, f"byte for byte what this code makes of {MODEL}")
    except KeyError as error:
        return Check(DIFFERS, claims.name, f"of a type that the export stage does not write ({error})")
    except AthanorError as error:
        return Check(DIFFERS, claims.name, f"is not what this code makes of {MODEL}: {error.what}")


MARKS = {MATCHES: "matches  ", DIFFERS: "DIFFERS  ", UNCHECKED: "unchecked"}


def report(checks: Sequence[Check]) -> str:
    width = max(len(check.subject) for check in checks)
    rows = [f"{MARKS[check.status]}  {check.subject:<{width}}  {check.detail}" for check in checks]
    counts = Counter(check.status for check in checks)
    totals = f"{counts[MATCHES]} checks match, {counts[DIFFERS]} differ, {counts[UNCHECKED]} could not be made here"
    return "\n".join([*rows, f"{totals}."])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", nargs="?", default="models/export", help="folder, Hugging Face directory or GGUF file")
    parser.add_argument("--data", action="store_true", help="hash again every file that the data's manifests list")
    parser.add_argument("--strict", action="store_true", help="status 2 if anything could not be checked")


def run(args: argparse.Namespace) -> int:
    checks = verify(args.path, data=args.data)
    print(report(checks))
    statuses = {check.status for check in checks}
    if DIFFERS in statuses:
        return 1
    return 2 if args.strict and UNCHECKED in statuses else 0
