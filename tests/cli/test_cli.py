"""The list of commands."""

from __future__ import annotations

import subprocess
import sys

from athanor.cli.cli import COMMANDS, FIRST, OF_DEVELOPERS, usage


def listed(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.startswith("  ")]


def test_the_first_view_has_fifteen_commands_at_most_and_none_of_developers() -> None:
    first = listed(usage(whole=False))
    assert first == [name for names in FIRST.values() for name in names] and len(first) <= 15
    assert not set(first) & set(OF_DEVELOPERS)


def test_all_lists_every_command_once_and_the_first_view_names_the_others() -> None:
    assert sorted(listed(usage(whole=True))) == sorted(COMMANDS)
    assert len(usage(whole=True).splitlines()) <= 47 and max(map(len, usage(whole=True).splitlines())) <= 100
    last = usage(whole=False).splitlines()[-1]
    assert all(name in last for name in set(COMMANDS) - set(listed(usage(whole=False))) - set(OF_DEVELOPERS))


def test_every_command_answers_to_help() -> None:
    """`athanor repro --help` once asked DVC for its help and printed the scores of the last run below it."""
    for name in sorted(COMMANDS):
        done = subprocess.run([sys.executable, "-m", "athanor", name, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "usage" in done.stdout and "Battery" not in done.stdout, (
            name,
            done.stdout,
            done.stderr,
        )


def test_a_slip_in_a_command_is_answered_in_one_line() -> None:
    done = subprocess.run([sys.executable, "-m", "athanor", "sumary"], capture_output=True, text=True)
    assert done.returncode == 2 and "summary" in done.stderr and len(done.stderr.splitlines()) == 1
