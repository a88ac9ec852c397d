"""Arrays from many files through few open ones."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from athanor.base.errors import InputError
from athanor.base.files import OpenFiles, joined


def open_below(folder: Path) -> int:
    links = Path("/proc/self/fd")
    return sum(
        os.readlink(links / name).startswith(str(folder)) for name in os.listdir(links) if (links / name).is_symlink()
    )


def part(files: OpenFiles, paths: list[Path], number: int) -> list[int]:
    return files.read(paths[number % 40], 2 * number % 1000, 10, "<u2").tolist()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{number}.bin" for number in range(40)]
    for number, path in enumerate(made):
        np.arange(number, number + 1000, dtype="<u2").tofile(path)
    return made


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files as Linux shows them")
def test_few_are_open_in_any_number_of_threads_and_none_afterwards(paths: list[Path], tmp_path: Path) -> None:
    files = OpenFiles(3)
    expected = [list(range(n % 40 + n % 500, n % 40 + n % 500 + 10)) for n in range(4000)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(partial(part, files, paths), range(4000))) == expected
    assert open_below(tmp_path) == 3
    child = os.fork()
    if not child:
        failed = True
        try:
            failed = [part(files, paths, number) for number in range(400)] != expected[:400]
        finally:
            os._exit(failed)
    assert [part(files, paths, number) for number in range(400)] == expected[:400]
    assert os.waitpid(child, 0)[1] == 0
    del files
    assert open_below(tmp_path) == 0


def test_the_end_of_a_file_and_parts_of_nothing(paths: list[Path]) -> None:
    files = OpenFiles()
    assert files.read(paths[1], 1998, 1, "<u2").tolist() == [1000] and not len(files.read(paths[1], 9999, 0, "<u4"))
    with pytest.raises(InputError, match="1.bin: the file is shorter"):
        files.read(paths[1], 1998, 2, "<u2")
    with pytest.raises(FileNotFoundError, match="none.bin"):
        files.read(paths[1].with_name("none.bin"), 0, 1, "<u2")
    assert joined([np.arange(3), np.zeros(0)], np.uint8).tolist() == [0, 1, 2] and joined([], np.int64).shape == (0,)
