"""Secrets do not reach what is written down: journal, tags, params, ship.json, logs, terminal."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from ruamel.yaml import YAML

from athanor.base.errors import ParamsError
from athanor.base.strict import build
from athanor.runtime import presets
from athanor.runtime.redact import Stream, hide, redact, redact_params
from athanor.runtime.schema import check_together, schemas
from tests.runtime.shippers import until
from tests.runtime.view import ROOT, environment

SHAPES = [  # parts, so that no scanner takes this file for a leak
    "hf_" + "aB3" * 11,
    "sk-" + "proj-" + "x9Y_" * 8,
    "ghp_" + "A1b2" * 9,
    "github_pat_" + "A1b2_" * 9,
    "AKIA" + "IOSFODNN7EXAMPLE",
    "xoxb-" + "123456789012-abc",
    "npm_" + "aB3" * 12,
    "dckr_pat_" + "aB-3_" * 5,
    "sk_live_" + "aB3" * 8,
    "ya29." + "a0Af_B-" * 8,
    "hooks.slack.com/" + "services/T0000/B0000/" + "aB3" * 8,
    "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
]
TOKENS = (
    "a3f82afc307a80e33ea84e91",
    "k3wrqe7ab2mzyt5dpl90xwcv",
    "Zk3-9aQx_7Rt2Lw8Vb5Nc",
    "JBSWY3DPEHPK3PXPJBSWY3DP",
    "0c2f" * 16,
)
PLACES = (
    ("https://h.example/", "/x.jsonl"),
    ("h.example:80/d/", ""),
    ("127.0.0.1/", "?a=1"),
    ("http://h/x#", ""),
    ("s3://b/x#k=", " there"),
)
ID = "a2e6da57-3cd1-4235-b20e-95dcaefed6c8"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("http://user:pass@127.0.0.1:9/api", "http://***@127.0.0.1:9/api"),
        ("https://t0ken@host/x", "https://***@host/x"),
        ("postgresql+psycopg2://me:p@ss@db/mlflow failed", "postgresql+psycopg2://***@db/mlflow failed"),
        ("https://h/a?id=3&access_token=abc&page=2", "https://h/a?id=3&access_token=***&page=2"),
        ("https://b/?X-Amz-Signature=0f&X-Amz-Credential=A%2Fx", "https://b/?X-Amz-Signature=***&X-Amz-Credential=***"),
        ("https://h/blob?sv=1&sig=a%2Bb#top", "https://h/blob?sv=1&sig=***#top"),
        ("header Authorization: Bearer abcdef.ghi-123", "header Authorization: Bearer ***"),
        ("'Authorization': 'Basic dXNlcjpwYXNz'", "'Authorization': 'Basic ***'"),
        ('{"password": "hunter22", "n": 1}', '{"password": "***", "n": 1}'),
        ("host=db api_key=0123abcd user=me", "host=db api_key=*** user=me"),
        ("x-api-key: 0123abcd", "x-api-key: ***"),
        ("GET /?a=1 X-Api-Key=0123abcd", "GET /?a=1 X-Api-Key=***"),
        ("AccountKey=a+b/c1234==;Endpoint", "AccountKey=***;Endpoint"),
        ("Set-Cookie: session=0a1b; Path=/\nnext: line", "Set-Cookie: ***\nnext: line"),
        ("{'Cookie': 'a=b; session=0a1b'}", "{'Cookie': '***'}"),
        *[(f"got {shape} there", "got *** there") for shape in SHAPES],
        # In a path or a fragment, with and without a scheme; a commit's place tells it from a token.
        *[(f"{place}{token}{end}", f"{place}***{end}") for token in TOKENS for place, end in PLACES],
        (f"https://h.example/{'a1' * 20}/resolve/{'b2' * 20}/x", f"https://h.example/***/resolve/{'b2' * 20}/x"),
        (f"https://h.example/hooks/{ID}@{ID}/x", "https://h.example/hooks/***@***/x"),
        (
            "https://api.example/bot123456:AAH-dq3kd92kfQ9dk20fk2kf0wk_f/getMe",
            "https://api.example/bot123456:***/getMe",
        ),
        ("GET h.example/token/abcdefghijklmnopqr", "GET h.example/token/***"),
        # Passwords that no address may hold, and logins without a scheme.
        ("postgresql://me:pa/s?s#w@db/x failed", "postgresql://***@db/x failed"),
        ("mysql://me:two words more@db/x failed; ask you@h.example", "mysql://***@db/x failed; ask you@h.example"),
        ("http://me:one two@127.0.0.1:9, http://h:80/a@b", "http://***@127.0.0.1:9, http://h:80/a@b"),
        ("no store at me:secret@db.example/x", "no store at ***@db.example/x"),
        ("me:se/cret@mlflow:5000", "***@mlflow:5000"),
        ("store=me:s3cret99@db.example", "store=***@db.example"),
    ],
)
def test_secrets_are_masked_and_masking_again_changes_nothing(text, expected):
    assert redact(text) == expected == redact(expected)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/path@v2",
        "dvc://models/export@main",
        "sqlite:////home/me/mlflow.db",
        "https://host/a?page=2&tokenizer=bpe&max_tokens=5",
        "risk-adjusted scores of tokens: 123456789, bearer of news, the secret garden",
        "Cookie: a small biscuit; keyboard: 104 keys",
        "mail me@example.org about 3.2 bytes per token, or Contact:me@example.org, mailto:me@example.org",
        f"hf://datasets/o/n@{'a1' * 20}/**/*.parquet",
        f"https://huggingface.co/datasets/o/n-20231101.en/resolve/{'0f' * 20}/data/train-00000-of-00041-9f3a5b7c2d1e8f60.parquet",
        f"https://raw.githubusercontent.com/o/r/{'0f' * 20}/corpus/Text2TextGeneration4Everyone.jsonl",
        f"https://files.example/packages/5d/0e/{'a1' * 30}/torch-2.3.0-cp311-cp311-manylinux_2_17_x86_64.whl",
        f"http://127.0.0.1:5000/#/experiments/1/runs/{'a1' * 16}?workflowType=machine_learning",
        f"https://data.example/dataset/{ID}/resource/{ID}/download/laws.csv",
        "https://data.example/crawl/CC-MAIN-2023-50/segments/1700679099281.67/CC-MAIN-20231128083443-20231128113443-00000.warc.gz",
        "https://h.example/wiki/%E4%B8%AD%E6%96%87%E7%BB%B4%E5%9F%BA?oldid=1#section-3.2-Converting3DFaceToSVG",
        "https://h.example/models/c4ai-aya-101-13B-v2-q8_0-gguf/wav2vec2-large-960h-lv60-self",
        "git@host.example:o/r.git, image:2.1@sha256:aa, pkg:npm/foo@1.2/x, http://host:8080/a@b.example",
        f"https://archive.softwareheritage.org/api/1/content/sha1_git:{'a1' * 20}/raw/, s3://bucket/mlruns/1/{'a1' * 16}/artifacts",
        "https://ipfs.io/ipfs/QmYwAPJzv5CZsnA625s3Xf2nemtYgPpHdWEz79ojWnPbdG/readme.txt",
        f"https://raw.githack.com/u/r/{'0f' * 20}/a.txt, https://dl.example.org/authors/{ID}.txt",
        "/data/sk-learn/hf_cache/eyJ",
        "",
    ],
)
def test_other_text_is_left_alone(text):
    assert redact(text) == text


LONG = 32_000
COSTLY = ["a.", "-sk-", "a-b://", "a://b:", "?key", "password", "password ", "api-key", "Bearer ", "Cookie: ", "cookie=a", "a@",
          "-eyJaaaaaaaa", "eyJaaaaaaaa.", "-eyJaaaaaaaa.bbbbbbbb-", "-----BEGIN A", "-----BEGIN PRIVATE KEY-----", "xoxb-", "ya29.",
          "hooks.slack.com/services/", "Authorization: ", "&a=", "a:b", "a.b/", "a://b: ",
          "a:b c@", "me:pw@h/", "a.b/a1B2c3D4e5F6g7H8/", "h.de/%a1", " ", "://", "hf_"]  # fmt: skip


def test_time_grows_with_the_text_and_not_with_its_square():
    for part in COSTLY:
        text = (part * LONG)[:LONG]
        for form in (text, text + "@", "x" + text + "="):
            began = time.process_time()
            redact(form)
            assert time.process_time() - began < 1.0, part


def test_values_of_secret_variables_are_masked_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", "correct horse/battery")
    monkeypatch.setenv("DB_PASSWORD", "correct horse")  # one secret begins another
    monkeypatch.setenv("WAREHOUSE", "mysql://me:st%40ple-9876@db/x")
    monkeypatch.setenv("MIRRORS", "https://u:s3cretpass1@a/simple https://v:s3cretpass2@b/simple")
    monkeypatch.setenv("CONN", "postgresql://u:s3cretpass3@a/db?application_name=x@y")
    monkeypatch.setenv("LIBRARIES", "lib:/opt/homebrew/opt/openssl@3/lib")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "left-alone")
    monkeypatch.setenv("MAX_TOKENS", "1234567890")
    assert redact("a correct horse/battery, b correct horse!") == "a ***, b ***!"
    assert redact("x=correct%20horse%2Fbattery") == "x=***"
    assert redact("login failed with st@ple-9876 or st%40ple-9876") == "login failed with *** or ***"
    assert (
        redact("s3cretpass1 s3cretpass2 s3cretpass3 in /opt/homebrew/opt/openssl")
        == "*** *** *** in /opt/homebrew/opt/openssl"
    )
    assert redact("true left-alone 1234567890") == "true left-alone 1234567890"


def test_nested_values_keep_their_numbers():
    secret = "http://u:secret@h"
    value = {"a": [1, 2.5, secret, None], "b": {"c": True, "d": (secret,)}, "n": float("inf")}
    clean = redact(value)
    assert clean == {"a": [1, 2.5, "http://***@h", None], "b": {"c": True, "d": ["http://***@h"]}, "n": float("inf")}
    assert clean["b"]["c"] is True and redact(7) == 7


def test_a_stream_masks_a_secret_that_arrives_in_parts():
    out = io.StringIO()
    stream = Stream(out)
    for part in ("open http://user:sec", "ret@host/", "x\nnext http://a:b", "@c"):
        stream.write(part)
        stream.flush()
    assert out.getvalue() == "open http://***@host/x\n"
    stream.finish()
    assert out.getvalue() == "open http://***@host/x\nnext http://***@c"


STAGE = """
import os, sys
from athanor.sources.params import (DownloadParams)
from athanor.runtime.process import stage_main
from athanor.runtime.run import Run

def run(run: Run) -> None:
    run.params("download", DownloadParams)
    secret = os.environ["PLANTED_API_KEY"]
    run.log(1, loss=0.5)
    run.note(f"using {secret}")
    run.fact(source=f"https://me:{secret}@host/data", nested={"key": secret})
    run.metrics({"documents": 3})
    if sys.argv[1] == "fail":
        raise ValueError(f"401 for https://host/?token={secret} as Bearer {secret}")

if __name__ == "__main__":
    stage_main("toy", run)
"""


def test_planted_secrets_are_nowhere_on_disk_or_terminal(tmp_path):
    """In the environment, the address of the tracking store, a source's URL, facts, notes and an exception."""
    from athanor.runtime.ship import run_folders

    planted = {"PLANTED_API_KEY": "planted-environment-1", "uri": "planted-address-2", "params": "planted-params-3"}
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "__init__.py").touch()
    (tmp_path / "stages" / "toy.py").write_text(STAGE)
    graph = "stages:\n  toy:\n    cmd: python -m stages.toy\n    deps: [stages/toy.py]\n"
    (tmp_path / "dvc.yaml").write_text(graph + "    params: [download]\n    outs: [o]\n")
    yaml = YAML()
    params = yaml.load(presets.complete(ROOT / "presets" / "micro.yaml"))
    url = f"https://me:{planted['params']}@host/license?signature={planted['params']}"
    numbers = {name: 1 for name in ("min_chars", "min_documents", "min_bytes", "max_bytes")}
    params["download"]["sources"].append(
        {
            "type": "huggingface",
            "name": "web",
            "kind": "web",
            "license": "own",
            "dataset": "a/b",
            "config": f"see {url}",
            "split": "train",
            "revision": "0" * 40,
            "text_column": "text",
            "max_document_bytes": 1000,
            "skip_documents": 0,
            "max_documents": None,
            "json_lines": None,
            "text_template": None,
            "select": None,
            "max_malformed_fraction": 0.0,
            **numbers,
        }
    )
    params["mixture"]["sources"]["web"] = {"share": 1.0, "max_epochs": 1.0}
    yaml.dump(params, tmp_path / "params.yaml")
    base = {"PLANTED_API_KEY": planted["PLANTED_API_KEY"]}
    address = {"MLFLOW_TRACKING_URI": f"http://user:{planted['uri']}@127.0.0.1:9"}
    log = tmp_path / ".athanor" / "ship.log"
    told = []

    def call(*words, code=0, **env):
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, env=environment(**base, **env), capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        told.append(done.stdout + done.stderr)

    call("stages.toy", "ok", code=0, ATHANOR_TRACKING="off")
    call("stages.toy", "fail", code=1, **address)  # starts a shipper that finds no server
    until(lambda: "not reachable" in log.read_text())
    os.kill(int((tmp_path / ".athanor" / "ship.lock").read_text()), signal.SIGKILL)
    call("athanor", "ship", "--rebuild", code=1, **address)
    call("athanor", "ship", "--rebuild")  # into mlflow.db
    assert "not reachable" in log.read_text() and "http://***@127.0.0.1:9" in log.read_text()
    assert "using ***" in told[0] and "ValueError: 401 for https://host/?token=*** as Bearer ***" in told[1]
    assert "http://***@127.0.0.1:9: the tracking store failed" in told[2]
    metas = [json.loads((folder / "meta.json").read_text()) for folder in run_folders(tmp_path)]
    assert any(value == "see https://***@host/license?***" for value in metas[0]["params"].values())
    leaks = [
        (str(file.relative_to(tmp_path)), secret)
        for base in (".athanor", "mlartifacts", "metrics", "plots", "mlflow.db")
        for file in [tmp_path / base, *(tmp_path / base).rglob("*")]
        if file.is_file()
        for secret in planted.values()
        if secret.encode() in file.read_bytes()
    ]
    assert leaks == []
    assert [secret for secret in planted.values() for text in told if secret in text] == []
    assert (tmp_path / "mlflow.db").is_file()
    shutil.rmtree(tmp_path)


def test_the_query_of_an_address_in_parameters_is_a_secret_of_any_name():
    values = {"a.url": "https://h/x.jsonl?ticket=0a1b&n=2", "b": ["?"], "c": "what? https://h/x is plain", "d": 1}
    assert redact_params(values) == {**values, "a.url": "https://h/x.jsonl?***"}


def test_a_licence_with_a_login_is_refused_without_showing_it():
    values = presets.values(ROOT / "presets" / "micro.yaml")
    source = {"type": "files", "name": "notes", "globs": ["x.md"], "license": "see https://me:planted-1@host/x"}
    values["download"]["sources"].append(source)
    values["mixture"]["sources"]["notes"] = {"share": 0.0, "max_epochs": 1.0}
    with pytest.raises(ParamsError, match="license: holds a signature") as refused:
        check_together({name: build(kind, values[name], name) for name, kind in schemas().items()})
    assert "planted-1" not in str(refused.value)


def test_a_hidden_text_is_a_secret_whatever_its_variable_is_called():
    secret = "Zq9/not-a-known+shape=="
    assert redact(f"x {secret} y") == f"x {secret} y"
    hide(f" {secret}\n")
    assert redact(f"x {secret} y Zq9%2Fnot-a-known%2Bshape%3D%3D") == "x *** y ***"
