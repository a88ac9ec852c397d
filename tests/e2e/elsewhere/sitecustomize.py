"""A Linux on which our own code finds what macOS has. With this folder in PYTHONPATH every Python begins with this file.

/proc, /sys and /dev/shm are not there, nor are the functions and numbers that Python has on Linux alone, glibc's
mallopt and prctl, and a filter for model-written code. Libraries find the files and glibc: on a Mac they ask the system
otherwise, here they would break. Each thing that was asked for is noted in $ELSEWHERE, and who asked.
"""

import errno
import inspect
import multiprocessing
import os
import re
import resource
import select
import signal
import socket
import sys
import time

STDLIB = os.path.dirname(os.__file__)
OURS = re.compile(r"/(athanor|stages)/[\w/]+\.py$")
FILES = re.compile(r"/(proc|sys|dev/shm)(/|$)")
CALLS = {"mallopt", "prctl", "gnu_get_libc_version", "madvise", "seccomp"}
NAMES = {
    errno: "EUCLEAN EREMOTEIO ENOKEY EBADFD ENOMEDIUM ERESTART ESTRPIPE",
    os: "sched_getaffinity sched_setaffinity sched_setscheduler sched_getscheduler posix_fadvise posix_fallocate"
    " memfd_create pidfd_open eventfd splice copy_file_range getrandom setresuid setresgid getresuid getresgid pipe2"
    " fdatasync getxattr setxattr listxattr removexattr unshare setns O_TMPFILE O_PATH O_DIRECT O_NOATIME O_LARGEFILE"
    " posix_openpt accept4",
    resource: "prlimit RUSAGE_THREAD RLIMIT_SIGPENDING RLIMIT_OFILE RLIMIT_RTTIME RLIMIT_RTPRIO RLIMIT_NICE",
    select: "epoll",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL SIGCLD",
    socket: "SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED SO_BINDTODEVICE",
    time: "CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid",
}


def asked(what):
    """Whether our own code is who asks, past the standard library's functions; it is noted then."""
    frame = sys._getframe(2)
    while frame and (frame.f_code.co_filename.startswith((STDLIB + os.sep, "<frozen")) and not in_packages(frame)):
        frame = frame.f_back
    ours = frame and OURS.search(frame.f_code.co_filename) and not in_packages(frame)
    if ours and "ELSEWHERE" in os.environ:
        line = f"{what} {frame.f_code.co_filename}:{frame.f_lineno}\n".encode()
        handle = os.open(os.environ["ELSEWHERE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(handle, line)
        os.close(handle)
    return ours


def in_packages(frame):
    return "site-packages" in frame.f_code.co_filename


def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str) and FILES.match(arguments[0]):
        if asked(arguments[0]):
            raise FileNotFoundError(errno.ENOENT, "taken away", arguments[0])
    elif event == "ctypes.dlsym" and arguments[1] in CALLS and asked(arguments[1]):
        raise AttributeError(arguments[1])


def stat(path, *more, real=os.stat, **settings):
    if isinstance(path, (str, os.PathLike)) and FILES.match(os.fspath(path)) and asked(os.fspath(path)):
        raise FileNotFoundError(errno.ENOENT, "taken away", path)
    return real(path, *more, **settings)


def source(of, real=inspect.getsource):
    """The process of the sandbox starts without this file, from the text of its program."""
    text = real(of)
    return text.replace("CDLL(None", "CDLL('/taken/away'") if asked("source of the sandbox") else text


for module, names in NAMES.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
os.stat, inspect.getsource = stat, source
sys.addaudithook(hook)
multiprocessing.set_start_method("spawn")
