"""The front's side without Ray: replicas that die, refuse, disagree or are not there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.sampling import SamplingParams
from draftwood.serve.errors import ApiError
from draftwood.serve.generation import Ending, Generation, Outbox, Piece
from draftwood.serve.router import Router

pytest.importorskip("ray", reason="pip install 'draftwood[ray]'")

from draftwood.deploy.ray.fleet import Fleet, FleetLimits, ReplicaLostError
from draftwood.deploy.ray.messages import Accepted, Job, Message, Refusal, Status, Told
from draftwood.deploy.ray.progress import Progress
from draftwood.deploy.ray.watch import Watch, merged

ENDING = Ending("length", None, 3, 12, 0, {}, None, None)


def text_of(job: Job) -> list[int]:
    """What any replica says to a job: a function of it alone."""
    rng = random.Random(f"{job.prompt_ids}:{job.params.seed}")
    return [rng.randrange(26) for _ in range(job.params.max_tokens or 1)]


class Actors:
    """Replicas that answer from a script. `dies[name]`: after how many tokens of each job."""

    def __init__(self, names: str = "ab") -> None:
        self.names = frozenset(names)
        self.dies: dict[str, int] = {}
        self.refuses: dict[str, Refusal] = {}
        self.jobs: list[Job] = []
        self.given_up = 0

    async def generate(self, job: Job) -> AsyncGenerator[Message]:
        """Pieces of one to three tokens, so that no two tries cut a text alike."""
        self.jobs.append(job)
        rng, last = random.Random(len(self.jobs)), self.dies.get(job.replica, 10**9)
        if job.replica in self.refuses:
            yield self.refuses[job.replica]
            return
        text, start = text_of(job), 0
        try:
            yield Accepted()
            while start < len(text):
                await asyncio.sleep(0)
                stop = min(start + rng.randint(1, 3), len(text), last)
                if start == last:
                    raise ReplicaLostError("killed")
                ids = text[start:stop]
                shown = "".join(chr(97 + one) for one in ids)
                ending = ENDING if stop == len(text) else None
                yield Told([Piece(job.first_index, shown, ids, [], list(ids), ending)])
                start = stop
        except (GeneratorExit, asyncio.CancelledError):
            self.given_up += 1
            raise


def run(test: Callable[[], Awaitable[None]]) -> None:
    """A test on a loop of its own."""

    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


def fleet_of(actors: Actors, **limits: float) -> Fleet:
    """A fleet that knows all of them."""
    fleet = Fleet(actors, Router(), FleetLimits(**limits))  # type: ignore[arg-type]
    fleet.members(actors.names)
    return fleet


def generation(**changes: object) -> Generation:
    """A prompt of three tokens and twelve to come."""
    params = SamplingParams(max_tokens=12, temperature=1.0)
    one = Generation("g", [1, 2, 3], params, Outbox(asyncio.get_running_loop()))
    for name, value in changes.items():
        setattr(one, name, value)
    return one


async def read(one: Generation) -> list[Piece]:
    """All that its reader gets."""
    await one.outbox.accepted()
    pieces: list[Piece] = []
    while not pieces or pieces[-1].ending is None:
        pieces += (await one.outbox.take()).pieces
    return pieces


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_a_stream_goes_on_when_its_replica_dies(after: int) -> None:
    async def test() -> None:
        actors = Actors()
        fleet = fleet_of(actors)
        one = generation()
        fleet.submit([one])
        first = fleet.router.choose(fleet.router.prompt([1, 2, 3])).replica
        actors.dies[first] = after
        pieces = await read(one)
        ids = [token for piece in pieces for token in piece.token_ids]
        assert len(actors.jobs) == 2
        assert ids == text_of(actors.jobs[0])
        assert "".join(piece.text for piece in pieces) == "".join(chr(97 + i) for i in ids)
        assert [i for piece in pieces for i in piece.offsets] == ids
        # Nobody gave a seed: the first try and the second had the same all the same.
        assert actors.jobs[0].params.seed == actors.jobs[1].params.seed is not None
        assert actors.jobs[0].replica != actors.jobs[1].replica
        await asyncio.sleep(0)
        assert fleet.num_open == 0
        assert fleet.num_retries == 1
        assert all(fleet.router.requests(name) == 0 for name in "ab")

    run(test)


def test_two_requests_get_two_seeds() -> None:
    async def test() -> None:
        actors = Actors()
        fleet = fleet_of(actors)
        for one in (generation(), generation()):
            fleet.submit([one])
            await read(one)
        assert len({job.params.seed for job in actors.jobs}) == 2

    run(test)


def test_when_all_replicas_die_the_reader_hears_it() -> None:
    async def test() -> None:
        actors = Actors("abc")
        actors.dies = dict.fromkeys("abc", 2)
        fleet = fleet_of(actors, max_tries=3)
        one = generation()
        fleet.submit([one])
        with pytest.raises(ApiError, match="lost") as error:
            await read(one)
        assert error.value.status_code == 503
        assert len({job.replica for job in actors.jobs}) == 3
        await asyncio.sleep(0)
        assert fleet.num_open == 0

    run(test)


def test_a_request_waits_for_a_replica_to_come() -> None:
    async def test() -> None:
        fleet = fleet_of(Actors(""))
        one = generation()
        fleet.submit([one])
        await asyncio.sleep(0.05)
        fleet.members(frozenset("a"))
        assert len(await read(one)) > 0
        hopeless = generation()
        none = fleet_of(Actors(""), patience_s=0.05)
        none.submit([hopeless])
        with pytest.raises(ApiError, match="no replica"):
            await read(hopeless)

    run(test)


@pytest.mark.parametrize("code", ["engine_failed", "queue_full"])
def test_refusals(code: str) -> None:
    """An engine that failed is left for another; what the request is to blame for is passed on."""

    async def test() -> None:
        actors = Actors()
        fleet = fleet_of(actors)
        one = generation()
        fleet.submit([one])
        first = fleet.router.choose(fleet.router.prompt([1, 2, 3])).replica
        actors.refuses[first] = Refusal.of(ApiError(429, "no", code=code, headers={"a": "b"}))
        if code == "engine_failed":
            assert [t for p in await read(one) for t in p.token_ids] == text_of(actors.jobs[1])
            return
        with pytest.raises(ApiError) as error:
            await read(one)
        assert (error.value.status_code, error.value.code) == (429, code)
        assert error.value.headers == {"a": "b"}

    run(test)


def test_replicas_that_disagree_end_the_stream_in_an_error() -> None:
    async def test() -> None:
        class Strange(Actors):
            """Other machines, other texts."""

            async def generate(self, job: Job) -> AsyncGenerator[Message]:
                own = job.params.but(seed=len(self.jobs))
                async for message in super().generate(replace(job, params=own)):
                    yield message

        actors = Strange()
        actors.dies = {"a": 6, "b": 12}
        fleet = fleet_of(actors)
        ones = [generation() for _ in range(4)]
        fleet.submit(ones)
        failed = [
            isinstance(r, ApiError)
            for r in await asyncio.gather(*map(read, ones), return_exceptions=True)
        ]
        assert any(failed)

    run(test)


def test_cancelling_ends_the_job() -> None:
    async def test() -> None:
        actors = Actors()
        fleet = fleet_of(actors)
        one = generation(params=SamplingParams(max_tokens=10_000))
        fleet.submit([one])
        await one.outbox.accepted()
        fleet.cancel([one])
        fleet.cancel([one, generation()])
        await asyncio.sleep(0.05)
        assert actors.given_up == 1
        assert fleet.num_open == 0
        assert all(fleet.router.requests(name) == 0 for name in "ab")

    run(test)


def test_time_that_is_up() -> None:
    async def test() -> None:
        fleet = fleet_of(Actors(""))
        one = generation(deadline=monotonic() + 0.05)
        fleet.submit([one])
        with pytest.raises(ApiError, match="time is up"):
            await read(one)
        late = generation(deadline=monotonic() - 1)
        fleet.submit([late])
        with pytest.raises(ApiError, match="time is up"):
            await read(late)

    run(test)


def test_limits_and_the_end() -> None:
    async def test() -> None:
        fleet = fleet_of(Actors(), per_replica=3)
        with pytest.raises(ApiError, match="4 texts") as error:
            fleet.submit([generation(params=SamplingParams(n=4))])
        assert error.value.status_code == 400
        ones = [generation() for _ in range(6)]
        fleet.submit(ones)
        with pytest.raises(ApiError, match="full") as error:
            fleet.submit([generation()])
        assert error.value.status_code == 429
        fleet.fail_all(ApiError(503, "cut"))
        for one in ones:
            with pytest.raises(ApiError, match="cut"):
                await read(one)
        await asyncio.sleep(0.01)
        assert fleet.num_open == 0
        fleet.stop()
        assert not fleet.alive
        with pytest.raises(ApiError, match="shutting down"):
            fleet.submit([generation()])

    run(test)


@given(st.lists(st.integers(0, 25), min_size=1, max_size=12), st.data())
def test_whatever_is_cut_where_the_reader_gets_each_part_once(
    ids: list[int], data: st.DataObject
) -> None:
    progress, got = Progress(), list[Piece]()
    for num in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
        progress.again()
        got += _play(progress, ids, num, data, ends=False)
    progress.again()
    got += _play(progress, ids, len(ids), data, ends=True)
    assert [t for piece in got for t in piece.token_ids] == ids
    assert [t for piece in got for t in piece.offsets] == ids
    assert "".join(piece.text for piece in got) == "".join(chr(97 + i) * 2 for i in ids)
    assert [piece.ending for piece in got if piece.ending] == [ENDING]
    assert progress.num_outputs_ended == 1


def _play(
    progress: Progress, ids: list[int], num: int, data: st.DataObject, *, ends: bool
) -> list[Piece]:
    """A try that comes so far, cut at random places; text may lag behind tokens."""
    pieces, start, chars = [], 0, 0
    text = "".join(chr(97 + i) * 2 for i in ids)
    while start < num or (ends and not pieces):
        stop = data.draw(st.integers(start + 1, num)) if start < num else num
        last = stop == num
        shown = 2 * stop if last and ends else data.draw(st.integers(chars, 2 * stop))
        piece = Piece(0, text[chars:shown], ids[start:stop], [], ids[start:stop])
        piece.ending = ENDING if last and ends else None
        fresh = progress.fresh(piece)
        pieces += [fresh] if fresh else []
        start, chars = stop, shown
    return pieces


def test_metrics_of_several_replicas_are_one_exposition() -> None:
    text = (
        '# HELP a_total A "count".\n# TYPE a_total counter\na_total{engine="0",x="q\\"\\n"} 2.0\n'
        "# HELP b B.\n# TYPE b gauge\nb 1.5\n"
    )
    both = merged({"r1": text, "r2": text})
    assert both.count("# TYPE a_total counter") == 1
    assert 'a_total{engine="r1",x="q\\"\\n"} 2.0' in both
    assert 'b{engine="r2"} 1.5' in both
    assert merged({}) == ""


def test_the_watch_tells_the_router_and_prometheus() -> None:
    async def test() -> None:
        fleet = fleet_of(Actors())

        async def ask(name: str) -> Status:
            if name == "b":
                raise ReplicaLostError("gone")
            return Status(num_open=7, num_waiting_tokens=100, metrics=b"# TYPE b gauge\nb 1.5\n")

        watch = Watch(fleet, ask)
        await watch.once()
        assert fleet.router.requests("a") == 7
        assert fleet.router.requests("b") == 0
        body = watch.render()[0].decode()
        assert 'b{engine="a"} 1.5' in body
        assert "draftwood:replicas 2" in body
        fleet.members(frozenset("b"))
        await watch.once()
        assert "engine" not in watch.render()[0].decode()

    run(test)
