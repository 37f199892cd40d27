"""Two processes of a gloo group, and what each of them saw."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import forked

RANKS = (0, 1)
TIMEOUT_S = 60


def spawn(worker, folder, timeout_s=TIMEOUT_S):
    """Run `worker(rank)` on both ranks; return what each of them returned."""
    with forked.starting():
        context = torch.multiprocessing.start_processes(
            _run, (worker, str(folder)), len(RANKS), join=False, start_method="forkserver"
        )
    try:
        deadline = time.monotonic() + timeout_s
        # A call returns as soon as one rank has ended, and raises that rank's error.
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, "a rank hangs"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in RANKS]


def _run(rank, worker, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(RANKS),
        timeout=timedelta(seconds=TIMEOUT_S / 2),
    )
    torch.manual_seed(rank)  # the ranks share no random numbers
    torch.save(worker(rank), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
