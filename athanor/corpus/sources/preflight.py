"""Every source opened before the first is fetched, so that a slip in the ninth is told now and not after hours.

A data set is opened and its first rows are read as they will be, a server is
asked for the size of its files, globs are matched, and what all of it will
take on the disk is compared with the room there is. All problems are one error.
"""

from __future__ import annotations

from collections.abc import Callable

from athanor.corpus.instruct import messages
from athanor.corpus.sources.huggingface import UNREACHABLE
from athanor.errors import InputError, Interrupted
from athanor.params.download import DocumentSource, DownloadParams
from athanor.params.instruct import InstructParams, MessagesSource


def check(
    download: DownloadParams,
    instruct: InstructParams,
    look: Callable[[DocumentSource], float],
    free_bytes: int,
    *,
    tick: Callable[[int], None] = lambda sources: None,
    stop: Callable[[], bool] = lambda: False,
) -> float:
    """Open every source; returns the bytes that they will take on the disk. InputError with all that is wrong.

    `look` opens a source of documents and returns its bytes.
    """
    checks: list[tuple[str, Callable[[], float]]] = [
        (f"download.sources[{number}] ({source.names[0]})", lambda source=source: look(source))  # type: ignore[misc]
        for number, source in enumerate(download.sources)
    ] + [
        (f"instruct.sources[{number}] ({chats.name})", lambda chats=chats: messages.look(chats))  # type: ignore[misc]
        for number, chats in enumerate(instruct.sources)
        if isinstance(chats, MessagesSource)
    ]
    needed, problems = 0.0, []
    for where, opened in checks:
        if stop():
            raise Interrupted("stopped while the sources were being opened; nothing was fetched")
        try:
            needed += opened()
        except InputError as error:
            if error.what.startswith(UNREACHABLE):
                raise  # of the others too
            problems.append((where, error))
        tick(1)
    if needed > free_bytes:
        what = f"the sources will take about {needed / 1e9:,.1f} GB on the disk, which has room for {free_bytes / 1e9:,.1f} GB"
        problems.append(("", InputError(what, where="download.sources", fix="free some space, or lower their max_bytes")))
    if len(problems) == 1:
        where, error = problems[0]
        raise InputError(error.what, where=": ".join(part for part in (where, error.where) if part), fix=error.fix)
    if problems:
        told = "; ".join(f"{where}: {error}" if where else str(error) for where, error in problems)
        raise InputError(f"{len(problems)} things are wrong with the sources; nothing was fetched: {told}")
    return needed
