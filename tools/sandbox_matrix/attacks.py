"""Programs that try to leave the sandbox, to forge a pass or to end the evaluation.

Each defines `f()`. An attack is of a class, and has a goal: `secret` (f returns the secret that lies in a file and
in the environment), `expected` (f returns the value that only the test knows), `done` (f returns "done" once it did
what must not be possible), `effect` (something outside changes) or `crash` (the scorer must not end). What PRELUDE
defines is there for all of them; `W` is the world that world.py builds.
"""

from __future__ import annotations

PRELUDE = """
def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)

def syscall(number, *values):
    import ctypes, os
    if os.uname().machine != "x86_64":
        number = ARM[number]
    words = [v if isinstance(v, (bytes, ctypes.Array)) or v is None else ctypes.c_long(v) for v in values]
    return libc().syscall(ctypes.c_long(number), *words)

ARM = {101: 117, 272: 97, 165: 40, 250: 219, 248: 217, 321: 280, 298: 241, 323: 282, 319: 279, 425: 425, 310: 270,
       161: 51, 308: 268, 135: 92, 57: 220, 58: 220, 29: 194, 434: 434, 424: 424, 41: 198}

def every(act, limit):
    count = 0
    try:
        while count < limit:
            act(count)
            count += 1
    except BaseException:
        pass
    return "done" if count >= limit else count

def search(data):
    import re
    data = data if isinstance(data, str) else data.decode("latin-1")
    found = re.search("NONCE-[0-9a-f]{32}", data)
    return found.group() if found else None

def handles(data):
    import posix
    for handle in range(1, 64):
        try: posix.write(handle, data)
        except OSError: pass
"""

LOOK_SQLITE = "import sqlite3\n    return sqlite3.connect(W['database']).execute('select secret from t').fetchone()[0]"
FORK_EXEC = (
    "import _posixsubprocess, os\n    r, w = os.pipe()\n    _posixsubprocess.fork_exec([b'/bin/sh', b'-c', {command}], "
    "[b'/bin/sh'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, {session}, -1, None, None, None, -1, None"
    "{tail})"
)
CLONE = "import posix, time\n    pid = {fork}\n    if pid == 0:\n        {child}\n        time.sleep(40)\n        posix._exit(0)"


def fork_exec(command: str, session: bool = False) -> str:
    """`_posixsubprocess.fork_exec` with the arguments of Python 3.11 and, where those are too few, of later ones."""
    calls = [FORK_EXEC.format(command=command, session=session, tail=tail) for tail in ("", ", True")]
    first, second = (call.replace("\n    ", "\n        ") for call in calls)
    return f"try:\n        {first}\n    except TypeError:\n        {second}"


_READ = {
    "environment": "import os\n    return os.environ['SECRET']",
    "getenv of libc": "import ctypes\n    g = libc().getenv\n    g.restype = ctypes.c_char_p\n    return g(b'SECRET').decode()",
    "environment of the parent": "import os, re\n    return re.search('secret-[0-9a-f]+', "
    "open(f'/proc/{os.getppid()}/environ').read()).group()",
    "/proc/self/environ": "import re\n    return re.search('secret-[0-9a-f]+', open('/proc/self/environ').read()).group()",
    "open": "return open(W['secret']).read()",
    "os.open": "import os\n    return os.read(os.open(W['secret'], 0), 99).decode()",
    "posix.open": "import posix\n    return posix.read(posix.open(W['secret'], 0), 99).decode()",
    "io.FileIO": "import _io\n    return _io.FileIO(W['secret']).read().decode()",
    "linecache": "import linecache\n    return linecache.getline(W['secret'], 1)",
    "codecs.open": "import codecs\n    return codecs.open(W['secret']).read()",
    "source loader": "from importlib.machinery import SourceFileLoader as L\n    return L('x', W['secret']).get_data(W['secret']).decode()",
    "import of a file": "import sys\n    sys.path.insert(0, W['folder'])\n    import module_with_secret as m\n    return m.SECRET",
    "fopen of libc": "import ctypes\n    c, b = libc(), ctypes.create_string_buffer(99)\n    c.fopen.restype = ctypes.c_void_p\n"
    "    c.fread(b, 1, 99, ctypes.c_void_p(c.fopen(W['secret'].encode(), b'r')))\n    return b.value.decode()",
    "openat by number": "import os\n    return os.read(syscall(257, -100, W['secret'].encode(), 0), 99).decode()",
    "sqlite3": LOOK_SQLITE,
    "symlink": "import os\n    os.symlink(W['secret'], 'link')\n    return open('link').read()",
    "hard link": "import os\n    os.link(W['secret'], 'hard')\n    return open('hard').read()",
    "/proc/self/root": "return open('/proc/self/root' + W['secret']).read()",
    "working folder of the parent": "import os\n    return open(f'/proc/{os.getppid()}/cwd/secret').read()",
    "open handles": "import os\n    for n in range(64):\n        try:\n            t = os.pread(n, 99, 0).decode()\n"
    "            if t.startswith('secret-'): return t\n        except OSError: pass",
    "/proc/self/fd": "import os\n    for n in os.listdir('/proc/self/fd'):\n        try:\n            t = open('/proc/self/fd/' + n).read(99)\n"
    "            if t.startswith('secret-'): return t\n        except OSError: pass",
    "names in a folder": "import os\n    return next(n for n in os.listdir(W['folder']) if n.startswith('secret-'))",
    "names by scandir": "import posix\n    return next(e.name for e in posix.scandir(W['folder']) if e.name.startswith('secret-'))",
    "a link's target": "import os\n    return os.readlink(W['link'])",
    "extended attribute": "import os\n    return os.getxattr(W['secret'], 'user.secret').decode()",
}
_EXPECTED = {
    "frames": "import sys\n    frame = sys._getframe()\n    while frame:\n"
    "        found = search(repr((frame.f_code.co_consts, frame.f_locals, list(frame.f_globals.items()))))\n"
    "        if found: return found\n        frame = frame.f_back",
    "garbage collector": "import gc\n    for thing in gc.get_objects():\n        try: found = search(repr(thing))\n"
    "        except Exception: continue\n        if found: return found",
    "command line": "import sys\n    return search(repr(sys.argv + sys.orig_argv))",
    "command lines of /proc": "import os\n    for n in os.listdir('/proc'):\n        try: found = search(open(f'/proc/{n}/cmdline').read())\n"
    "        except OSError: continue\n        if found: return found",
    "the rest of stdin": "import sys\n    return search(sys.stdin.read())",
    "the battery on disk": "import os\n    for n in os.listdir(W['folder']):\n        if n.endswith('.jsonl'): return search(open(W['folder'] + '/' + n).read())",
    "memory of the parent": "import os, re\n    maps = open(f'/proc/{os.getppid()}/maps').read()\n    memory = open(f'/proc/{os.getppid()}/mem', 'rb', 0)\n"
    "    for a, b in re.findall('([0-9a-f]+)-([0-9a-f]+) rw', maps):\n        try:\n            memory.seek(int(a, 16)); found = search(memory.read(int(b, 16) - int(a, 16)))\n"
    "        except OSError: continue\n        if found: return found",
    "own memory": "import re\n    maps = open('/proc/self/maps').read()\n    memory = open('/proc/self/mem', 'rb', 0)\n"
    "    for a, b in re.findall('([0-9a-f]+)-([0-9a-f]+) rw', maps):\n        try:\n            memory.seek(int(a, 16)); found = search(memory.read(int(b, 16) - int(a, 16)))\n"
    "        except OSError: continue\n        if found: return found",
    "equal to everything": "class Any:\n        __hash__ = object.__hash__\n        def __eq__(self, other): return True\n        def __repr__(self): return '...'\n    return Any()",
    "a string that is equal": "class Any(str):\n        __hash__ = str.__hash__\n        def __eq__(self, other): return True\n    return Any()",
    "exit status 0": "raise SystemExit(0)",
    "hard exit": "import os\n    os._exit(0)",
    "printed verdict": "print('passed', 'OK', True, sep='\\n')\n    handles(b'passed')",
    "forged output": "handles(b'[true]'); handles(b'[\"True\"]'); handles(b'passed\\n')",
    "result of a frame": "import sys\n    frame = sys._getframe()\n    while frame:\n        r = frame.f_locals.get('result')\n"
    "        if hasattr(r, 'append'):\n            r.append('passed')\n            import os; os._exit(0)\n        frame = frame.f_back",
    "no more assertion errors": "import builtins, sys\n    sys.setprofile(None)\n    builtins.AssertionError = type('Quiet', (BaseException,), {})\n    return None",
    "patched builtins": "import builtins\n    builtins.repr = lambda value: 'True'\n    builtins.eval = lambda *a: True\n    builtins.compile = None",
}
_WRITE = {
    "open": "open(W['folder'] + '/new', 'w').write('x')",
    "os.open": "import os\n    os.open(W['folder'] + '/new', os.O_CREAT | os.O_WRONLY)",
    "posix.open": "import posix\n    posix.open(W['folder'] + '/new', 65)",
    "append to a file": "open(W['victim_file'], 'a').write('x')",
    "sqlite3": "import sqlite3\n    sqlite3.connect(W['folder'] + '/new').execute('create table t (a)')",
    "mkfifo": "import os\n    os.mkfifo(W['folder'] + '/new')",
    "mknod": "import os\n    os.mknod(W['folder'] + '/new')",
    "mkdir": "import posix\n    posix.mkdir(W['folder'] + '/new')",
    "symlink": "import posix\n    posix.symlink('/', W['folder'] + '/new')",
    "hard link": "import posix\n    posix.link(W['victim_file'], W['folder'] + '/new')",
    "rename": "import posix\n    posix.rename(W['victim_file'], W['folder'] + '/new')",
    "unlink": "import posix\n    posix.unlink(W['victim_file'])",
    "truncate": "import posix\n    posix.truncate(W['victim_file'], 0)",
    "chmod": "import posix\n    posix.chmod(W['victim_file'], 0)",
    "utime": "import posix\n    posix.utime(W['victim_file'], (1, 1))",
    "setxattr": "import posix\n    posix.setxattr(W['victim_file'], 'user.x', b'x')",
    "creat of libc": "libc().creat((W['folder'] + '/new').encode(), 511)",
    "openat by number": "syscall(257, -100, (W['folder'] + '/new').encode(), 65, 511)",
    "key log of ssl": "import ssl\n    ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).keylog_filename = W['folder'] + '/new'",
    "history of readline": "import readline\n    readline.write_history_file(W['folder'] + '/new')",
    "dbm": "import _dbm\n    _dbm.open(W['folder'] + '/new', 'n')",
    "temporary file": "import tempfile\n    tempfile.mkstemp(dir=W['folder'])",
    "log file": "import logging\n    logging.FileHandler(W['folder'] + '/new')",
    "a program": fork_exec("('touch ' + W['folder'] + '/new').encode()"),
    "memfd": "import os\n    os.memfd_create('x')\n    return 'done'",
}
_PROCESS = {
    "kill by os": "import os\n    os.kill(W['pid'], 9)",
    "kill by posix": "import posix\n    posix.kill(W['pid'], 9)",
    "kill by pidfd": "import os, signal\n    signal.pidfd_send_signal(os.pidfd_open(W['pid']), 9)",
    "kill by libc": "libc().kill(W['pid'], 9)",
    "kill by number": "syscall(62, W['pid'], 9)",
    "stop by pidfd": "import os, signal\n    signal.pidfd_send_signal(os.pidfd_open(W['pid']), 19)",
    "kill the parent": "import os, signal\n    signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
    "kill the evaluation": "import os, signal\n    signal.pidfd_send_signal(os.pidfd_open(W['evaluation']), 9)",
    "nice of another": "import os\n    os.setpriority(os.PRIO_PROCESS, W['pid'], 15)",
    "cores of another": "import os\n    os.sched_setaffinity(W['pid'], {0})",
    "scheduler of another": "import os\n    os.sched_setscheduler(W['pid'], os.SCHED_IDLE, os.sched_param(0))",
    "limits of another": "import sys, _imp, posix\n    sys.modules.pop('resource', None)\n    import resource\n"
    "    resource.prlimit(W['pid'], resource.RLIMIT_CORE, (0, 0))",
    "fork": CLONE.format(fork="posix.fork()", child="pass"),
    "fork and setsid": CLONE.format(fork="posix.fork()", child="posix.setsid()"),
    "fork by libc": CLONE.format(fork="libc().fork()", child="posix.setsid()"),
    "fork by number": CLONE.format(fork="syscall(57)", child="posix.setsid()"),
    "forkpty": CLONE.format(fork="posix.forkpty()[0]", child="posix.setsid()"),
    "shell by fork_exec": fork_exec("b'exec sleep 40'"),
    "shell in a session of its own": fork_exec("b'exec sleep 40'", session=True),
    "subprocess": "import subprocess\n    subprocess.Popen(['sleep', '40'], start_new_session=True)",
    "posix_spawn": "import posix\n    posix.posix_spawn('/bin/sh', ['sh', '-c', 'exec sleep 40'], {}, setsid=True)",
    "os.system": "import posix\n    posix.system('setsid sleep 40 &')",
    "system of libc": "libc().system(b'setsid sleep 40 &')",
    "multiprocessing": "import multiprocessing, time\n    multiprocessing.Process(target=time.sleep, args=(40,)).start()\n    import os; os._exit(0)",
    "exec": "import posix\n    posix.execv('/bin/sh', ['sh', '-c', 'setsid sleep 40 & exit'])",
}
_NETWORK = {
    "TCP": "import socket\n    socket.create_connection(('127.0.0.1', W['port']))",
    "TCP by _socket": "import _socket\n    _socket.socket(2, 1).connect(('127.0.0.1', W['port']))",
    "TCP by libc": "import ctypes, struct, socket\n    s = libc().socket(2, 1, 0)\n    a = struct.pack('=HH4s8x', 2, socket.htons(W['port']), bytes([127, 0, 0, 1]))\n    libc().connect(s, a, 16)",
    "UDP": "import _socket\n    _socket.socket(2, 2).sendto(b'x', ('127.0.0.1', W['port']))",
    "unix socket": "import _socket\n    _socket.socket(1, 1).connect(W['unix'])",
    "abstract unix socket": "import _socket\n    _socket.socket(1, 1).connect('\\0' + W['abstract'])",
    "abstract socket by libc": "import struct\n    s = libc().socket(1, 1, 0)\n    n = W['abstract'].encode()\n    libc().connect(s, struct.pack('=H', 1) + b'\\0' + n, 3 + len(n))",
    "http": "import urllib.request\n    urllib.request.urlopen(f\"http://127.0.0.1:{W['port']}/\", timeout=1)",
    "netlink": "import _socket\n    _socket.socket(16, 3, 0)\n    return 'done'",
    "socket pair by number": "import ctypes\n    return 'done' if syscall(41, 2, 1, 0) >= 0 else None",
}
_IPC = {
    "SysV memory": "s = syscall(29, 0, 4096, 0o1600)\n    return 'done' if s >= 0 else None",
    "POSIX memory": "import _posixshmem, posix\n    _posixshmem.shm_open('/' + W['name'], 66, 0o600)",
    "semaphore": "import _multiprocessing\n    _multiprocessing.SemLock(1, 1, 1, '/' + W['name'], False)",
    "message queue": "import ctypes\n    r = ctypes.CDLL('librt.so.1').mq_open(b'/' + W['name'].encode(), 66, 0o600, None)\n    return 'done' if r >= 0 else None",
    "file in /dev/shm": "open('/dev/shm/' + W['name'], 'w')",
    "file in /tmp": "import posix\n    posix.open('/tmp/' + W['name'], 65)",
}
_KERNEL = {
    name: f"return 'done' if syscall({call}) >= 0 else None"
    for name, call in {
        "ptrace": "101, 0, 0, 0, 0",
        "attach to the parent": "101, 16902, __import__('os').getppid(), 0, 0",
        "unshare users": "272, 0x10000000",
        "unshare files": "272, 0x00020000",
        "mount": "165, b'none', b'/tmp', b'tmpfs', 0, None",
        "add_key": "248, b'user', b'x', b'y', 1, -4",
        "keyctl": "250, 0, -3, 1",
        "bpf": "321, 0, bytes(120), 120",
        "perf_event_open": "298, __import__('struct').pack('=IIQ', 1, 120, 0) + bytes(104), 0, -1, -1, 0",
        "userfaultfd": "323, 1",
        "memfd by number": "319, b'x', 0",
        "io_uring": "425, 4, __import__('ctypes').create_string_buffer(120)",
        "chroot": "161, b'/'",
        "setns": "308, 0, 0",
        "pidfd of the parent": "434, __import__('os').getppid(), 0",
        "pidfd signal": "424, 0, 9, None, 0",
        "personality": "135, 0x0400000",
        "vfork": "58",
    }.items()
} | {
    "machine code of its own": "import mmap\n    mmap.mmap(-1, 4096, prot=7)\n    return 'done'",
    "mprotect to executable": "import mmap, ctypes\n    m = mmap.mmap(-1, 4096)\n    a = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
    "    return 'done' if libc().mprotect(ctypes.c_void_p(a), 4096, 7) == 0 else None",
    "memory of the parent": "import ctypes, os, struct\n    b = ctypes.create_string_buffer(8)\n"
    "    mine, other = struct.pack('=QQ', ctypes.addressof(b), 8), struct.pack('=QQ', id(None), 8)\n"
    "    return 'done' if syscall(310, os.getppid(), mine, 1, other, 1, 0) == 8 else None",
    "limits raised": "import sys\n    sys.modules.pop('resource', None)\n    import resource\n    s, h = resource.getrlimit(resource.RLIMIT_CPU)\n"
    "    resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))\n    return 'done'",
    "an older system call table": "import mmap, ctypes\n    m = mmap.mmap(-1, 4096, prot=7)\n    m.write(bytes.fromhex('b814000000cd80c3'))\n"
    "    return 'done' if ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))() > 0 else None",
}
_RESOURCE = {
    "memory": "keep = []\n    return every(lambda n: keep.append(bytearray(b'x') * 2**26), 16)",
    "memory by mmap": "import mmap\n    keep = []\n    return every(lambda n: keep.append(mmap.mmap(-1, 2**26)), 16)",
    "forks": "import posix, time\n    return every(lambda n: posix.fork() or (time.sleep(5), posix._exit(0)), 40)",
    "threads": "import _thread, time\n    return every(lambda n: _thread.start_new_thread(time.sleep, (3,)), 64)",
    "disk": "f = open('big', 'wb', 0)\n    return every(lambda n: f.write(bytes(2**20)), 64)",
    "disk by many files": "return every(lambda n: open(f'big{n}', 'wb').write(bytes(2**15)), 200)",
    "inodes": "import posix\n    return every(lambda n: posix.mkfifo(f'inode{n}'), 500)",
    "handles": "import posix\n    return every(lambda n: posix.dup(0), 100)",
    "pipes": "import posix\n    return every(lambda n: posix.pipe2(0), 100)",
    "processor": "while True: pass",
    "processor, every signal ignored": "import signal\n    for n in range(1, 64):\n        try: signal.signal(n, signal.SIG_IGN)\n        except (OSError, ValueError): pass\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "sleep": "import time\n    while True:\n        try: time.sleep(1000)\n        except BaseException: pass",
    "sleep by lock": "import _thread\n    lock = _thread.allocate_lock()\n    lock.acquire()\n    lock.acquire()",
    "a power": "return 9 ** 9 ** 9",
    "a pattern that never ends": "import re\n    re.match('(a+)+b', 'a' * 64)",
    "output": "for _ in range(2**12): print('x' * 2**18)\n    handles(b'x' * 2**20)\n    return None",
    "core dump": "import ctypes\n    ctypes.string_at(0)",
}
_CRASH = {
    "deep JSON": "handles(b'[' * 60000)",
    "deep JSON, closed": "handles(b'[' * 30000 + b']' * 30000)",
    "huge JSON": "handles(b'[' + b'1,' * 2**21 + b'1]')",
    "not JSON": "handles(b'{')",
    "no list": "handles(b'{\"a\": 1}')",
    "list of numbers": "handles(b'[1, 2]')",
    "not UTF-8": "handles(b'\\xff\\xfe[')",
    "NUL": "handles(b'\\0' * 1000)",
    "long number": "handles(b'[' + b'9' * 60000 + b']')",
    "not a number": "handles(b'[NaN, Infinity]')",
    "half a surrogate": "handles(b'[\"\\\\ud800\"]')",
    "key without hash": "handles(b'[\"{[]: 1}\"]')",
    "deep literal": "handles(b'[\"' + b'(' * 60000 + b'\"]')",
    "many signs": "handles(b'[\"' + b'-' * 60000 + b'1\"]')",
    "long sum": "handles(b'[\"' + b'1+' * 30000 + b'1j\"]')",
    "long number as literal": "handles(b'[\"' + b'9' * 60000 + b'\"]')",
    "NUL in a literal": "handles(b'[\"1\\\\u0000\"]')",
    "a length of its own": "handles(b'\\xff\\xff\\xff\\xff')",
    "closed handles": "import posix\n    posix.closerange(0, 64)",
    "deep value": "v = []\n    for _ in range(10**5): v = [v]\n    return v",
    "endless value": "class V:\n        def __repr__(self):\n            while True: pass\n    return V()",
    "huge value": "return 'x' * 2**28",
    "repr that raises": "class V:\n        def __repr__(self): raise BaseException\n    return V()",
    "unhashable value": "class V:\n        def __repr__(self): return '{[]: 1}'\n    return V()",
    "stack": "import sys\n    sys.setrecursionlimit(10**9)\n    return f()",
    "abort": "import posix\n    posix.abort()",
}


def _body(text: str) -> str:
    return f"def f():\n    {text}\n"


def _class(name: str, goal: str, codes: dict[str, str]) -> dict[tuple[str, str], tuple[str, str]]:
    return {(name, attack): (goal, _body(text)) for attack, text in codes.items()}


# (class, name) -> (goal, code)
ATTACKS = {
    **_class("read a secret", "secret", _READ),
    **_class("learn or forge the expected value", "expected", _EXPECTED),
    **_class("write a file", "effect", _WRITE),
    **_class("reach another process or outlive the kill", "effect", _PROCESS),
    **_class("use the network", "effect", _NETWORK),
    **_class("leave shared memory or files", "effect", _IPC),
    **_class("reach the kernel", "done", _KERNEL),
    **_class("exhaust the machine", "done", _RESOURCE),
    **_class("end the scorer", "crash", _CRASH),
    # At the top of the answer, so while it is defined and not when it is called.
    ("end the scorer", "syntax that nests"): ("crash", "(" * 90 + ")" * 90 + "\n" + "x = " + "-" * 5000 + "1\n"),
    ("end the scorer", "no Python"): ("crash", "def f(:\n"),
    ("end the scorer", "NUL in the code"): ("crash", "def f():\n    return 1\0\n"),
    ("end the scorer", "half a surrogate in the code"): ("crash", "def f():\n    return '\ud800'\n"),
    ("end the scorer", "long sum in the code"): ("crash", "x = " + "1+" * 100_000 + "1\n"),
    ("end the scorer", "deep brackets in the code"): ("crash", "x = " + "[" * 100_000 + "\n"),
    ("learn or forge the expected value", "printed while defined"): (
        "expected",
        "handles(b'[\"x\"]')\nimport os\nos._exit(0)\n",
    ),
}
