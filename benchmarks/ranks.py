"""How fast do two ranks train? Steps of the MNIST CNN (B = 512, K = 2) by two single-threaded ranks, by one process with two
threads, and by one process with one thread. All are in memory at once and take turns, so that each round has the same load.
"""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks._measure import arguments, interleaved, ratio, save, summary

RANKS, THREADS, ALONE = "two ranks of one thread", "one process of two threads", "one process of one thread"
STEPS_PER_TURN = 20


def serve(end: Connection, method: str, threads: int, environment: dict[str, str]) -> None:
    """In a process of its own: take as many steps as asked for, until asked for none."""
    os.environ |= environment
    import torch

    from benchmarks.methods import step_of
    from dpcert.scale.world import join

    torch.set_num_threads(threads)
    step = step_of(method, join())
    end.send("ready")
    while steps := end.recv():
        for _ in range(steps):
            step()
        end.send("done")


def start(method: str, threads: int, ranks: int, meeting: Path) -> Callable[[int], None]:
    """Start a contender and return what lets it take steps."""
    context, ends = multiprocessing.get_context("spawn"), []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "DPCERT_RENDEZVOUS": str(meeting)} if ranks > 1 else {}
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, method, threads, place), daemon=True).start()
        ends.append(ours)
    for end in ends:
        end.recv()

    def take(steps: int) -> None:
        for end in ends:
            end.send(steps)
        for end in ends if steps else ():
            end.recv()

    return take


def main() -> None:
    options = arguments(__doc__ or "")
    rounds, steps = (3, 2) if options.quick else (options.rounds, STEPS_PER_TURN)
    result = {}
    for method in ("dp-gaussian", "dp-smoothadv"):
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder) / "ranks"
            takes = {
                RANKS: start(method, 1, 2, meeting),
                THREADS: start(method, 2, 1, meeting),
                ALONE: start(method, 1, 1, meeting),
            }
            work = {name: (lambda take=take: take(steps)) for name, take in takes.items()}
            seconds = {name: [each / steps for each in times] for name, times in interleaved(work, rounds).items()}
            for take in takes.values():
                take(0)
        result[method] = {
            **{name: summary(times) for name, times in seconds.items()},
            "speed_of_two_ranks_over_two_threads": ratio(seconds[THREADS], seconds[RANKS]),
            "speed_of_two_ranks_over_one_thread": ratio(seconds[ALONE], seconds[RANKS]),
        }
        for name, times in seconds.items():
            print(f"{method:14s} {name:28s} {summary(times)['median_ms']:7.1f} ms a step")
        for name in ("speed_of_two_ranks_over_two_threads", "speed_of_two_ranks_over_one_thread"):
            print(f"{method:14s} {name.replace('_', ' '):40s} {result[method][name]['median']:.2f}")
    save("ranks", {"rounds": rounds, "steps_per_turn": steps, "methods": result})


if __name__ == "__main__":
    main()
