"""Ways in which a run really fails, each a function of this file that ends as the real thing does.

    python -m tests.troubles.fail NAME

Nothing is imitated: the message is that of the library, the kernel or the program.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

HERE = Path(tempfile.mkdtemp()) if __name__ == "__main__" else Path()


def run(*command: str, **options: object) -> None:
    """A program whose words are this one's, too."""
    done = subprocess.run(command, stdout=sys.stderr, stderr=sys.stderr, **options)  # type: ignore[call-overload]
    sys.exit(done.returncode if done.returncode >= 0 else 128 - done.returncode)


# -- signals and memory --


def killed_by_the_kernel() -> None:
    """In a control group of 64 MiB, of either version; "unavailable" where this user may not make one."""
    old, new = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group = (old if old.is_dir() else new) / "athanor-test"
    try:
        group.mkdir()
        limit = next(group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).is_file())
        limit.write_text(str(64 * 2**20))
    except (OSError, StopIteration):
        sys.exit("unavailable")
    code = f"import os; open('{group}/cgroup.procs', 'w').write(str(os.getpid())); b'x' * 2**28"
    done = subprocess.run([sys.executable, "-c", code])
    print(f"failed to run: python -m stages.clean, exited with {done.returncode}")
    group.rmdir()


def crashes() -> None:
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGSEGV)


def aborts() -> None:
    faulthandler.enable()
    os.abort()


def instruction_missing() -> None:
    faulthandler.enable()
    os.kill(os.getpid(), signal.SIGILL)


def file_cut_short_under_a_map() -> None:
    faulthandler.enable()
    path = HERE / "f"
    path.write_bytes(bytes(2 * mmap.PAGESIZE))
    with open(path, "r+b") as file:
        view = mmap.mmap(file.fileno(), 0)
        os.truncate(path, 0)
        print(view[mmap.PAGESIZE])


def address_space_used_up() -> None:
    import torch

    held = sum(int(word) for word in Path("/proc/self/statm").read_text().split()[:1]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, held + 2**26))
    torch.empty(2**30)


def file_too_large() -> None:
    run("sh", "-c", f"ulimit -f 1; head -c 1000000 /dev/zero > {HERE}/big; echo exit status $?")


def too_many_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    files = [open("/dev/null") for _ in range(100)]
    print(len(files))


# -- disks --


def disk_full() -> None:
    with open("/dev/full", "w") as file:
        file.write("x")


def disk_does_not_read() -> None:
    with open("/proc/self/mem", "rb", buffering=0) as file:
        file.read(1)


def read_only() -> None:
    script = f"mkdir {HERE}/ro && mount -t tmpfs -o ro none {HERE}/ro && touch {HERE}/ro/x"
    run("unshare", "--mount", "--map-root-user", "sh", "-c", script)


def shared_memory_full() -> None:
    code = "import torch; torch.zeros(2**22).share_memory_()"
    script = f"mount -t tmpfs -o size=1m none /dev/shm && exec {sys.executable} -X faulthandler -c '{code}'"
    run("unshare", "--mount", "--map-root-user", "sh", "-c", script)


def database_locked() -> None:
    one, other = (sqlite3.connect(HERE / "db", timeout=0.1) for _ in range(2))
    one.execute("BEGIN EXCLUSIVE")
    other.execute("CREATE TABLE t (x)")


def database_damaged() -> None:
    (HERE / "db").write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 32)
    sqlite3.connect(HERE / "db").execute("SELECT * FROM sqlite_master").fetchall()


# -- processes that train together --


def store(port: int, master: bool, **options: object) -> object:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, 2, master, timedelta(seconds=1), **options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        store(taken.getsockname()[1], True, wait_for_workers=False)


def nobody_at_the_meeting_place() -> None:
    store(free_port(), False)


def pair(second: str) -> None:
    """Two processes of gloo; the second one does something else after they met."""
    import torch
    import torch.distributed as dist

    if "RANK" not in os.environ:
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "tests.troubles.fail", second]
        other = subprocess.Popen(command, env={**env, "RANK": "1"}, stderr=subprocess.DEVNULL)
        done = subprocess.run(command, env={**env, "RANK": "0"})
        other.kill()
        sys.exit(done.returncode)
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    dist.all_reduce(torch.ones(1))
    if os.environ["RANK"] == "1":
        if second == "peer_dies":
            os._exit(1)
        threading.Event().wait(20)
    dist.all_reduce(torch.ones(1))


def peer_dies() -> None:
    pair("peer_dies")


def peer_never_comes() -> None:
    pair("peer_never_comes")


def server_port_taken() -> None:
    import asyncio

    async def serve() -> None:
        first = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        await asyncio.start_server(lambda *_: None, "127.0.0.1", first.sockets[0].getsockname()[1])

    asyncio.run(serve())


# -- packages --


def torch_of_another_chip() -> None:
    import torch

    torch.zeros(1, device="cuda")


def corrupt_wheel() -> None:
    wheel = HERE / "demo-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 and then the line broke")
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--disable-pip-version-check",
        "--target",
        str(HERE),
        str(wheel),
    )


def no_such_wheel() -> None:
    run(
        sys.executable,
        "-m",
        "pip",
        "install",
        "--isolated",
        "--no-index",
        "--disable-pip-version-check",
        "athanor-nothing",
    )


def weights_are_a_pointer() -> None:
    from safetensors import safe_open

    path = HERE / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    safe_open(path, "np")


def tokenizer_is_a_pointer() -> None:
    import sentencepiece

    path = HERE / "tokenizer.model"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    sentencepiece.SentencePieceProcessor(model_file=str(path))


def hub_switched_off() -> None:
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_HOME"] = "1", str(HERE)
    from huggingface_hub import hf_hub_download

    hf_hub_download("nobody/nothing", "config.json")


def name_unknown() -> None:
    import urllib.request

    urllib.request.urlopen("http://nothing.invalid/", timeout=5)


def image_of_another_processor() -> None:
    program = HERE / "program"
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xf7\x00" + bytes(44))
    program.chmod(0o755)
    os.execv(program, [str(program)])


def architecture_of_tomorrow() -> None:
    (HERE / "config.json").write_text('{"model_type": "llama99"}')
    from transformers import AutoConfig

    AutoConfig.from_pretrained(HERE)


def old_tracking_database() -> None:
    with sqlite3.connect(HERE / "mlflow.db") as database:
        database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
        database.execute("INSERT INTO alembic_version VALUES ('of tomorrow')")
        for table in ("experiments", "runs", "metrics", "params", "tags", "experiment_tags", "latest_metrics"):
            database.execute(f"CREATE TABLE {table} (x)")
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"sqlite:///{HERE}/mlflow.db", str(HERE))


# -- DVC and Git --


def project() -> None:
    os.chdir(HERE)
    for command in ("git init -q", f"{sys.executable} -m dvc init -q"):
        subprocess.run(command.split(), check=True)


def dvc(*words: str) -> None:
    run(sys.executable, "-m", "dvc", *words)


def stage_killed() -> None:
    project()
    Path("dvc.yaml").write_text("stages:\n  s:\n    cmd: kill -9 $$\n")
    dvc("repro")


def input_missing() -> None:
    project()
    Path("dvc.yaml").write_text("stages:\n  s:\n    cmd: 'true'\n    deps: [data/raw]\n")
    dvc("repro")


def output_not_written() -> None:
    project()
    Path("dvc.yaml").write_text("stages:\n  s:\n    cmd: 'true'\n    outs: [o]\n")
    dvc("repro")


def output_in_git() -> None:
    project()
    Path("o").write_text("x")
    subprocess.run(["git", "add", "o"], check=True)
    Path("dvc.yaml").write_text("stages:\n  s:\n    cmd: echo > o\n    outs: [o]\n")
    dvc("repro")


def path_busy() -> None:
    import json

    project()
    Path("dvc.yaml").write_text("stages:\n  s:\n    cmd: echo > o\n    outs: [o]\n")
    holder = {"pid": os.getpid(), "cmd": "dvc repro"}
    Path(".dvc/tmp").mkdir(exist_ok=True)
    Path(".dvc/tmp/rwlock").write_text(json.dumps({"write": {str(HERE / "o"): holder}, "read": {}}))
    dvc("repro")


def outside_of_a_checkout() -> None:
    os.chdir(HERE)
    dvc("status")


def git_was_killed() -> None:
    project()
    Path(".git/index.lock").touch()
    run("git", "add", ".dvc")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
