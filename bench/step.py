"""`python -m bench.step MODEL`: where the time of a decode step goes, and how much is not kernels.

The engine steps as it does behind the server, its channel's other end read between steps. All that
is in a native call counts as kernels; the rest of a step is plan, batch, what else the worker does,
commit, channel, and what lies between them. Medians over many steps; one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

import toque.types
import toque.worker.worker
from bench.machine import describe_machine
from toque.build import Engine, assemble, configure, load
from toque.files.fetch import locate
from toque.ipc import ZmqEngineEnd
from toque.options import EngineOptions
from toque.types import Request, SamplingParams

PROMPT_TOKENS = 32
WARM_STEPS = 10
STAGES = ("plan", "batch", "native", "run", "commit", "receive", "send")
WAYS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True, seed=0),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, seed=0),
}


class Times:
    """Milliseconds per stage of the step that runs now."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys(STAGES, 0.0)

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            t0 = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.ms[stage] += (time.perf_counter() - t0) * 1e3

        return timed

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        setattr(owner, name, self.around(stage, getattr(owner, name)))

    def take(self) -> dict[str, float]:
        taken, self.ms = self.ms, dict.fromkeys(STAGES, 0.0)
        return taken


class TimedBackend:
    """The extension's Backend, each call of it timed as `native`."""

    def __init__(self, backend: Any, times: Times) -> None:
        self._backend, self._times = backend, times

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._backend, name)
        if callable(value):
            value = self._times.around("native", value)
            setattr(self, name, value)
        return value


class Bench:
    """An engine with a stopwatch around everything that it calls, and the other ends of its
    channel."""

    def __init__(self, model: str, options: EngineOptions, folder: Path) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to_engine, self._from_engine = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._to_engine.connect(f"ipc://{folder}/to-engine")
        self._from_engine.bind(f"ipc://{folder}/from-engine")
        self._times = Times()
        loaded = load(locate(model).path, options)
        ops: Any = loaded.ops
        if hasattr(ops, "backend"):
            ops.backend = TimedBackend(ops.backend, self._times)
        port = ZmqEngineEnd(folder)
        self.engine: Engine = assemble(loaded, configure(loaded, options), model, port)
        core: Any = self.engine.core
        self._times.wrap(port, "receive", "receive")
        self._times.wrap(port, "send", "send")
        self._times.wrap(core.scheduler, "plan", "plan")
        self._times.wrap(core.scheduler, "commit", "commit")
        self._times.wrap(core._executor, "run", "run")
        self._times.wrap(toque.worker.worker, "build_batch", "batch")

    def measure(self, sequences: int, sampling: SamplingParams, steps: int) -> dict[str, float]:
        """Medians over `steps` decode steps of so many sequences."""
        core = self.engine.core
        for number in range(sequences):
            prompt = tuple(3 + (number * 31 + place) % 200 for place in range(PROMPT_TOKENS))
            request = Request(id=f"{number}", prompt=prompt, sampling=sampling, arrived_s=0)
            self._to_engine.send(msgspec.msgpack.encode(request))
        running = core.scheduler._sequences
        while len(running) < sequences or any(s.num_output < WARM_STEPS for s in running.values()):
            core.step()
        taken = []
        for _ in range(steps):
            self._times.take()
            t0 = time.perf_counter()
            core.step()
            step_ms = (time.perf_counter() - t0) * 1e3
            taken.append({"step": step_ms, **self._times.take()})
            while self._from_engine.poll(0):
                self._from_engine.recv()
        core.scheduler.abort_all(toque.types.FinishReason.ABORT, 0.0)
        return summary(taken)


def summary(taken: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of what was measured and of what follows from it, milliseconds."""
    for ms in taken:
        ms["outside"] = ms["step"] - ms["native"]
        ms["worker"] = ms["run"] - ms["batch"] - ms["native"]
        ms["channel"] = ms["receive"] + ms["send"]
        ms["between"] = ms["step"] - ms["plan"] - ms["run"] - ms["commit"] - ms["channel"]
    names = ("step", "native", "outside", "plan", "batch", "worker", "commit", "channel", "between")
    medians = {f"{name}_ms": statistics.median(ms[name] for ms in taken) for name in names}
    share = statistics.median(ms["outside"] / ms["step"] for ms in taken)
    return {name: round(value, 4) for name, value in {**medians, "outside_share": share}.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table on standard error and a JSON line on standard output."""
    options = parser().parse_args(arguments)
    engine_options = EngineOptions(threads=options.threads, kernels=options.kernels)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options.model, engine_options, Path(folder))
        for sequences in options.sequences:
            for way, sampling in WAYS.items():
                found = bench.measure(sequences, sampling, options.steps)
                rows.append({"sequences": sequences, "sampling": way, **found})
                print(rows[-1], file=sys.stderr)
    kernels = bench.engine.hello.fingerprint
    line = {"bench": "step", "model": options.model, "kernels": kernels, "rows": rows}
    print(json.dumps(line | {"machine": describe_machine()}))
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=200, help="decode steps per row")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kernels", default="auto", help="auto, cpu or ref")
    return parser


if __name__ == "__main__":
    sys.exit(main())
