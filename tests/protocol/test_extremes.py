"""A learner that says everything it may say, with integers from the ends of their range and rows of every length.

Two honest learners and a rogue, in virtual time; all that the rogue says goes over the wire's own decoder first. At
every moment: no exception, no `handle` without end, all that is to be written, sent or told can be. Afterwards: the
honest learners are in the rounds, also of a term that goes on from what was written.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pytest

from atoll.fabric.wire import check_hello, decode_from_learner
from atoll.fabric.wire import encode as on_the_wire
from atoll.protocol import messages as msg
from atoll.protocol import tape
from atoll.protocol.effects import Note, Tick
from atoll.protocol.errors import PeerError
from atoll.protocol.history import History, HistoryState
from atoll.protocol.records import encode
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer

P = 4
MOST_EFFECTS = 50_000
"""Of one event; rounds that are passed over in a loop would make more."""
ENDS = (
    -(2**63),
    -(2**63),
    -(2**62),
    -(2**48),
    -1,
    0,
    1,
    2,
    100,
    2**31,
    2**47,
    2**48 - 1,
    2**48,
    2**62,
    2**63,
    2**64 - 1,
)
FLOATS = (0.0, 1.0, -1.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
WORDS = ("", "x", "honest-0", "rogue", "r", "y" * 1000)
HONEST, ROGUE = ("honest-0", "honest-1"), "rogue"


class Siege:
    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        settings = Settings(
            learners=2,
            fragments=P,
            sync_every=4,
            synchronous=dice.random() < 0.3,
            cut_every=dice.choice((0, 2, 5)),
            quorum=dice.choice((1, 2)),
            tokens=dice.choice((0, 10**9)),
        ).resolved(8)
        self.syncer = Syncer.fresh(settings, run="r", fingerprint="f")
        self.now, self.cut, self.extremes = 0.0, 0, 0
        self.pulls: list[tuple[str, msg.Pull]] = []
        self.tickets: dict[str, str] = {}
        self.held = {name: [0] * P for name in (*HONEST, ROGUE)}
        self.t = dict.fromkeys((*HONEST, ROGUE), 0)
        self.session = "s-0"
        self.tokens = (0,) * P
        """What the rogue says in its honest reports: it may never balance."""
        self.away: dict[str, int] = {}
        """Moments until an honest learner's line is back."""
        self.members: list[tuple[str, ...]] = []
        """Of the rounds so far."""
        for name in (*HONEST, ROGUE):
            self.tell(fx.Greeted(msg.Hello(protocol=2, learner=name, session=self.session)))
        self.tell(fx.Initialised(HONEST[0], self.session))
        for name in (*HONEST, ROGUE):
            self.tell(fx.Received(name, self.report(name)))

    # ---- the syncer and what becomes of its effects -----------------------------------------------------------------

    def tell(self, event: fx.SyncerEvent) -> None:
        waiting = deque([event])
        while waiting:
            effects = self.syncer.handle(self.now, waiting.popleft())
            assert len(effects) <= MOST_EFFECTS
            for effect in effects:
                waiting.extend(self.carry_out(effect))

    def carry_out(self, effect: fx.SyncerEffect) -> list[fx.SyncerEvent]:
        match effect:
            case fx.Persist(records):
                for record in records:
                    encode(record)
            case Note(_, text, data):
                msgspec.json.encode([text, data])
            case fx.Send(name, message):
                on_the_wire(message)
                self.hear(name, message)
            case fx.Merge(number, _, parts):
                self.members.append(tuple(part.learner for part in parts))
                return [fx.Merged(number, "d", 0.001, b"")]
            case fx.TakeCut(cut, history, first):
                msgspec.msgpack.encode(history)
                self.cut = cut
                return [] if first else [fx.CutKept(cut, "")]
            case fx.CompleteCut(cut):
                return [fx.CutWritten(cut, "m")]
        return []

    def hear(self, name: str, message: msg.FromSyncer) -> None:
        match message:
            case msg.Pull():
                self.pulls.append((name, message))
            case msg.Announce(fragment=fragment, version=version) if name in self.held:
                self.held[name][fragment] = version
            case msg.Help(ticket=ticket) | msg.Helped(ticket=ticket):
                self.tickets[name] = ticket

    # ---- honest learners ---------------------------------------------------------------------------------------------

    def life(self, name: str) -> int:
        known = self.syncer.members.learners.get(name)
        return known.incarnation if known is not None else 1

    def report(self, name: str) -> msg.Progress:
        t, held = self.t[name], tuple(self.held[name])
        ones, none = (min(t, 1),) * P, (0,) * P
        tokens = (0, *self.tokens[1:]) if name == ROGUE else none
        more: dict[str, Any] = {"incarnation": self.life(name), "offer": self.syncer.next_round, "aims": -1}
        return msg.Progress(
            t=t, steps=ones, tokens=tokens, versions=held, tokens_total=10 * t, dropped=none, counted=held, **more
        )

    def answer(self, name: str, pull: msg.Pull) -> msg.Contribution:
        known = {"run": "r", "learner": name, "incarnation": self.life(name), "term": self.syncer.history.term}
        base, t = self.held[name][pull.fragment], self.t[name]
        asked: dict[str, Any] = {"round": pull.round, "attempt": pull.attempt, "fragment": pull.fragment}
        return msg.Contribution(
            **asked, **known, base=base, t=t, steps=1, tokens=1, digest="d", total=10 * t, probe=pull.probe
        )

    def is_away(self, name: str) -> bool:
        if name in self.away:
            self.away[name] -= 1
            if not self.away[name]:
                del self.away[name]
                held = {"run": "r", "versions": tuple(self.held[name]), "incarnation": 1, "t": self.t[name], "term": 1}
                self.held[name] = list(self.syncer.versions)  # it fetches what it lacks
                self.tell(fx.Greeted(msg.Hello(protocol=2, learner=name, session="s-0", **held)))
        return name in self.away

    def work(self, *, breaks: bool = True) -> None:
        """A moment of the honest learners."""
        self.now += self.dice.choice((0.001, 0.01, 0.1, 0.5, 1.0))
        if not self.away and breaks and self.dice.random() < 0.02:
            self.away = {name: self.dice.randint(1, 9) for name in self.dice.choice((HONEST, HONEST[:1]))}
            for name in self.away:
                self.tell(fx.Lost(name, "its line broke"))
        for name in HONEST:
            if self.is_away(name):
                continue
            if self.dice.random() < 0.6:
                self.t[name] += 1
                self.tell(fx.Received(name, self.report(name)))
            else:
                self.tell(fx.Received(name, msg.Heartbeat()))
        for name, pull in [asked for asked in self.pulls if asked[0] in HONEST]:
            self.pulls.remove((name, pull))
            if name not in self.away:
                self.tell(fx.Delivered(name, self.answer(name, pull), None))
        del self.pulls[:-20]
        if self.syncer.wake_at is not None and self.syncer.wake_at <= self.now:
            self.tell(Tick())

    # ---- the rogue -----------------------------------------------------------------------------------------------

    def number(self, *likely: int) -> int:
        """Most messages are as an honest learner's but for one number: what is wrong all over is refused at once."""
        if self.extremes <= 0 or self.dice.random() > 0.2:
            return self.dice.choice(likely)
        self.extremes -= 1
        return self.dice.choice(ENDS)

    def row(self, likely: list[int]) -> tuple[int, ...]:
        length = P if self.dice.random() < 0.97 else self.dice.choice((0, 1, P - 1, P + 1, 50))
        return tuple(self.number(likely[place % P]) for place in range(length))

    def taped(self) -> dict[str, Any]:
        if self.dice.random() < 0.8:
            return {}
        entries = (
            tape.OwnedEntry(self.number(1)),
            tape.AdoptedEntry(self.number(1), self.number(0), self.number(1)),
            tape.SuppliedEntry(self.number(1), (self.number(0),)),
            tape.MarkedEntry(self.number(1), self.number(1)),
            tape.InformedEntry(self.number(1), self.number(2)),
        )
        return {"taped": self.number(0, 1, 2), "tape": tuple(self.dice.choices(entries, k=self.dice.randint(0, 3)))}

    def common(self) -> dict[str, Any]:
        clock = {self.dice.choice((*HONEST, "syncer", "nobody")): self.number(1)} if self.dice.random() < 0.3 else {}
        return {"clock": clock, "term": self.number(1, 1, 1), "cut": self.number(0)}

    def lies(self, honest: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
        """Another number in place of some of these."""
        lies: dict[str, Any] = {}
        for name in self.dice.sample(names, min(self.extremes, len(names))):
            told = honest[name]
            lies[name] = self.spoiled(told) if isinstance(told, tuple) else self.dice.choice(ENDS)
        return lies

    def spoiled(self, row: tuple[int, ...]) -> tuple[int, ...]:
        if self.dice.random() < 0.3:
            return (row * 20)[: self.dice.choice((0, 1, P - 1, P + 1, 50))]
        place = self.dice.randrange(P)
        return (*row[:place], self.dice.choice(ENDS), *row[place + 1 :])

    def progress(self) -> msg.Progress:
        self.t[ROGUE] += self.dice.choice((0, 1))
        honest, dice = msgspec.structs.asdict(self.report(ROGUE)), self.dice
        rows = ("steps", "tokens", "versions", "dropped", "counted")
        names = ("t", "offer", "aims", "tokens_total", "incarnation", "position")
        said = {**honest, **self.lies(honest, (*rows, *names, "offer", "aims")), **self.common(), **self.taped()}
        said |= {"busy_s": dice.choice(FLOATS), "loss": dice.choice((*FLOATS, None))}
        return msg.Progress(**{**said, "stopped": dice.random() < 0.05, "seeking": dice.random() < 0.05})

    def contribution(self) -> msg.Contribution:
        pulls = [pull for name, pull in self.pulls if name == ROGUE]
        pull = pulls[-1] if pulls else msg.Pull(round=0, attempt=1, fragment=0, gathering=0, deadline_s=1.0)
        honest = msgspec.structs.asdict(self.answer(ROGUE, pull))
        names = ("round", "attempt", "fragment", "base", "t", "steps", "tokens", "total", "position", "incarnation")
        return msg.Contribution(**{**honest, **self.lies(honest, (*names, "tokens", "total")), **self.taped()})

    def talk(self) -> msg.FromLearner:
        self.extremes = self.dice.choice((0, 1, 1, 1, 2, 100))
        dice, number, more = self.dice, self.number, self.common()
        word, ticket, reason = dice.choice(WORDS), self.tickets.get(ROGUE, "x"), dice.choice(("", "x"))
        match dice.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                return self.progress()
            case 7 | 8 | 9 | 10 | 11:
                return self.contribution()
            case 12:
                data = tuple((word, number(10, 100), dice.choice(FLOATS)) for _ in range(dice.randint(0, 2)))
                return msg.Register(datasets=data, epochs=number(0, 1), batch=number(1), **more)
            case 13:
                return msg.Decline(round=number(self.syncer.committed), attempt=number(1), reason=word, **more)
            case 14:
                life = number(self.life(ROGUE))
                return msg.CutSaved(
                    of=number(self.cut), incarnation=life, t=number(1), file=word, reason=reason, **more
                )
            case 15:
                return msg.Seek(after=number(0), **more)
            case 16:
                again, size = dice.random() < 0.5, number(1)
                return msg.Settled(ticket=ticket, peer=word, size=size, t=number(1), reason=reason, again=again, **more)
            case 17:
                return msg.Ready(ticket=ticket, size=number(10), digest=word, t=number(1), direct=word, **more)
            case 18:
                return msg.Unable(ticket=ticket, reason=word, **more)
            case _:
                return msg.Leave(reason=word, **more) if dice.random() < 0.2 else msg.Heartbeat(**more)

    def hello(self) -> msg.Hello:
        self.extremes = self.dice.choice((0, 0, 1, 2))
        self.tokens = (self.dice.choice((0, 1)),) * P
        self.session = self.dice.choice((self.session, self.session, f"s-{self.dice.randrange(9)}"))
        more = {"incarnation": self.number(self.life(ROGUE)), "t": self.number(self.t[ROGUE]), "term": self.number(1)}
        run, versions = self.dice.choice(("r", "r", "r", "x")), self.row(self.held[ROGUE])
        if self.dice.random() < 0.1:
            versions = versions[: self.dice.randrange(P)]
        return msg.Hello(
            protocol=2,
            learner=ROGUE,
            session=self.session,
            run=run,
            versions=versions,
            clock={"syncer": self.number(1), HONEST[0]: self.number(1)},
            **more,
        )

    def attack(self) -> None:
        """One thing of many that it may say; half of the time it is as honest as the others, to be asked at all."""
        chance, there = self.dice.random(), self.syncer.members.learners[ROGUE].connected
        mine = [asked for asked in self.pulls if asked[0] == ROGUE]
        if chance < 0.03:
            self.tell(fx.Lost(ROGUE, "gone"))
            return
        if there and 0.1 < chance < 0.35:
            self.t[ROGUE] += 1
            self.tell(fx.Received(ROGUE, self.report(ROGUE)))
            return
        if there and mine and 0.35 < chance < 0.5:
            self.pulls.remove(mine[-1])
            self.tell(fx.Delivered(ROGUE, self.answer(*mine[-1]), None))
            return
        message = self.hello() if not there or chance < 0.1 else self.talk()
        try:
            heard = decode_from_learner(on_the_wire(message))
            heard = check_hello(heard) if isinstance(heard, msg.Hello) else heard
        except PeerError:
            return
        if isinstance(heard, msg.Hello):
            self.t[ROGUE] = max(self.t[ROGUE], min(heard.t, 2**40))
            self.tell(fx.Greeted(heard))
        elif isinstance(heard, msg.Contribution):
            self.tell(fx.Delivered(ROGUE, heard, None))
        else:
            self.tell(fx.Received(ROGUE, heard))

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def stand(self) -> None:
        """The rogue is gone: both honest learners are in the rounds that follow."""
        self.tell(fx.Lost(ROGUE, "gone"))
        if self.syncer.phase == "running":
            before = len(self.members)
            for _ in range(100):
                self.work(breaks=False)
            assert len(self.members) > before + 10
            assert {name for members in self.members[-10:] for name in members} == set(HONEST)
        for name in HONEST:
            assert self.syncer.members.learners[name].incarnation == 1, "nobody held it against them"

    def go_on(self) -> None:
        """A later term reads what was written, and closes what is open."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.syncer.history.state()), type=HistoryState)
        self.syncer = Syncer(History.restore(state))
        self.tell(Tick())
        self.tell(fx.EndAsked("enough"))
        self.tell(fx.Over())


def besiege(seed: int, moments: int = 250) -> str:
    siege = Siege(seed)
    for _ in range(moments):
        siege.work()
        siege.attack()
    siege.stand()
    siege.go_on()
    return siege.syncer.phase


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in (1, 2, 3))])
def test_nothing_that_a_learner_says_ends_or_hangs_the_syncer(block: int) -> None:
    for seed in range(8 * block, 8 * block + 8):
        besiege(seed, 120)


@pytest.mark.faults
@pytest.mark.parametrize("block", range(20))
def test_nothing_that_a_learner_says_ends_or_hangs_the_syncer_for_long(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        besiege(seed)
