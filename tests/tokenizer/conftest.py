"""A small real tokenizer, trained once on the standard library's own text."""

from __future__ import annotations

import argparse
import dataclasses
import json.decoder
import string
import textwrap
from pathlib import Path

import pytest

from athanor.tokenizer.tokenizer import Tokenizer
from athanor.tokenizer_training.params import TokenizerParams
from athanor.tokenizer_training.train import train
from tests.evaluation import tiny


@pytest.fixture(scope="session")
def tokenizer_params() -> TokenizerParams:
    return dataclasses.replace(tiny.PARAMS, vocab_size=1024, sample_bytes=200_000, check_bytes=20_000)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return [Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, json.decoder, string, textwrap)]


@pytest.fixture(scope="session")
def tokenizer(corpus: list[str], tokenizer_params: TokenizerParams) -> Tokenizer:
    return Tokenizer(train(corpus, tokenizer_params))
