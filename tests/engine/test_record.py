"""A recording gives the same plans again, the same tokens, and no words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tests.engine.test_equivalence import CONFIG, requests
from tests.engine.test_simulation import crowd, step_ms
from toque.build import Openings, assemble, load, recorded, schedule, worker_of
from toque.cli import main
from toque.config import EngineConfig
from toque.engine import EngineCore
from toque.ipc import InProcess
from toque.options import EngineOptions
from toque.record.disguise import Disguise
from toque.record.replay import Replay
from toque.record.tape import read
from toque.sim.device import Clock, Device
from toque.sim.run import VirtualPort
from toque.structured.grammars import Grammars
from toque.types import Abort, FinishReason, Hello, Request, SamplingParams, Shutdown


def config(path: Path, policy: str, **changed: object) -> EngineConfig:
    values = {
        "max_model_len": 96,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 96,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "kv_cache_dtype": "float32",
        "kv_bytes_per_token": 1,
        "block_size": 4,
        "total_pages": 40,
        "scheduling_policy": policy,
        "queue_timeout_s": 5.0,
        "record": str(path),
        "record_bytes": 1 << 26,
        **changed,
    }
    return EngineConfig(**values)  # type: ignore[arg-type]


HELLO = Hello(
    model_name="none",
    vocab_size=1024,
    max_model_len=96,
    end_token_ids=(0,),
    block_size=4,
    total_pages=96,
    max_num_seqs=16,
    max_num_batched_tokens=96,
    kv_cache_dtype="float32",
    fingerprint="virtual",
)


def record_a_crowd(made: EngineConfig, total: int = 400) -> int:
    """Returns the number of steps."""
    scheduler, cost = schedule(made, 1024, (0,))
    clock = Clock()
    port = VirtualPort(clock, crowd(total, seed=11))
    openings = recorded(Openings(port, Device(clock, step_ms, 1024), clock), made, HELLO)
    core = EngineCore(scheduler, openings.executor, openings.port, cost, openings.clock)
    while not port.over or scheduler.has_work:
        core.step(0.0 if scheduler.has_work else 1.0)
    openings.port.close()
    if total >= 400:
        assert scheduler.counters().preemptions > 0
    return scheduler.counters().steps


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
@pytest.mark.parametrize("prompts", [False, True])
def test_the_plans_are_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, prompts: bool
) -> None:
    path = tmp_path / "recording"
    steps = record_a_crowd(config(path, policy, record_prompts=prompts))
    assert main(["replay", str(path)]) == 0
    assert f"{steps} steps: the same plans" in capsys.readouterr().out


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("part", ["plan", "clock", "outcomes", "messages"])
def test_the_first_difference_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """A recording in which one thing was another: the scheduler would have done something else."""
    path = tmp_path / "recording"
    record_a_crowd(config(path, "slo"), total=60)
    lines = lines_of(path)
    turn = next(line for line in lines[5:] if line.get("plan") and line.get("messages"))
    if part == "plan":
        turn["plan"][2][0][2] += 1  # type: ignore[index]
    elif part == "clock":
        turn["clock"].pop()  # type: ignore[attr-defined]
    elif part == "messages":
        del turn["messages"]
    else:
        later = next(line for line in lines[5:] if line.get("outcomes"))
        later["outcomes"][0][3] = True  # type: ignore[index]  # it failed
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", str(path)]) == 1
    assert "the plans differ at turn" in capsys.readouterr().err


def test_a_recording_ends_at_its_size_and_what_is_there_replays(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    record_a_crowd(config(path, "fcfs", record_bytes=20_000))
    assert path.stat().st_size < 20_100
    assert lines_of(path)[-1] == {"type": "Full"}
    assert main(["replay", str(path)]) == 0
    path.write_bytes(path.read_bytes()[:9_999])  # the engine was killed while it wrote
    assert main(["replay", str(path)]) == 0


@pytest.mark.parametrize("content", [b"", b"{}\n", b"hello\n", b'{"type":"Turn"}\n'])
def test_other_files_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_an_engine_goes_on_when_its_recording_cannot(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    scheduler, cost = schedule(config(full, "fcfs"), 1024, (0,))
    clock = Clock()
    port = VirtualPort(clock, crowd(20, seed=1))
    device = Device(clock, step_ms, 1024)
    openings = recorded(Openings(port, device, clock), config(full, "fcfs"), HELLO)
    core = EngineCore(scheduler, openings.executor, openings.port, cost, openings.clock)
    while not port.over or scheduler.has_work:
        core.step(0.0 if scheduler.has_work else 1.0)
    assert port.ended == 20


def test_disguised_tokens_are_not_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording"
    record_a_crowd(config(path, "fcfs"), total=5)
    assert main(["replay", str(path), "--model", "smollm2"]) == 2
    assert "--record-prompts" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ tokens


def test_a_model_s_tokens_are_the_same_again(
    tiny_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiled kernels, twelve requests of all kinds in a tight pool, real tokens recorded."""
    loaded = load(tiny_config, EngineOptions(load_format="dummy", kernels="cpu"))
    path = tmp_path / "recording"
    channel = InProcess()
    tight = replace(
        CONFIG,
        max_num_batched_tokens=16,
        enable_prefix_caching=True,
        total_pages=20,
        record=str(path),
        record_bytes=1 << 26,
        record_prompts=True,
    )
    engine = assemble(loaded, tight, "tiny", channel.engine)
    for request in requests():
        channel.send(request)
    while engine.core.step() or engine.core.scheduler.has_work:
        channel.drain()
    channel.send(Shutdown())
    engine.core.run()
    engine.core._port.close()

    _, turns = read(path)
    again = Replay(turns, worker_of(loaded, tight, Grammars()))
    scheduler, cost = schedule(tight, loaded.model.spec.vocab_size, engine.hello.end_token_ids)
    core = EngineCore(scheduler, again, again, cost, again.clock)
    while not again.over:
        core.step()
        again.finish_turn()
    assert again.tokens == 12 * 24 and again.differing_tokens == 0
    assert scheduler.counters().preemptions > 0


# ----------------------------------------------------------------------------------- disguise


def drawn(rng: random.Random, number: int, prompt: list[int], salt: str = "") -> Request:
    sampling = SamplingParams(
        seed=1, max_tokens=4, stop_token_ids=(7,), logit_bias={900: 1.0}, bad_words=((901,),)
    )
    return Request(
        id=f"r{number}", prompt=tuple(prompt), sampling=sampling, arrived_s=0.0, cache_salt=salt
    )


def test_a_disguise_keeps_shared_beginnings_and_nothing_else() -> None:
    rng = random.Random(0)
    stem = [rng.randrange(20, 1000) for _ in range(50)]
    tails = [[rng.randrange(20, 1000) for _ in range(30)] for _ in range(2)]
    disguise = Disguise(151_000, (0, 1))
    a = disguise.request(drawn(rng, 1, stem + tails[0]))
    b = disguise.request(drawn(rng, 2, stem + tails[1]))
    other = disguise.request(drawn(rng, 3, stem + tails[1], salt="tenant"))
    assert a.prompt[:50] == b.prompt[:50]
    assert all(x != y for x, y in zip(a.prompt[50:], b.prompt[50:], strict=True))
    assert all(x != y for x, y in zip(b.prompt, other.prompt, strict=True))
    assert other.cache_salt and "tenant" not in other.cache_salt
    # One token a hundred times: a hundred looks, so their frequency tells nothing.
    same = disguise.request(drawn(rng, 4, [500] * 100))
    assert len(set(same.prompt)) == 100
    # A word list, a bias, a stop string: whatever could tell words is gone.
    assert a.sampling == SamplingParams(seed=1, max_tokens=4, stop_token_ids=(7,))
    # The next turn of a conversation continues what was said.
    said = [disguise.output("r1", token) for token in (33, 44, 55)]
    disguise.forget("r1")
    turn = disguise.request(drawn(rng, 5, [*stem, *tails[0], 33, 44, 55, 66]))
    assert list(turn.prompt[:83]) == [*a.prompt, *said]
    # What ends an output is itself; nothing else looks like it, in whatever request.
    assert disguise.output("r2", 7) == 7 and disguise.output("r2", 0) == 0
    assert min(a.prompt) >= 151_000
    # A request that went on elsewhere, its first words in its output.
    moved = structs.replace(drawn(rng, 6, stem), output=tuple(tails[0]))
    assert disguise.request(moved).output == a.prompt[50:]
    # No token of the model: none afterwards.
    assert disguise.request(drawn(rng, 7, [5, 151_000])).prompt[1] == -1
    # Two recordings disguise alike nothing.
    assert Disguise(151_000, ()).request(drawn(rng, 8, stem)).prompt[:9] != a.prompt[:9]


def test_different_tokens_look_different_in_the_smallest_vocabulary() -> None:
    """With a thousand tokens and looks as many, two siblings in a thousand would be one page."""
    disguise = Disguise(1024, (0,))
    rng = random.Random(0)
    for number in range(20):
        stem = [rng.randrange(1024) for _ in range(5)]
        family = [disguise.request(drawn(rng, number, [*stem, last])) for last in range(1024)]
        assert len({request.prompt for request in family}) == 1024
        # Not even a token that ends one request and not the other parts them.
        free = structs.replace(drawn(rng, number, [*stem, 0, 7]), sampling=SamplingParams())
        bound = drawn(rng, number, [*stem, 0, 7])
        assert disguise.request(free).prompt == disguise.request(bound).prompt


def test_no_token_of_a_prompt_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "recording"
    made = config(path, "fcfs")
    scheduler, cost = schedule(made, 1_000_000, (0,))
    clock = Clock()

    def stream() -> Iterator[tuple[float, Request | Abort]]:
        yield 0.0, drawn(random.Random(0), 1, [987_654, 987_655, 987_656])
        yield 0.1, Abort(id="r1", reason=FinishReason.STOP, kept_tokens=1)

    hello = structs.replace(HELLO, vocab_size=1_000_000)
    port = VirtualPort(clock, stream())
    device = Device(clock, step_ms, 1_000_000)
    openings = recorded(Openings(port, device, clock), made, hello)
    core = EngineCore(scheduler, openings.executor, openings.port, cost, openings.clock)
    while not port.over or scheduler.has_work:
        core.step(0.0 if scheduler.has_work else 1.0)
    openings.port.close()
    assert "98765" not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
