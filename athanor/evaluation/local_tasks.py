"""Two tasks for lm-evaluation-harness made of held-out documents: they need no network, and our own scorer knows them.

`athanor_next`: a part of a document and four continuations, one of which is
its own, the others cut the same way out of other documents.
`athanor_text`: whole documents, in bits per byte.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from athanor.artifacts import write_text
from athanor.errors import InputError

NEXT, TEXT = "athanor_next", "athanor_text"
DELIMITER = " "
CHOICES = 4
CONTEXT_WORDS, CHOICE_WORDS = 24, 6

# Columns are named, not templates: a document that holds braces is no template.
_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
{rest}metadata:
  version: 1
"""
_REST = {
    NEXT: """\
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
doc_to_target: label
target_delimiter: "{delimiter}"
metric_list:
- metric: acc
- metric: acc_norm
""",
    TEXT: """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
- metric: bits_per_byte
""",
}


@dataclass(frozen=True)
class Question:
    context: str
    choices: list[str]
    label: int


def questions(texts: Sequence[str], count: int) -> list[Question]:
    """At most `count` of them, from the documents long enough, in their order; the same for the same documents."""
    parts = []
    for text in texts:
        words = text.split(" ")
        if len(words) >= CONTEXT_WORDS + CHOICE_WORDS:
            given = DELIMITER.join(words[:CONTEXT_WORDS])
            answer = DELIMITER.join(words[CONTEXT_WORDS : CONTEXT_WORDS + CHOICE_WORDS])
            if given.strip() and answer.strip() and not given[-1].isspace():
                parts.append((given, answer))
    answers = list(dict.fromkeys(answer for _, answer in parts))
    if len(answers) < CHOICES:
        raise InputError(
            f"only {len(answers)} documents are long enough for questions", where="held-out text", fix="add text"
        )
    found = []
    for given, answer in parts[:count]:
        seed = hashlib.sha256(given.encode()).digest()
        start, label = int.from_bytes(seed[:8], "big"), seed[8] % CHOICES
        others = [other for other in answers if other != answer]
        # Neighbours from a place of their own; distinct because the list is.
        choices = [others[(start + number) % len(others)] for number in range(CHOICES - 1)]
        found.append(Question(given, [*choices[:label], answer, *choices[label:]], label))
    return found


def write_tasks(folder: Path, texts: Iterable[str], count: int) -> dict[str, Path]:
    """YAML and JSONL of both tasks, at most `count` items each; the folder is for `--include_path`. Data by task."""
    texts = [text for text in texts if text.strip()]
    rows = {
        NEXT: [asdict(question) for question in questions(texts, count)],
        TEXT: [{"text": text} for text in texts[:count]],
    }
    files = {}
    for task, items in rows.items():
        files[task] = (folder / f"{task}.jsonl").resolve()
        write_text(files[task], "".join(json.dumps(item) + "\n" for item in items))
        rest = _REST[task].replace("{delimiter}", DELIMITER)
        write_text(folder / f"{task}.yaml", _YAML.format(task=task, file=json.dumps(str(files[task])), rest=rest))
    return files
