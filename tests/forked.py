"""Python programs in processes of their own, forked from one that has imported lmfit_gpu and done nothing else.

A new interpreter needs some six seconds of processor time for the imports (most of them torch's), a fork next to none.
The process forked from is started once by every process that runs tests; it never fits, starts no thread and no
Legate. A program can be signalled, refused, or end in a crash without harm to the tests.

What is read at import (SCIPY_ARRAY_API, -W, numbers of threads) is that of the process forked from: such a test needs
an interpreter of its own. What is read later (LEGATE_CONFIG, ...) is the program's.
"""

import functools
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
REPLY = struct.Struct("q")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork has no thread but the one that forks
SOON = 10  # s, to end what was killed


class Program:
    """A program that runs: its process id, what it has written so far, its exit status (of a signal: negative)."""

    def __init__(self, pid, replies, folder):
        self.pid, self.status = pid, None
        self._replies, self._folder = replies, folder

    def written(self, name="out"):
        """Return what has been written to standard output ("out") or standard error ("err")."""
        path = self._folder / name
        return path.read_text() if path.exists() else ""

    def wait(self, timeout):
        """Return the exit status, or raise TimeoutError after so many seconds."""
        if self.status is None:
            self.status = _reply(self._replies, timeout)
        return self.status


@contextmanager
def program(arguments, environment, cwd=TESTS):
    """Start ["-c", code, ...] or [path, ...] in a process group of its own; none of it is left afterwards."""
    server, _ = _server()
    with tempfile.TemporaryDirectory() as folder:
        request = {"arguments": arguments, "environment": environment, "cwd": str(cwd), "folder": folder}
        server.sendall(json.dumps(request).encode() + b"\n")
        running = Program(_reply(server, timeout=120), server, Path(folder))  # the first waits for the imports
        try:
            yield running
        finally:
            if running.status is None:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait(SOON)


@functools.cache
def _server():
    """Start the process to fork from; return the socket to it, which it ends with, and the process."""
    here, there = socket.socketpair()
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    with there:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import forked; forked.serve({there.fileno()})"],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return here, process


def _reply(server, timeout):
    server.settimeout(timeout)
    received = server.recv(REPLY.size)
    if not received:
        raise RuntimeError("the process to fork from has ended; its standard error says why")
    return REPLY.unpack(received)[0]


def serve(descriptor):
    """Fork once for every line that comes; answer with the process id and, when it has ended, the exit status."""
    import lmfit_gpu  # noqa: F401

    gc.freeze()  # or every fork would take a second to collect what was imported when it ends
    with socket.socket(fileno=descriptor) as client, client.makefile("r") as requests:
        request = next((line for line in requests if not _forked(client)), None)
    if request is not None:  # this is the fork
        os.setpgid(0, 0)
        _run(**json.loads(request))  # then the interpreter ends as it always does


def _forked(client):
    """Fork, and in the parent tell the process id and, when it has ended, the exit status; return 0 in the child."""
    pid = os.fork()
    if pid:
        _set_group(pid)
        client.sendall(REPLY.pack(pid))
        _, status = os.waitpid(pid, 0)
        client.sendall(REPLY.pack(os.waitstatus_to_exitcode(status)))
    return pid


def _set_group(pid):
    """Make the group exist before its number is told; the child does the same, and one of the two is first."""
    try:
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        return  # the child was first, or has ended


def _run(arguments, environment, cwd, folder):
    """Do in this process what an interpreter does that is started with these arguments."""
    for target, name in ((1, "out"), (2, "err")):
        descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, source, name = ["-c", *arguments[2:]], arguments[1], "<string>"
    else:
        sys.argv, source, name = arguments, Path(arguments[0]).read_text(), arguments[0]
        main.__file__ = name
    exec(compile(source, name, "exec"), main.__dict__)
