"""``landfall sft``: check everything that can be checked at once, then start the ranks of this node."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import MutableMapping, Sequence
from typing import Any

from landfall.errors import LandfallError
from landfall.sft.config import SftConfig, entries, resolve
from landfall.sft.derive import UNSET, is_rank
from landfall.sft.model_folder import FETCHED, read_model_config, resolve_model

WORKER = "landfall.sft.worker"
STOPPED_CODES = (3, 128 + signal.SIGTERM, 128 + signal.SIGUSR1)
"""The exit codes of a run that was asked to end (see sft.control)."""
STOP_WITHIN_S = "600"
"""How long torchrun lets ranks save and end after a signal. Schedulers kill sooner than that."""


def launch(
    argv: Sequence[str], environ: MutableMapping[str, str] = os.environ, *, entry: str = WORKER
) -> int:
    """Train as ``argv`` and ``environ`` say; returns the exit code.

    The ranks are started by torchrun if NPROC_PER_NODE or NNODES is set; otherwise there is one, in this
    process. ``entry`` is the module of a rank: it has ``main(argv) -> int`` and can be run with
    ``python -m``. ``environ`` has to be what child processes inherit, and gets what they need.

    Raises UsageError before anything is started. The exit code is that of the first rank that failed, or
    128 + n after signal n, or 3 when --exit_duration_in_mins was over.
    """
    environ.pop(UNSET, None)
    resolved = resolve(argv, environ)
    config = resolved.config
    folder = resolve_model(config.model, {}, config.use_hf)
    resolved.with_model(read_model_config(folder, config.model_type))

    variables = [entry.flag.env for entry in entries() if entry.flag.env]
    environ[UNSET] = " ".join(variable for variable in variables if variable not in environ)
    environ[FETCHED] = str(folder)
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(config.cuda_device_max_connections))
    environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_WITHIN_S)
    environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // config.nproc_per_node)))
    if not is_rank(environ):
        if "NPROC_PER_NODE" in environ or "NNODES" in environ:
            return _run_ranks(argv, config, entry)
        environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(config.master_port or _free_port()))
    return int(importlib.import_module(entry).main(list(argv)))


def _run_ranks(argv: Sequence[str], config: SftConfig, entry: str) -> int:
    """torchrun, but for its tracebacks: a rank that fails has said why."""
    _import_torch_quietly()
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="landfall-") as log_dir:
            elastic_launch(_launch_config(config, log_dir), sys.executable)("-u", "-m", entry, *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _report_failure(rank, failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    except (DistError, RendezvousError) as error:
        raise LandfallError(
            "the nodes did not find each other",
            where=f"node {config.node_rank} of {config.nnodes}",
            got=str(error).partition("\n")[0],
            expected=f"node 0 at MASTER_ADDR {config.master_addr}, MASTER_PORT {config.master_port}",
            do="check that both are the same on all nodes, and that the port is free and open on node 0",
        ) from error
    finally:
        logging.disable(before)
    return 0


def _import_torch_quietly() -> None:
    """torch's store warns with a C++ stack when node 0 ends before the others, which is no fault."""
    level = "TORCH_CPP_LOG_LEVEL"  # read once, when torch is loaded; the ranks keep their own
    if level not in os.environ:
        os.environ[level] = "ERROR"
        importlib.import_module("torch")
        del os.environ[level]


def _launch_config(config: SftConfig, log_dir: str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    if config.master_port is None:  # one node: torchrun finds a free port itself, and keeps it
        meeting: dict[str, Any] = dict(
            rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id=uuid.uuid4().hex, local_addr="127.0.0.1"
        )
    else:
        meeting = dict(
            rdzv_backend="static",
            rdzv_endpoint=f"{config.master_addr}:{config.master_port}",
            rdzv_configs={"rank": config.node_rank},
            run_id="landfall",
        )
    return LaunchConfig(
        min_nodes=config.nnodes,
        max_nodes=config.nnodes,
        nproc_per_node=config.nproc_per_node,
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",  # all of them reach the ranks
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        **meeting,
    )


def _report_failure(rank: int, exit_code: int) -> int:
    if exit_code in STOPPED_CODES:  # it has said so
        return exit_code
    if exit_code >= 0:
        how, code = f"ended with exit code {exit_code}", exit_code
    else:
        how, code = f"was killed by signal {-exit_code} ({signal.strsignal(-exit_code)})", 128 - exit_code
        if -exit_code == signal.SIGKILL:
            how += ", as the kernel does when memory runs out"
    print(f"landfall: rank {rank} {how}; the other ranks on this node were stopped", file=sys.stderr)
    return code


def _num_cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
