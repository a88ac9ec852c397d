"""Which conversations' gradients point most towards an answer: an experiment.

The gradient is that of an answer's summed loss with respect to the output matrix [V, D] alone; of tied embeddings, to
their part as the output. It is the sum of (p - onehot) x h over the supervised targets, so no backward pass is needed. The
product of two gradients says how far a step on one text lowers the loss of the other (TracIn: Pruthi et al. 2020,
arXiv:2002.08484). A random projection of either side makes a sketch of A x B numbers of a gradient (LoGra: Choe et al.
2024, arXiv:2405.13954). So few that their covariance can be inverted: it takes out what all conversations have in common
(TRAK: Park et al. 2023, arXiv:2303.14186). A conversation's sketch is divided by its length, or those that were never
learned would be at the top of every list (RelatIF: Barshan et al. 2020, arXiv:2003.11630); docs/data.md has figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from athanor.base.artifacts import MANIFEST, digest, manifest_digest, read_json, write_manifest
from athanor.base.errors import InputError
from athanor.base.work import Facts, Tick, ignore
from athanor.data.order import permutation
from athanor.data.rows import PackedRows
from athanor.decoding.folded import FusedDecoder
from athanor.decoding.generate import generate
from athanor.decoding.prompting import end_ids
from athanor.model.device import prepare
from athanor.model.loss import Targets
from athanor.model.transformer import Transformer
from athanor.model.validation import sequence_sums
from athanor.model.weights import load_model
from athanor.origins.documents import MODEL, SFT, TOKENIZER, Conversations
from athanor.origins.index import FOLDER, cached, open_index
from athanor.runtime.machine import machine
from athanor.text.conversations import Message
from athanor.tokenizer.chat import check_made_with, prompt_ids
from athanor.tokenizer.tokenizer import Tokenizer

Entry = tuple[np.ndarray, np.ndarray]  # ids, and which of them are supervised
KIND, VERSION = "influence", 1
A, B = 32, 64
CHUNK = 256  # conversations between two signs of progress
BATCH_TOKENS = 1024
DAMPING = 1.0  # of the mean square of a sketch's numbers


def question_and_answer(tokenizer: Tokenizer, question: str, answer: str) -> Entry:
    """As training would read them."""
    prompt, said = prompt_ids(tokenizer, (Message("user", question),)), [*tokenizer.encode(answer), tokenizer.stop]
    return np.array([*prompt, *said]), np.repeat((0, 1), (len(prompt), len(said)))


def greedy_answer(model: Transformer, tokenizer: Tokenizer, question: str) -> str:
    prompt, most = prompt_ids(tokenizer, (Message("user", question),)), model.config.context_tokens
    said = generate(FusedDecoder(model), [prompt], max_new_tokens=most, stop_ids=end_ids(tokenizer))
    return tokenizer.decode(said[0].ids)


def sketches(model: Transformer, entries: Sequence[Entry], threads: int = 1) -> np.ndarray:
    """Of each entry the gradient of its supervised targets' summed loss, projected: fp32 [entries, A * B]."""
    head_VD = model.head_weight
    left_VA, right_DB = (_signs(*shape).to(head_VD.device) for shape in zip(head_VD.shape, (A, B), strict=True))

    def measure(model: Transformer, batch: Targets) -> Tensor:
        h_ND = model.hidden(batch.ids_BT).flatten(0, 1)[batch.where_N]
        error_NA = F.linear(h_ND, head_VD).softmax(-1) @ left_VA - left_VA[batch.next_N]
        return (error_NA[:, :, None] * (h_ND @ right_DB)[:, None]).flatten(1)

    context = model.config.context_tokens
    ids, masks = zip(*entries, strict=True)
    return sequence_sums(model, ids, masks, measure, A * B, context, BATCH_TOKENS, "fp32", threads, None)[0].astype(
        "f4"
    )


@lru_cache(maxsize=2)
def _signs(rows: int, columns: int) -> Tensor:
    # Of a hash of our own: sketches on disk are compared with those of a later version of torch.
    signs = permutation(rows * columns, KIND, columns) % 2 * 2 - 1
    return torch.from_numpy(signs.reshape(rows, columns)).float() / columns**0.5


class Influence:
    """The distinct conversations of data/sft, by what their gradients in models/sft have to do with an answer's.

    `copies`: of each, the numbers of its entries.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.threads = root, machine().threads
        self.tokenizer = Tokenizer.load(root / TOKENIZER)
        self.model, facts = load_model(root / MODEL, prepare(machine().device, 1))  # as the stage eval
        check_made_with(facts, self.tokenizer, where=str(MODEL), fix="dvc repro")
        self._parents = {str(folder): manifest_digest(root / folder) for folder in (SFT, MODEL)}
        if read_json(root / MODEL / MANIFEST)["parents"].get("sft") != self._parents[str(SFT)]:
            raise InputError(f"was trained on another {SFT} than the one here", where=str(MODEL), fix="dvc repro sft")
        self._data, self._rows = Conversations(root, self.tokenizer), PackedRows(root / SFT)
        index = open_index(root, self._data)
        copies = [index.copies(number).tolist() for number in range(len(index.starts) - 1)]
        self.copies = [entries for entries in copies if not self._rows.is_text(entries[0])]

    def scores(self, question: str, answer: str, advance: Tick = ignore) -> np.ndarray:
        """Of each conversation, above 0 where training on it lowers the answer's loss: fp32, in the order of `copies`.

        Makes the sketches of the conversations if they are missing; `advance` hears of those that are done.
        """
        (query,) = sketches(self.model, [question_and_answer(self.tokenizer, question, answer)])
        folder = self.root / FOLDER / f"{KIND}-{digest([self._parents, VERSION, A, B])[:16]}"
        cached(folder, lambda temporary: self._write(temporary, advance))
        covariance = np.load(folder / "covariance.npy").astype(np.float64)
        covariance += DAMPING * covariance.diagonal().mean() * np.eye(A * B)
        return np.load(folder / "sketches.npy", mmap_mode="r") @ np.linalg.solve(covariance, query).astype("f4")

    def _write(self, folder: Path, advance: Tick) -> None:
        count, covariance = len(self.copies), np.zeros((A * B, A * B), np.float32)
        found = np.lib.format.open_memmap(folder / "sketches.npy", "w+", np.float32, (count, A * B))
        for start in range(0, count, CHUNK):
            entries = [self._rows.conversation(numbers[0]) for numbers in self.copies[start : start + CHUNK]]
            part = sketches(self.model, entries, self.threads)
            covariance += part.T @ part
            found[start : start + CHUNK] = part / np.maximum(np.linalg.norm(part, axis=1, keepdims=True), 1e-9)
            advance(len(entries))
        found.flush()
        np.save(folder / "covariance.npy", covariance / count)
        write_manifest(folder, kind=KIND, version=VERSION, counts={"conversations": count}, parents=self._parents)

    def top(self, scores: np.ndarray, most: int) -> list[Facts]:
        """The conversations with the highest scores; theirs as shares of the highest."""
        best = np.argsort(-scores, kind="stable")[:most].tolist()
        facts, largest = self._data.describe([self.copies[number][0] for number in best]), abs(scores[best[0]]) or 1.0
        return [
            {
                "score": float(scores[number] / largest),
                "entries": (entries := self.copies[number]),
                "times": len(self._data.rows_of(entries)),
                "source": facts[entries[0]]["source"],
                "question": facts[entries[0]]["about"],
                "answer": self._data.turns(entries[0])[0][1],
            }
            for number in best
        ]
