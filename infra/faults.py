"""When a rank fails: who reports it, and that none is left behind.

The rank that failed reports, on stderr and in torchrun's own report; the others stand by. A rank ends with its torchrun
and with its siblings on the same machine. Left out: going on without the rank that is gone; the same command does, from
the last checkpoint.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from config import UserError


class FailedElsewhere(UserError):
    """A mistake on another rank, which is the one to report it."""


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


siblings: set[int] = set()  # the other ranks on this machine


def watch() -> None:
    """A rank whose torchrun was killed must not go on, least of all beside its successor. Nor must one whose sibling is
    gone, wherever it is: in a long rollout, or waiting for that sibling on a GPU."""
    parent = os.getppid()

    def end_with_them() -> None:
        while os.getppid() == parent and all(map(_is_alive, list(siblings))):
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=end_with_them, daemon=True).start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def report_failure(message: str, show: bool = True) -> None:
    """On stderr, and in torchrun's own report, which stands last on the screen."""
    if show:
        say(message)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": details}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))


def warn(message: str) -> None:
    """From any rank: what happens to one may not happen to the first."""
    say(f"note: rank {os.environ.get('RANK', 0)}: {message}")


def say(message: str) -> None:
    """On stderr, the end of the line included in one go: another rank may be writing at the same time."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def stand_by() -> None:
    """Another rank failed and is the one to report it. torchrun, having noticed, ends this one."""
    if under_torchrun():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)


def is_lost_contact(error: Exception) -> bool:
    """A collective call of PyTorch's own (of shards, of a checkpoint) fails in this way where another rank is gone."""
    kinds = (RuntimeError, dist.DistBackendError)
    return type(error) in kinds and any(word in str(error) for word in ("gloo", "NCCL", "onnection"))


def lost_contact(error: Exception) -> ConnectionError:
    """What the rank that is gone had to say matters more than this."""
    stand_by()
    return ConnectionError(f"lost contact with another rank: {str(error).splitlines()[0]}")


def leave(code: int) -> None:
    """Ends the process. Threads of PyTorch's own, which shards have, may abort one that ends in the ordinary way."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fail(code: int, message: str | None = None) -> int:
    """The end of a rank that failed, or stands by where another did. It waits for nobody. -> exit code"""
    if message is None:
        stand_by()
    else:
        report_failure(message)
    if under_torchrun():
        os._exit(code)
    if dist.is_initialized():
        dist.destroy_process_group()
    return code
