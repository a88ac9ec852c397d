"""Register an exported model in MLflow, and have an alias name it.

    athanor promote                    the export in models/export
    athanor promote lower-lr           the export of a DVC experiment
    athanor promote --alias candidate  under another name than champion

The model is logged with the run that made it, in the store that MLFLOW_TRACKING_URI names, else in mlflow.db. The same
export is registered once. Whoever has the store loads it by the alias, with its chat template:

    mlflow.transformers.load_model("models:/athanor@champion")([{"role": "user", "content": "What does HTTP 404 mean?"}])

mlflow.pyfunc.load_model and `mlflow models serve` take {"messages": [...]}, as OpenAI's clients send them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from athanor.base.artifacts import MANIFEST, manifest_digest, read_json, sha256_file
from athanor.base.errors import InputError
from athanor.catalog.discover import AvailableModel, discover, materialise
from athanor.catalog.files import FACTS_FILE
from athanor.catalog.places import EXPORT, HF_DIR, WEIGHTS_OF
from athanor.cli import compare
from athanor.runtime import ship
from athanor.runtime.machine import anchor
from athanor.runtime.overview import NOTE
from athanor.runtime.redact import redact
from athanor.runtime.store import EXPERIMENT
from athanor.runtime.store_check import trouble

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient
    from transformers import PreTrainedTokenizerBase

NAME = "athanor"  # in the registry
EXAMPLE = {"messages": [{"role": "user", "content": "What does HTTP 404 mean?"}]}
PACKAGES = ("mlflow", "torch", "transformers")  # what a loaded model needs
DIGEST_TAG = "athanor.export"
SHIP_SECONDS = 600.0  # a store that is down is not waited for


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("export", nargs="?", default=EXPORT, help=f"{EXPORT} or the name of an experiment")
    parser.add_argument("--alias", default="champion", help="what names this version from now on (default: champion)")


def run(args: argparse.Namespace) -> int:
    root = anchor()
    model = _model(root, args.export)
    folder = Path(model.path)
    digest = sha256_file(folder / FACTS_FILE)  # it has the hash of each file beside it
    if why := trouble(root):
        raise why
    ship.wait(root, SHIP_SECONDS)
    uri = ship.tracking_uri(root)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # weights take longer than rows of a journal
    import mlflow

    from athanor.runtime.tracking import Tracker

    client = Tracker(root, uri).client
    mlflow.set_tracking_uri(uri)
    versions = client.search_model_versions(f"name = '{NAME}'")
    same = [version.version for version in versions if version.tags.get(DIGEST_TAG) == digest]
    if same:
        version, done = same[0], "was registered before as"
    else:
        maker = _maker(client, root, model, args.export, redact(uri))
        print("writing the model into MLflow: half a minute, on a busy machine some minutes", flush=True)
        version, done = _register(client, folder, maker, digest), "is registered as"
    client.set_registered_model_alias(NAME, args.alias, version)
    print(f"{args.export} {done} version {version} of '{NAME}' in {redact(uri)}")
    print(f"its alias is '{args.alias}' now. To load it from any directory, in a shell\n")
    print(f"  export MLFLOW_TRACKING_URI={shlex.quote(redact(uri))}\n\nand in Python\n\n  import mlflow")
    print(f"  chat = mlflow.transformers.load_model('models:/{NAME}@{args.alias}')")
    return 0


def _model(root: Path, value: str) -> AvailableModel:
    """The exact weights of an export; InputError unless they come from the weights beside it and are whole."""
    export = root / EXPORT
    own = Path(value).resolve() == export
    try:
        found = discover(root, [] if own else [value])
    except InputError as error:
        raise InputError(error.what, where=value, fix=error.fix) from None
    wanted = (model for model in found if model.path == str(export / HF_DIR) or model.fetch and not own)
    model = next(wanted, None)
    if model is None:
        raise InputError("no export of this pipeline", where=value, fix=f"athanor repro; it makes {EXPORT}")
    if model.problem:
        raise InputError(model.problem, where=value)
    materialise(root, model)
    folder = Path(model.path)
    facts = read_json(folder / FACTS_FILE)
    weights = root / WEIGHTS_OF[EXPORT]
    if not model.fetch and (
        not (weights / MANIFEST).is_file() or facts["lineage"].get(weights.name) != manifest_digest(weights)
    ):
        raise InputError(f"it was not made from {WEIGHTS_OF[EXPORT]}", where=value, fix="athanor repro")
    for name, sha256 in facts["files"].items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            raise InputError("not the file that was exported", where=folder / name, fix=f"dvc checkout {EXPORT}")
    return model


def _maker(client: MlflowClient, root: Path, model: AvailableModel, value: str, store: str) -> Run:
    """The MLflow run of the export stage that made it; of an experiment equal to the workspace, either one's."""
    revisions = [model.fetch or compare.WORKSPACE, *([] if model.fetch or Path(value).exists() else [value])]
    made_by = [compare.load(root, revision).leaves["export"]["run"] for revision in revisions]
    experiment = client.get_experiment_by_name(EXPERIMENT)
    for run in made_by if experiment else ():
        if runs := client.search_runs([experiment.experiment_id], f"tags.`athanor.run` = '{run}'"):
            return runs[0]
    why, fix = "", "athanor ship --wait 600; for a store that is new, athanor ship --rebuild"
    if not (root / ".athanor" / "runs" / made_by[0]).is_dir():
        apply = f"dvc exp apply {model.id} && " if model.fetch else ""
        again = f"{apply}dvc repro -s -f export && athanor promote, and commit dvc.lock"
        why, fix = f": {compare.ELSEWHERE}", f"promote it there, or export it again here: {again}"
    raise InputError(f"run {made_by[0]}, which made it, is not there{why}", where=store, fix=fix)


def _register(client: MlflowClient, folder: Path, maker: Run, digest: str) -> str:
    """Log the model with the parent of the run that made it; the number of its version in the registry."""
    with contextlib.redirect_stderr(io.StringIO()):  # bars, and advice about models of the hub
        import mlflow.transformers
        from huggingface_hub import ModelCard
        from mlflow.models import Model
        from transformers import AutoModelForCausalLM, pipeline

        mlflow.set_experiment(experiment_id=maker.info.experiment_id)  # a model lies with its experiment
        parent = client.get_run(maker.data.tags["mlflow.parentRunId"])
        with tempfile.TemporaryDirectory() as scratch:
            card = client.download_artifacts(maker.info.run_id, "MODEL_CARD.md", scratch)
            text = Path(card).read_text(encoding="utf-8")
        network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        network.name_or_path = (
            f"models:/{NAME}"  # answers tell it: no path of this machine, nor a name that a hub may have
        )
        logged = Model.log(
            artifact_path=None,
            name=NAME,
            flavor=mlflow.transformers,
            run_id=parent.info.run_id,
            transformers_model=pipeline("text-generation", model=network, tokenizer=_of_rendered_text(folder)),
            task="llm/v1/chat",  # its signature is that of a chat, and its template is applied
            input_example=EXAMPLE,
            model_card=ModelCard(text),
            pip_requirements=[f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in PACKAGES],
            metadata={FACTS_FILE: read_json(folder / FACTS_FILE)},
        )
        tags = {DIGEST_TAG: digest, "athanor.run": maker.data.tags["athanor.run"]}
        version = mlflow.register_model(logged.model_uri, NAME, tags=tags).version
    client.update_model_version(NAME, version, parent.data.tags.get(NOTE, ""))
    return str(version)


def _of_rendered_text(folder: Path) -> PreTrainedTokenizerBase:
    """The export's tokenizer without the `<|bos|>` that it puts before every text: the chat template writes it.

    mlflow.pyfunc renders the template to a text and has the text encoded like any other, which would begin it twice.
    """
    from tokenizers.processors import Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = Sequence([])
    return tokenizer
