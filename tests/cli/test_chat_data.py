"""From a corrected answer to a training row, or to a question of the battery; read by the pipeline's own readers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from athanor.base import strict
from athanor.base.errors import InputError
from athanor.catalog.keeping import ROWS
from athanor.chat_data.params import SftSource
from athanor.cli import cli
from athanor.evaluation.item_gate import check_items
from athanor.runtime import schema
from athanor.serving.feedback import FILE, Feedback
from athanor.serving.retraining import EXPORTED, Retraining
from athanor.sources import messages
from athanor.sources.battery_params import BatteryParams
from athanor.sources.exercises.build import battery_items
from athanor.sources.exercises.written import read_written
from athanor.sources.instruct_params import MessagesSource
from athanor.text.conversations import Message, check_messages
from athanor.words.decontaminate import ItemIndex
from tests.evaluation import tiny
from tests.serving.judging import again, asked, judge

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def feedback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return Feedback(FILE)


@pytest.fixture
def athanor(feedback, monkeypatch, capsys):
    """Run `athanor chat ...` on the checkout's feedback; returns the status and what was printed."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["athanor", "chat", *map(str, words)])
        status = cli.main()
        told = capsys.readouterr()
        return status, told.out + told.err

    return run


def corrected(feedback, question: str, answer: str, correction: str, **how) -> int:
    """A chat, or a later turn, in which an answer was corrected. Returns its number."""
    return judge(feedback, asked(question, answer, **how), "down", correction)


def test_accepted_corrections_become_rows_that_the_real_source_reads(feedback, athanor):
    first = asked("What is 3 + 4?", "8")
    plain = judge(feedback, first, "down", "7")
    deeper = corrected(feedback, "And 4 + 4?", "9", "8", after=again(first, "Seven."))
    brief = corrected(feedback, "Capital of Italy?", "Paris", "Rome.\n\u2028Nothing else.", system="Be brief.")
    corrected(feedback, "Capital of Spain?", "Paris", "Madrid")  # waits
    refused = corrected(feedback, "Capital of Malta?", "Paris", "Rome")
    twin = corrected(feedback, "What is 3 + 4?", "9", "7")
    assert athanor("accept", plain, deeper, brief, twin, deeper)[1].startswith(f"accepted 4: {plain}, {deeper}, ")
    assert athanor("reject", refused)[0] == 0
    status, told = athanor("export", "corpus/corrections.jsonl")
    assert status == 0 and "corpus/corrections.jsonl: 3 rows\n" in told
    assert f"left out: correction {twin}: correction {plain} says the same\n" in told
    assert "DVC watches" not in told

    # What it says to put into params.yaml is what the schemas take, and the source reads the rows.
    text = told.partition("under instruct.sources:\n")[2]
    source, _, sizes = text.partition("under sft_data.sources:\n")
    (values,) = YAML(typ="safe").load(source)
    made = strict.build(MessagesSource, values, "instruct.sources.0")
    sizes = YAML(typ="safe").load(sizes)
    assert strict.build(SftSource, sizes[made.name], "sft_data") == SftSource(repeats=3, follow_ups=2)
    left_out = []
    every = list(messages.conversations(made, 0.5, leave_out=left_out.append))
    assert len(every) == 8 + 8 + 8 and not left_out and {row.split for row in every} == {"train"}
    rows = every[::8]  # each in its own words, and in seven others
    for row in rows:
        check_messages(row.messages, "row")
    assert [[(m.role, m.content) for m in row.messages] for row in rows] == [
        [("system", "Be brief."), ("user", "Capital of Italy?"), ("assistant", "Rome.\n\u2028Nothing else.")],
        [("user", "What is 3 + 4?"), ("assistant", "7")],
        [("user", "What is 3 + 4?"), ("assistant", "Seven."), ("user", "And 4 + 4?"), ("assistant", "8")],
    ]


def test_the_same_corrections_give_the_same_bytes_and_a_file_of_other_rows_is_not_lost(feedback, athanor):
    for number in range(5):
        corrected(feedback, f"Say {number}.", "no", str(number))
    athanor("accept", "--all")
    athanor("export", "corpus/a.jsonl")
    athanor("export", "corpus/b.jsonl")
    assert Path("corpus/a.jsonl").read_bytes() == Path("corpus/b.jsonl").read_bytes()
    assert athanor("export", "corpus/a.jsonl")[0] == 0  # its own it replaces
    own = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    for text in ('{"question": "x", "answer": "y"}\n', own):
        Path("corpus/mine.jsonl").write_text(text)
        status, told = athanor("export", "corpus/mine.jsonl")
        assert status == 1 and "would be lost" in told and Path("corpus/mine.jsonl").read_text() == text
    status, told = athanor("export", "corpus/rows.txt")
    assert status == 1 and "end in .jsonl" in told
    assert "DVC watches corpus/" in athanor("export", "rows.jsonl")[1]


@pytest.mark.parametrize(("answer", "why"), [("", "a message is empty"), ("Go away!", "has a thumb down")])
def test_a_row_that_would_train_on_a_wrong_or_empty_answer_is_left_out_and_told(feedback, athanor, answer, why):
    first = asked("Hello?", answer)
    judge(feedback, first, "down", "Hello!")
    deeper = corrected(feedback, "Well?", "no", "yes", after=first)
    athanor("accept", "--all")
    status, told = athanor("export", "corpus/rows.jsonl")
    assert status == 0 and "1 row\n" in told and f"left out: correction {deeper}: " in told and why in told


def test_of_two_answers_to_one_question_the_later_one_is_taught(feedback, athanor):
    earlier, later = (corrected(feedback, "Who wrote it?", "I did", answer) for answer in ("Ada", "Emmy"))
    athanor("accept", "--all")
    status, told = athanor("export", "corpus/rows.jsonl")
    assert (
        status == 0
        and f"left out: correction {earlier}: correction {later} answers the same question otherwise" in told
    )
    assert [json.loads(line)["correction"] for line in Path("corpus/rows.jsonl").open()] == [later]


def test_write_puts_the_printed_lines_into_params(feedback, athanor):
    number = corrected(feedback, "What is 3 + 4?", "8", "7")
    athanor("accept", "--all")
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    before = Path("params.yaml").read_text(encoding="utf-8")
    printed = athanor("export", "corpus/rows.jsonl")[1]
    assert Path("params.yaml").read_text(encoding="utf-8") == before
    for told in ("written to params.yaml", "reads the file already"):  # the second time nothing is left to write
        status, text = athanor("export", "corpus/rows.jsonl", "--write")
        assert status == 0 and told in text and "no result is kept" in text
    after = Path("params.yaml").read_text(encoding="utf-8").splitlines()
    added = [line.strip() for line in after if line not in before.splitlines()]
    assert after == [line for line in after if line in before.splitlines() or line.strip() in added]
    assert [line for line in before.splitlines() if line not in after] == []
    sources = schema.check_file("params.yaml")["instruct"].sources
    assert sources[-1].files == "corpus/rows.jsonl" and all(line.split(":")[0].strip("- ") in printed for line in added)
    status, told = athanor("export", "corpus/other.jsonl", "--write")
    assert status == 1 and "there is a source 'corrections' of another file" in told
    athanor("reject", number)  # the last one: what trains on it goes, too
    status, told = athanor("export", "corpus/rows.jsonl", "--write")
    assert status == 0 and "no correction is left to train on" in told and not Path("corpus/rows.jsonl").exists()
    assert strict.read_yaml("params.yaml") == YAML(typ="safe").load(before)


def test_what_training_would_leave_out_is_no_row(feedback, athanor):
    """One of 1,100 characters was counted as learned; sft-data had dropped it as too_long."""
    tiny.write_tiny_tokenizer(Path("models/tokenizer"))
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    corrected(feedback, "Say all.", "no", "rule " * 300)
    corrected(feedback, "And two?", "no", "two " * 60, after=asked("Say one.", "one " * 50))
    corrected(feedback, "Who are you?", "no", "I am ChatGPT.")
    corrected(feedback, "Who wins?", "no", "I cannot say.")  # what a person declines is meant
    athanor("accept", "--all")
    told = athanor("export", "corpus/rows.jsonl")[1]
    assert "1 row\n" in told and "correction 3: an answer claims" in told and told.count("sft_data.context_tokens") == 2


def test_rows_of_others_stay_whoever_exports(feedback, athanor):
    """An export replaced the nine rows of a colleague by its one."""
    shutil.copy(ROOT / "presets/default.yaml", "params.yaml")
    out, other = Path(ROWS), Feedback("other.jsonl")
    for one, pairs in ((feedback, "One?yes Two?yes Six?yes"), (other, "Ten?yes One?yes Two?never")):
        for pair in pairs.split():
            corrected(one, pair[:4], "no", pair[4:])
        athanor("accept", "--all", "--feedback", one.path)
        told = athanor("export", out, "--write", "--feedback", one.path)[1]
    assert f"{out}: 3 rows; kept, of others: 2 of 3 rows" in told  # theirs on "Two?" gave way
    assert [Retraining(Path(), one.path).state()["taught"] for one in (feedback, other)] == [2, 3]
    assert out.read_text().count("yes") == 4 and "params.yaml reads the file already" in told
    other.path.with_suffix(EXPORTED).unlink()  # as after an export by a version without
    for number in (1, 2, 3):
        other.settle(number, "rejected")
    assert "0 rows; kept, of others: 2 of 2 rows" in athanor("export", out, "--write", "--feedback", other.path)[1]


def test_nothing_is_written_without_an_accepted_correction(feedback, athanor):
    corrected(feedback, "Say one.", "no", "one")
    status, told = athanor("export", "corpus/rows.jsonl")
    assert status == 1 and "no correction is accepted" in told and not Path("corpus").exists()


def test_the_list_shows_what_waits_and_nothing_that_steers_a_terminal(feedback, athanor):
    one = corrected(feedback, "Say \x1b[2Jone.", "n\u202eo " * 80, "one")
    two = corrected(feedback, "Say two.", "no", "two")
    athanor("accept", two)
    status, told = athanor("list")
    assert status == 0 and told.startswith(f"{one}  candidate, small-1") and "1 correction that waits" in told
    assert "\x1b" not in told and "\u202e" not in told and max(map(len, told.split("\n"))) < 120
    assert f"{two}  accepted" in athanor("list", "--all")[1]


def test_an_unknown_id_settles_nothing(feedback, athanor):
    one = corrected(feedback, "Say one.", "no", "one")
    status, told = athanor("accept", one, 999)
    assert status == 1 and "no correction 999" in told and feedback.correction(one)["status"] == "candidate"
    with pytest.raises(SystemExit):
        athanor("accept", one, "--all")
    with pytest.raises(SystemExit):
        athanor("accept")


def test_without_feedback_the_next_step_is_told(tmp_path, athanor):
    status, told = athanor("list", "--feedback", tmp_path / "none.jsonl")
    assert status == 1 and "athanor serve" in told and not (tmp_path / "none.jsonl").exists()


def test_without_a_subcommand_it_is_the_terminal_chat() -> None:
    command = [sys.executable, "-m", "athanor", "chat", "--model", "nothing-here"]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 1 and "nothing-here" in done.stderr


def test_a_correction_becomes_an_item_that_the_battery_reads_and_training_loses(feedback, athanor):
    question = "Which of the two seas is the saltier one, the Baltic or the Dead Sea?"
    answer = asked(question, "The Baltic")
    number = judge(feedback, answer, "down", "The Dead Sea")
    for other in ("Both", "The Dead Sea "):
        judge(feedback, again(answer, other), "down")
    status, told = athanor("item", number, "--category", "seas", "--difficulty", "easy")
    assert status == 0 and "battery/chat.jsonl: 1 item;" in told and "battery.written: battery/chat.jsonl" in told
    params = BatteryParams(1, 0.1, 0.25, "battery/chat.jsonl", {"addition": 2})
    (item,) = [item for item in battery_items(params) if item.category == "seas"]
    assert (item.kind, item.difficulty, item.origin) == ("exact", "easy", "written")
    assert (item.prompt, item.accepted) == ((Message("user", question),), ("The Dead Sea",))
    assert item.rejected == ("The Baltic", "Both")  # a variant that is right is no wrong answer
    check_items([item])
    found = ItemIndex(battery_items(params)).conversation_matches(
        [
            (Message("user", question), Message("assistant", "The Dead Sea")),
            (Message("system", "Be kind."), Message("user", question.upper()), Message("assistant", "Guess!")),
            (Message("user", "Which sea is warm?"), Message("assistant", "The Red Sea")),
        ]
    )
    assert found == [item.id, item.id, None]


def test_items_are_added_to_a_file_and_none_twice(feedback, athanor):
    Path("battery").mkdir()
    line = {
        "category": "own",
        "kind": "exact",
        "prompt": "Say yes.",
        "accepted": ["yes"],
        "rejected": ["no", "maybe"],
        "difficulty": "easy",
    }
    Path("battery/own.jsonl").write_text(json.dumps(line))  # without a newline at its end
    Path("params.yaml").write_text("battery: {written: battery/own.jsonl}\n")
    number = corrected(feedback, "What is 3 + 4?", "It is 8.", "It is 7.", system="Be brief.")
    status, told = athanor("item", number, "--kind", "numeric", "--reject", "9", "--out", "battery/own.jsonl")
    assert status == 0 and "2 items" in told and "params.yaml names the file" in told
    old, new = read_written("battery/own.jsonl", 0)
    assert old.answer == "yes" and (new.answer, new.accepted) == ("7", ("7", "It is 7."))
    assert new.prompt == (Message("system", "Be brief."), Message("user", "What is 3 + 4?"))
    before = Path("battery/own.jsonl").read_bytes()
    status, told = athanor("item", number, "--kind", "numeric", "--reject", "9", "--out", "battery/own.jsonl")
    assert status == 1 and "asks the same already" in told and Path("battery/own.jsonl").read_bytes() == before
    assert "That names one file, now battery/own.jsonl" in athanor("item", number, "--reject", "9")[1]


def test_when_all_are_left_out_the_reason_is_told(feedback, athanor):
    first = asked("What is 3 + 4?", "8")
    judge(feedback, first, "down", "7")
    second = corrected(feedback, "And 4 + 4?", "9", "8", after=first)
    athanor("accept", second)
    status, told = athanor("export", "corpus/corrections.jsonl")
    assert status == 1 and "left out" in told and "thumb down" in told


def test_a_chat_of_several_turns_is_a_prompt_but_not_for_a_choice(feedback, athanor):
    first = asked("My number is four. What is yours?", "I have none.")
    number = corrected(feedback, "And mine?", "five", "four", after=first)
    status, told = athanor("item", number, "--kind", "likelihood")
    assert status == 1 and "3 messages" in told
    assert athanor("item", number, "--reject", "none")[0] == 0
    (item,) = read_written("battery/chat.jsonl", 0)
    assert [message.role for message in item.prompt] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("answer", "correction", "words", "told"),
    [
        ("no", "yes", [], "needs 2 wrong answers"),
        ("It is 7.", "7", ["--kind", "numeric", "--reject", "5"], "takes a rejected"),
        ("no", "none at all", ["--kind", "numeric", "--reject", "5"], "is not a number"),
        ("no", "yes", ["--kind", "format", "--reject", "maybe"], "--check goes with"),
        ("no", "yes", ["--kind", "format", "--reject", "maybe", "--check", "rhymes"], "unknown check"),
        ("no", "yes", ["--kind", "format", "--reject", "maybe", "--check", "one_line"], ""),
    ],
)
def test_an_item_that_cannot_prove_its_scorer_is_not_added(feedback, athanor, answer, correction, words, told):
    number = corrected(feedback, "Is water wet?", answer, correction)
    status, said = athanor("item", number, *words)
    assert status == 1 and told in said and not Path("battery").exists()


def test_a_form_is_an_item_where_a_wrong_answer_fails_its_check_alone(feedback, athanor):
    number = corrected(feedback, "Is water wet? Yes or no.", "Yes, it is very wet.", "Yes")
    assert athanor("item", number, "--kind", "format", "--check", "yes_no Yes", "--reject", "No")[0] == 0
    (item,) = read_written("battery/chat.jsonl", 0)
    assert item.checks == ("yes_no Yes",)
    check_items([item])


def test_feedback_on_no_question_is_refused(feedback):
    answer = asked("What is 3 + 4?", "8", system="Be brief.")
    for prompt in ([], answer["prompt"][:1], [*answer["prompt"], {"role": "assistant", "content": "8"}]):
        with pytest.raises(InputError, match="prompt: ends with no message of the user"):
            judge(feedback, {**answer, "prompt": prompt}, "down", "7")
    assert not feedback.path.exists()
