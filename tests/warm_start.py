"""Python processes that tests start, forked from a warm one.

A command of the harness, a controller or a rank spends three to six seconds of processor time on imports, and a suite
starts thousands. A template process imports once, and a command that a test, or a process of a test, starts is forked
from it. It is a child of the one that started it, with its own pid, session, descriptors, signals, limits, folder and
environment, and /proc shows its command and environment. It ends as every interpreter does, but for the destruction of
all objects at the very end, and can be killed as any.

What a fork cannot imitate is executed as ever: other programs, other options and variables of the interpreter or of
native libraries, another copy of the package, another user, another system than Linux. With TITAN_EXP_TESTS_COLD=1
everything is, as by night.
"""

import _posixsubprocess
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import fast_hydra

REPOSITORY = Path(__file__).resolve().parents[1]
COLD = "TITAN_EXP_TESTS_COLD"
PRELOAD = (
    "torch.distributed.checkpoint",
    "titan_exp.trainer.rank_main",
    "titan_exp.launch.local.ranks",
    "titan_exp.launch.local.executor",
    "titan_exp.launch.sweep.sweeper",
    "titan_exp.cli.main",
    "titan_exp.cli.train",
    "titan_exp.compare.output.plots",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "submitit.local.local",
    "submitit.local._local",
    "tests.warm",
)
"""What most commands import. Not the extensions: a run has those that it asks for."""
ROOM = 1 << 15
"""Bytes that a forked process has for its command line, and for its environment."""
MODULES = ("titan_exp", "submitit", "tests.")
SPAWN = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TORCH", "PYTORCH", "TRITON", "CUDA_", "MALLOC", "MKL", "KMP", "GOMP")
"""Beginnings of variables that an interpreter or a library reads once."""
READ_LATER = {
    "CUDA_VISIBLE_DEVICES",
    "GOMP_SPINCOUNT",
    "PYTHONFAULTHANDLER",
    "PYTHONPATH",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_FR_BUFFER_SIZE",
    "TRITON_CACHE_DIR",
}
"""Those of them that a process takes over after it was forked, or reads there."""
CLONE_PARENT, CLONE = 0x8000, {"x86_64": 56, "aarch64": 220}
"""Flag of clone(2), and its number by machine."""
PR_SET_PDEATHSIG = 1
SPARE = 500
"""From here on are descriptors that nobody was promised."""

Environment = dict[str, str]


@dataclass(frozen=True)
class Command:
    """What a process is started with: arguments of an exec, and the state that it would inherit."""

    words: Sequence[str]
    environment: Environment
    folder: str | None
    session: bool
    group: int
    """Process group to join, 0 for one of its own."""
    descriptors: Sequence[int]
    """Numbers that the received descriptors get, after that of the present folder."""
    umask: int
    ignored: Sequence[int]
    blocked: Sequence[int]
    limits: Sequence[tuple[int, tuple[int, int]]]


class _Template:
    """The process from which commands of this process are forked, as seen from here."""

    def __init__(self, connection: socket.socket, environment: Environment) -> None:
        self.owner, self.connection, self.lock = os.getpid(), connection, threading.Lock()
        self.interpreter = _read_at_start(environment)
        atexit.register(connection.close)

    def start(self, command: Command, files: Sequence[int]) -> int | None:
        """Pid of the new child of this process; None if it cannot be forked."""
        here = os.open(".", os.O_PATH)
        try:
            with self.lock:
                socket.send_fds(self.connection, [pickle.dumps(command)], [here, *files])
                return int(self.connection.recv(32)) or None
        except (OSError, ValueError):
            return None
        finally:
            os.close(here)


execute = _posixsubprocess.fork_exec
_at_first: Environment = {}
"""Environment in which this was installed."""
_template: _Template | None = None
_words: Sequence[str] = ()
"""Command that this process has become."""


def install() -> None:
    """Let commands of this process, and of those forked for it, start warm, where this system can."""
    _at_first.update(os.environ)
    leave_files_to_the_kernel()
    if os.environ.get(COLD) != "1" and sys.platform == "linux" and os.uname().machine in CLONE:
        subprocess._fork_exec = _posixsubprocess.fork_exec = _fork_or_execute  # type: ignore[attr-defined]


def leave_files_to_the_kernel() -> None:
    """Files of tests need not outlive the machine; a process would wait for its disk a tenth of its time."""
    if os.environ.get(COLD) != "1":
        os.fsync = _require_open


def _require_open(file: Any) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())


def _fork_or_execute(*call: Any) -> int:
    """`_posixsubprocess.fork_exec`: returns the pid."""
    global _template  # noqa: PLW0603  one for a process
    words = [os.fsdecode(word) for word in call[0]]
    described = _command(words, call) if _is_known(words) else None
    if described is None:
        return execute(*call)
    if _template is None:
        _template = _first_template()
    command, files = described
    same = _template.owner == os.getpid() and _template.interpreter == _read_at_start(command.environment)
    return (_template.start(command, files) if same else None) or execute(*call)


def _is_known(words: Sequence[str]) -> bool:
    """Whether this is a command of the harness, a module that starts one, or a process of multiprocessing."""
    program, *rest = words
    if program == _script():
        return True
    rest = rest[next((place for place, word in enumerate(rest) if word not in ("-u", "-B")), len(rest)) :]
    if program != sys.executable or len(rest) < 2:
        return False
    return (rest[0] == "-m" and rest[1].startswith(MODULES)) or (rest[0] == "-c" and rest[1].startswith(SPAWN))


def _script() -> str:
    return str(Path(sys.executable).parent / "titan-exp")


def _command(words: Sequence[str], call: Sequence[Any]) -> tuple[Command, Sequence[int]] | None:
    """A call of `fork_exec` with the descriptors to send; None if it asks for what a fork cannot do."""
    _, _, close, keep, folder, variables = call[:6]
    restore, session, group, gid, gids, uid, umask, prepare = call[14:22]
    pairs = list(os.environb.items()) if variables is None else [pair.split(b"=", 1) for pair in variables]
    environment = {os.fsdecode(name): os.fsdecode(value) for name, value in pairs}
    paths = [folder or ".", *environment.get("PYTHONPATH", "").split(os.pathsep)]
    others = [path for path in paths if Path(path, "titan_exp").exists() and Path(path).resolve() != REPOSITORY]
    users = any(found is not None for found in (gid, gids, uid)) or umask != -1
    large = max(sum(map(len, words)), sum(len(name) + len(value) for name, value in pairs)) > ROOM // 2
    if (
        not close
        or users
        or large
        or prepare is not None
        or others
        or (folder is not None and not os.path.isdir(folder))
    ):
        return None
    written = call[13]
    kept = [number for number in keep if number != written]
    standard = [given if given != -1 else own for own, given in enumerate((call[6], call[9], call[11]))]
    with open("/proc/self/status", encoding="utf-8") as file:
        mask = int(next(line for line in file if line.startswith("Umask:")).split()[1], 8)
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN]
    restored = {signal.SIGPIPE, signal.SIGXFSZ} if restore else set()
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    command = Command(
        words=words,
        environment=environment,
        folder=None if folder is None else os.fsdecode(folder),
        session=bool(session),
        group=os.getpgid(0) if group == -1 else group,
        descriptors=[0, 1, 2, *kept],
        umask=mask,
        ignored=[int(number) for number in ignored if number not in restored],
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        limits=[(limit, resource.getrlimit(limit)) for limit in sorted(set(limits))],
    )
    return command, [*standard, *kept]


def _read_at_start(environment: Environment) -> Environment:
    names = (name for name in environment if name.startswith(READ_AT_START) and name not in READ_LATER)
    return {name: environment[name] for name in names}


def _first_template() -> _Template:
    """A new interpreter that has imported what commands import. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**_at_first, "OMP_NUM_THREADS": "1"}  # not what the test at hand has set
    environment.pop("PYTHONPATH", None)
    code = f"import sys; sys.path[0] = {str(REPOSITORY)!r}; from tests import warm_start; "
    code += f"warm_start.serve({theirs.fileno()}); warm_start.run_to_the_end()"
    files = [theirs.fileno()]
    room = {"TITAN_EXP_TESTS_ROOM": " " * ROOM}
    with open(os.devnull, "r+b") as nothing:
        words = [sys.executable, "-c", code, " " * ROOM]
        process = subprocess.Popen(words, stdin=nothing, stdout=nothing, env=environment | room, pass_fds=files)
    process.returncode = 0  # nobody waits for it
    theirs.close()
    return _Template(ours, environment)


def serve(number: int) -> None:
    """Import, then fork commands as they are asked for by the socket with this descriptor; returns in each of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fast_hydra.install()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    install()
    _serve(socket.socket(fileno=number), dict(os.environ))


def _serve(connection: socket.socket, interpreter: Environment) -> None:
    while True:
        message, files, _, _ = socket.recv_fds(connection, 8 * ROOM, 250)
        if not message:
            os._exit(0)
        pid = _fork_beside()
        if not pid:
            connection.close()
            _become(pickle.loads(message), files, interpreter)
            return
        for file in files:
            os.close(file)
        connection.send(str(max(pid, 0)).encode())  # 0 where the system refuses such a fork


def _fork_beside() -> int:
    """A fork whose parent is the parent of this process; -1 where there is none."""
    libc, python = ctypes.PyDLL(None), ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = libc.syscall(CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid:
        python.PyOS_AfterFork_Parent()
    else:
        python.PyOS_AfterFork_Child()
    return pid


def _become(command: Command, files: Sequence[int], interpreter: Environment) -> None:
    """Take over what an exec would give to a process."""
    global _template, _words
    if command.session:
        os.setsid()
    else:
        os.setpgid(0, command.group)
    here, *given = (fcntl.fcntl(file, fcntl.F_DUPFD, SPARE) for file in files)
    for number, source in zip(command.descriptors, given, strict=True):
        os.dup2(source, number)
    _close_all_but({*command.descriptors, here})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        _serve_the_command(theirs, interpreter)
        return
    connection = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, SPARE))
    ours.close()
    theirs.close()
    _template, _words = _Template(connection, interpreter), command.words
    os.fchdir(here)
    os.close(here)
    if command.folder is not None:
        os.chdir(command.folder)
    os.umask(command.umask)
    for limit, values in command.limits:
        resource.setrlimit(limit, values)
    os.environ.clear()
    os.environ.update(command.environment)
    _show(command)
    _start_interpreter(command)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in command.ignored else signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in command.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    signal.pthread_sigmask(signal.SIG_SETMASK, command.blocked)


def _serve_the_command(connection: socket.socket, interpreter: Environment) -> None:
    """A template that ends with its parent, and holds none of its files and folders."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _close_all_but({0, 1, 2, connection.fileno()})
    os.chdir("/")
    _serve(connection, interpreter)


def _close_all_but(kept: set[int]) -> None:
    for number in os.listdir("/proc/self/fd"):
        if int(number) not in kept:
            with contextlib.suppress(OSError):  # that of the list
                os.close(int(number))


def _show(command: Command) -> None:
    """Let /proc show command and environment, where the kernel found those of the template."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    words, end_of_words, variables, end = map(int, fields[45:49])
    pairs = [f"{name}={value}" for name, value in command.environment.items()]
    for texts, first, last in ((command.words, words, end_of_words), (pairs, variables, end)):
        shown = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memset(first, 0, last - first)
        ctypes.memmove(first, shown, len(shown))


def _start_interpreter(command: Command) -> None:
    """What Python reads from its environment and its descriptors at the start."""
    variables = command.environment
    options = command.words[1:3] if command.words[0] == sys.executable else ()
    unbuffered = "-u" in options or bool(variables.get("PYTHONUNBUFFERED"))
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffer = raw if unbuffered and number else io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        before, tty = getattr(sys, name), raw.isatty()
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(
            buffer,  # type: ignore[arg-type]
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=number == 2 or tty,
            write_through=unbuffered and number > 0,
        )
        stream.mode = before.mode  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.orig_argv[:] = command.words
    tempfile.tempdir = None
    sys.modules["titan_exp.tracking.logging"].PROGRESS.keep_alive()  # or it seems to hang since the template began
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].set_num_threads(int(variables.get("OMP_NUM_THREADS") or 1))


def run_to_the_end() -> None:
    """Run the command and end as an interpreter does, which then takes half a second to destroy every object."""
    try:
        run()
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    vars(threading)["_shutdown"]()
    for finalizer, about in list(vars(weakref.finalize)["_registry"].items()):
        finalizer.atexit = finalizer.atexit and about.func.__module__ != "torch.library"  # takes down its operators
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):  # the interpreter reports it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)
    sys.exit(code)


def run() -> None:
    """Run the command that this process has become, as the interpreter does."""
    program, *rest = _words
    safe = bool(os.environ.get("PYTHONSAFEPATH"))
    if program != sys.executable:
        sys.argv[:] = _words
        if not safe:
            sys.path.insert(0, str(Path(program).parent))
        code = compile(Path(program).read_bytes(), program, "exec")
        exec(code, vars(sys.modules["__main__"]) | {"__file__": program})
        return
    while rest[0] in ("-u", "-B"):
        rest.pop(0)
    option, what, *arguments = rest
    sys.argv[:] = [option, *arguments]
    if not safe:
        sys.path.insert(0, os.getcwd() if option == "-m" else "")
    if option == "-m":
        with warnings.catch_warnings(action="ignore"):  # that it is imported already
            _, spec, code = vars(runpy)["_get_module_details"](what)
        sys.argv[0] = spec.origin
        vars(runpy)["_run_code"](code, vars(sys.modules["__main__"]), None, "__main__", spec)
    else:
        exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
