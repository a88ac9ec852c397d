"""The sandbox: right functions pass, and nothing a function does can forge, hang, escape or exhaust."""

from __future__ import annotations

import socket
import textwrap
import threading
import time

import pytest

from athanor.errors import InputError
from athanor.evaluation import sandbox

TESTS = ("assert double(2) == 4", "assert double(-3) == -6", "assert double(0) == 0")
RIGHT = "def double(x):\n    return 2 * x"


def code(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


def test_a_right_function_passes_and_a_wrong_one_fails() -> None:
    assert sandbox.passes(RIGHT, TESTS)
    assert not sandbox.passes("def double(x):\n    return x + 2", TESTS)
    assert not sandbox.passes("def twice(x):\n    return 2 * x", TESTS)
    assert not sandbox.passes("def double(x) return", TESTS)
    assert not sandbox.passes("", TESTS)


def test_results_are_compared_with_their_type() -> None:
    tests = ("assert even(2) == True", "assert even(3) == False")
    assert sandbox.passes("def even(x):\n    return x % 2 == 0", tests)
    assert not sandbox.passes("def even(x):\n    return 1 - x % 2", tests)
    assert not sandbox.passes("def even(x):\n    return str(x % 2 == 0)", tests)


def test_true_is_not_one() -> None:
    """Nor inside of lists and tables; order in a table or a set is nothing."""
    assert not sandbox._same("[1, 0]", [True, False]) and sandbox._same("[True, False]", [True, False])
    assert not sandbox._same("{'a': (1,)}", {"a": (True,)}) and not sandbox._same("{1: 'a'}", {True: "a"})
    assert not sandbox._same("{1}", {True}) and not sandbox._same("[1.0]", [1])
    assert sandbox._same("{'b': [1], 'a': {2, 1}}", {"a": {1, 2}, "b": [1]}) and sandbox._same("-0.0", 0.0)


FORGERIES = {
    "exit with success": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "printed verdict": "print('passed')\nprint('[\"4\", \"-6\", \"0\"]')\ndef double(x): return None",
    "equal to everything": """
        class Any:
            def __eq__(self, other): return True
            def __repr__(self): return 'Any()'
        def double(x): return Any()""",
    "no more assertion errors": """
        import builtins
        builtins.AssertionError = type('Quiet', (Exception,), {})
        def double(x): return None""",
    "frames of the caller": """
        import sys
        def double(x):
            frame = sys._getframe(1)
            frame.f_globals['results'][:] = ['4', '4', '4']
            frame.f_globals['task']['calls'].clear()
            raise SystemExit""",
    "written to every handle": """
        import os
        for handle in range(32):
            try: os.write(handle, b'[true, true, true]')
            except OSError: pass
        def double(x): return None""",
}


@pytest.mark.parametrize("name", sorted(FORGERIES))
def test_a_pass_cannot_be_forged(name: str) -> None:
    assert not sandbox.passes(code(FORGERIES[name]), TESTS)


def test_an_endless_loop_is_killed() -> None:
    start = time.monotonic()
    assert not sandbox.passes("def double(x):\n    while True: pass", TESTS)
    assert time.monotonic() - start < sandbox.WALL_SECONDS + 5


def test_a_sleeper_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "WALL_SECONDS", 1.0)
    start = time.monotonic()
    assert not sandbox.passes("import time\ndef double(x):\n    time.sleep(60)\n    return 2 * x", TESTS)
    assert time.monotonic() - start < 10


def test_a_memory_bomb_fails_without_using_the_memory() -> None:
    bomb = "def double(x):\n    data = bytearray(8 * 2 ** 30)\n    return 2 * x"
    assert not sandbox.passes(bomb, TESTS)
    modest = "def double(x):\n    data = bytearray(2 ** 20)\n    return 2 * x"
    assert sandbox.passes(modest, TESTS)


@pytest.mark.parametrize(
    "action",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "import ctypes; ctypes.CDLL(None)",
        "open('left_behind', 'w').write('x')",
    ],
)
def test_processes_libraries_and_writing_are_refused(action: str) -> None:
    assert not sandbox.passes(f"def double(x):\n    {action}\n    return 2 * x", TESTS)


def test_other_files_survive(tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("still here")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    for action in ("os.remove(path)", "os.truncate(path, 0)", "open(path, 'w')", "os.rename(path, path + '2')"):
        assert not sandbox.passes(f"import os\npath = {str(victim)!r}\n{action}\n{RIGHT}", TESTS)
    assert victim.read_text() == "still here"


def test_the_network_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        reached = []

        def listen() -> None:
            try:
                reached.append(server.accept())
            except TimeoutError:
                pass

        thread = threading.Thread(target=listen)
        thread.start()
        call = f"    import socket\n    socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert not sandbox.passes(f"def double(x):\n{call}\n    return 2 * x", TESTS)
        thread.join()
    assert not reached


def test_without_namespaces_the_fallback_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "network_off", lambda: ())
    assert sandbox.passes(RIGHT, TESTS)
    assert not sandbox.passes(f"import socket\nsocket.socket()\n{RIGHT}", TESTS)


def test_the_environment_is_empty() -> None:
    body = "def names():\n    import os\n    return sorted(set(os.environ) - {'LC_CTYPE'})"
    assert sandbox.passes(body, ("assert names() == []",))


def test_only_literal_asserts_are_taken() -> None:
    wrong = ("double(2) == 4", "assert double(2)", "assert double(2) == double(1)", "assert 1 < double(2) < 5", "(")
    for test in wrong:
        with pytest.raises(InputError):
            sandbox.parse_test(test)
    with pytest.raises(InputError):
        sandbox.passes(RIGHT, ())


def test_code_is_found_in_a_fence_or_as_it_stands() -> None:
    assert sandbox.extract_code(f"Sure:\n```python\n{RIGHT}\n```\nDone.") == RIGHT + "\n"
    assert sandbox.extract_code(f"```\n{RIGHT}") == RIGHT
    assert sandbox.extract_code(RIGHT) == RIGHT


def test_many_tasks_keep_their_order() -> None:
    tasks = [(RIGHT, TESTS), ("def double(x): return x", TESTS)] * 4
    assert sandbox.passes_many(tasks) == [True, False] * 4
