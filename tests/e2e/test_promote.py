"""`athanor promote` with a real store: what is registered answers, is registered once, and only if it fits the weights."""

from __future__ import annotations

import json
import os
import shlex
import sys

from tests.e2e.test_micro import tracking

QUESTION = "What does HTTP 404 mean?"
ASK = f"""
import json, mlflow
messages = [{{"role": "user", "content": {QUESTION!r}}}]
first = mlflow.transformers.load_model("models:/athanor@champion")(messages)[0]["generated_text"][-1]["content"]
second = mlflow.pyfunc.load_model("models:/athanor@champion").predict({{"messages": messages}})
print(json.dumps([first, second[0]["choices"][0]["message"]["content"]]))
tokenizer = mlflow.transformers.load_model("models:/athanor@champion").tokenizer
text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print(tokenizer(text)["input_ids"].count(tokenizer.bos_token_id))
"""


def promote(micro, *words, check=True):
    micro.run(sys.executable, "-m", "athanor", "ship", "--wait", "300")  # a busy machine ships late
    return micro.run(sys.executable, "-m", "athanor", "promote", *words, check=check)


def test_what_another_checkout_made_says_how_to_make_it_here(micro):
    """Seen: an experiment of a colleague's, pulled and applied; the advice to ship again did not help."""
    leaf = micro.path / "metrics/runs/export.json"
    kept = leaf.read_text()
    leaf.write_text(json.dumps(json.loads(kept) | {"run": "export-1-1"}))
    done = promote(micro, check=False)
    leaf.write_text(kept)
    assert (
        done.returncode == 1 and "run export-1-1, which made it, is not there: made in another checkout" in done.stderr
    )
    assert (
        "here: dvc repro -s -f export && athanor promote, and commit dvc.lock" in done.stderr
        and "ship" not in done.stderr
    )


def test_the_champion_answers_as_the_chat_and_is_registered_once(micro):
    said = promote(micro).stdout
    assert (
        "registered as version 1" in said
        and f"MLFLOW_TRACKING_URI={shlex.quote(f'sqlite:///{micro.path}/mlflow.db')}\n" in said
    )
    assert "registered before as version 1" in promote(micro, "models/export", "--alias", "again").stdout
    client, runs = tracking(micro)
    version = client.get_model_version_by_alias("athanor", "champion")
    assert sorted(version.aliases) == ["again", "champion"]
    parent = client.get_run(version.run_id)
    assert parent.data.tags["athanor.key"] and parent.info.status == "FINISHED"
    last = max(run.info.end_time for run in runs if run.data.tags.get("mlflow.parentRunId") == version.run_id)
    assert parent.info.end_time == last  # the run did not end anew
    said = micro.run(sys.executable, "-c", ASK, MLFLOW_TRACKING_URI=f"sqlite:///{micro.path}/mlflow.db").stdout
    chat = micro.run("sh", "-c", f"echo '{QUESTION}' | {sys.executable} -m athanor chat").stdout
    *_, answers, begins = said.splitlines()
    assert [text.strip() for text in json.loads(answers)] == [chat.strip()] * 2
    assert begins == "1"  # with two, a model may answer otherwise, and this one does by chance not


def test_only_what_was_made_from_the_present_weights_and_is_whole(micro):
    for name, change, words in (
        ("models/sft/manifest.json", b"{}", "made from other weights than those in models/sft"),
        ("models/export/hf/generation_config.json", b"{}", "not the file that was exported"),
    ):
        path = micro.path / name
        kept = path.with_name("kept")
        os.rename(path, kept)
        path.write_bytes(change)
        done = promote(micro, check=False)
        os.replace(kept, path)
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    done = promote(micro, "lower-lt", check=False)
    assert done.returncode == 1 and "lower-lt: no model, experiment or path" in done.stderr


def test_an_experiment_is_promoted_with_the_run_that_made_it(micro):
    micro.dvc("exp", "run", "-n", "candidate", "-S", "sft.lr=0.0003")
    micro.run("git", "checkout", "-q", "--force", "main")
    micro.dvc("checkout", "--force", "-q")
    assert "candidate is registered as version" in promote(micro, "candidate").stdout
    client, _ = tracking(micro)
    version = client.get_model_version_by_alias("athanor", "champion")
    assert client.get_run(version.run_id).info.run_name == "candidate"
    promote(micro)  # and back, without a new version
    assert client.get_model_version_by_alias("athanor", "champion").version == 1


def test_an_experiment_equal_to_the_workspace_has_its_own_run(micro):
    """Seen: a colleague had exported it again and committed that; its maker was refused."""
    micro.dvc("exp", "run", "-n", "mine", "-S", "sft.lr=0.0004")
    leaf = micro.path / "metrics/runs/export.json"
    text = json.dumps(json.loads(leaf.read_text()) | {"run": "export-1-1"})
    leaf.unlink()  # it may be a link to DVC's cache
    leaf.write_text(text)
    assert "mine is registered as version" in promote(micro, "mine").stdout
    micro.run("git", "checkout", "-q", "--force", "main")
    micro.dvc("checkout", "--force", "-q")
