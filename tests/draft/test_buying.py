"""When a draft model is asked: what a forward and the reading of a context may cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftwood.draft.horizon import Horizon
from draftwood.draft.hybrid import AutoDrafter, DraftSource
from draftwood.draft.pace import Pace
from draftwood.engine.costs import CostModel
from draftwood.tree.shape import CostTable
from tests.draft.test_contract import DRAFT, PARAMS, VOCAB, Hand
from tests.tiny import CountingModel

PROMPT = [1 + i % 7 * i % 11 for i in range(60)]


def test_the_rest_of_an_answer_follows_the_answers_before_it() -> None:
    horizon = Horizon()
    assert horizon.rest(0, 100) == 100
    assert horizon.rest(90, 100) == 10
    for _ in range(50):
        horizon.observe(12)
    assert horizon.rest(0, 100) < 16
    # It is longer than all those: they say nothing of it.
    assert horizon.rest(12, 100) == 88
    assert horizon.rest(4, 5) == 1
    assert horizon.rest(9, 5) == 0


def test_only_the_last_answers_count() -> None:
    horizon = Horizon()
    for length in [12] * 100 + [90] * 64:
        horizon.observe(length)
    assert horizon.rest(0, 100) > 85


def test_a_pace_learns_a_base_and_a_slope() -> None:
    pace = Pace()
    assert pace.at(0)(500) == 0
    pace.observe(4, 0, 1.0)
    pace.observe(108, 0, 3.0)
    assert pace.at(7)(8) == 1.0
    assert pace.at(0)(58) == pytest.approx(2.0)


class Scene:
    """One sequence under an `AutoDrafter` whose model has known costs; the clock stands still.

    Args:
        read_s: what reading the prompt takes, where a target's forward takes 1.
        max_tokens: of the request.
        past: lengths of earlier answers.
        forward_s: what one forward of the draft model takes.
    """

    def __init__(
        self,
        read_s: float,
        max_tokens: int = 40,
        past: tuple[int, ...] = (),
        forward_s: float = 0.01,
    ) -> None:
        self.hand = Hand("auto")
        self.model = CountingModel(DRAFT)
        rows = len(PROMPT)
        table = CostTable((1, 8, 8 + rows), (forward_s, forward_s, forward_s + read_s))
        source = DraftSource(self.model, self.hand.pool, VOCAB, CostModel(table, table, 0))
        self.drafter = AutoDrafter(source, clock=lambda: 0.0)
        self.drafter.prices(lambda rows, context: 1.0)
        self.hand.drafter = self.drafter
        self.params = PARAMS.but(max_tokens=max_tokens, temperature=0.0)
        for i, length in enumerate(past):
            self.stop_another(f"past{i}", length, finished=True)
        self.seq = self.hand.start(PROMPT, "r", self.params)

    def stop_another(self, name: str, length: int, *, finished: bool) -> None:
        """Another sequence comes and goes, after so many tokens of an answer."""
        seq = self.hand.start(PROMPT[:2], name, self.params)
        seq.tokens[seq.num_prompt_tokens :] = [1] * length
        if finished:
            seq.finish("stop")
        self.drafter.stop(seq)
        seq.lease.close()

    def rounds_until_read(self, most: int) -> int | None:
        """Rounds before the model is asked; None if it is not within `most`."""
        for i in range(most):
            self.model.clear()
            self.hand.round([self.seq], budget=4)
            if self.model.num_rows:
                return i
        return None


def test_a_measured_cost_is_known_before_the_first_forward() -> None:
    """The first prompt of a process was read whatever it cost, as nothing had been timed yet."""
    assert Scene(read_s=0.2).rounds_until_read(3) == 0
    assert Scene(read_s=3.0).rounds_until_read(1) is None


def test_a_context_is_read_when_missing_it_has_cost_a_share_of_that() -> None:
    waits = [Scene(read_s=seconds).rounds_until_read(9) for seconds in (0.2, 1.5, 3.0)]
    assert waits[0] == 0
    assert waits[1] is not None
    assert waits[2] is not None
    assert 0 < waits[1] < waits[2]


@pytest.mark.parametrize(
    "scene",
    [
        lambda: Scene(read_s=3.0, max_tokens=16),
        lambda: Scene(read_s=3.0, past=(24,) * 30),
    ],
    ids=["limit", "short answers before"],
)
def test_a_context_is_not_read_for_a_few_tokens_more(scene: Callable[[], Scene]) -> None:
    """A prompt was read into the draft's KV just when its answer ended: 0.70 of plain speed."""
    assert Scene(read_s=3.0).rounds_until_read(8) is not None
    assert scene().rounds_until_read(8) is None


def test_a_probe_reads_no_context_that_takes_long() -> None:
    """After 32 rounds without the model it was asked once, though its prompt took 17 forwards."""
    scene = Scene(read_s=30.0, max_tokens=180)
    assert scene.rounds_until_read(45) is None
    dear = Scene(read_s=0.5, forward_s=9.0, max_tokens=180)
    assert dear.rounds_until_read(45) == 32


def test_an_answer_that_was_put_back_has_not_ended() -> None:
    """A request that makes room for others is stopped in the middle: its length says nothing."""
    scene = Scene(read_s=3.0)
    for i in range(30):
        scene.stop_another(f"back{i}", 24, finished=False)
    assert scene.rounds_until_read(8) is not None
