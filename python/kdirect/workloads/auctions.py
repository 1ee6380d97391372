"""NEXMark: persons, auctions and bids of an online auction house, and queries 7, 8 and 11.

Ids follow the rules of the public generator (github.com/nexmark/nexmark).  Events have numbers; of
50 in a row the first is a person, the next 3 are auctions and the other 46 bids.  Person and
auction ids are counted from 1000 on.  A bid is on a hot auction with a chance of 1 - 1/2, namely
the first of the last 100 that was begun; else on one of the last 101 or of 10 that are yet to come.
It is by a hot bidder, the second of the last 100 persons begun, with a chance of 1 - 1/4; else by
one of the 1000 persons that are active or of 10 to come.  An auction's seller is hot, the first of
the last 100 persons begun, with a chance of 1 - 1/4.

With `paper=True` the streams are as in the Slash paper instead: four auctions and four bids a
person, whose sellers and bidders are persons that are there already, all equally likely.  With
`pareto` or `zipf`, bids are on auctions of `keys` ids with this distribution, as the paper has it
for query 7.

Records have the sizes of the paper: 32, 206 and 269 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kdirect.errors import ConfigError
from kdirect.format.fixed_layout import FixedLayout
from kdirect.state.aggregates import Aggregate
from kdirect.state.plan import AggregatePlan, JoinPlan
from kdirect.state.windows import Session, Tumbling, duration_us
from kdirect.workloads.generate import Filler
from kdirect.workloads.workload import EventTime, Keys, Stream, Workload, check_number

BID = FixedLayout.of("bidder:int64", "auction:int64", "price:float64", "time:timestamp(ms)")
PERSON = FixedLayout.of(
    "id:int64",
    "name:string[32]",
    "email:string[32]",
    "credit_card:string[32]",
    "city:string[32]",
    "state:string[32]",
    "income:int64",
    "rating:int64",
    "zip:int32",
    "age:int32",
    "country:int32",
    "flags:int16",
    "time:timestamp(ms)",
)
AUCTION = FixedLayout.of(
    "id:int64",
    "seller:int64",
    "condition:int8",
    "category:int32",
    "start:timestamp(ms)",
    "end:timestamp(ms)",
    "quantity:int32",
    "item:string[20]",
    "description:string[200]",
    "time:timestamp(ms)",
)
assert (BID.size, PERSON.size, AUCTION.size) == (32, 206, 269)

FIRST_ID = 1000
FIRST_CATEGORY = 10
CATEGORIES = 5
ACTIVE_PERSONS = 1000
EVERYBODY = 1 << 40
AUCTIONS_IN_FLIGHT = 100
LEAD = 10
HOT_AUCTIONS, HOT_BIDDERS, HOT_SELLERS = 2, 4, 4
STEP_US = 100  # 10,000 events a second

STATES = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES = (
    "Phoenix", "Los Angeles", "San Francisco", "Boise", "Portland", "Bend", "Redmond", "Seattle",
    "Kent", "Cheyenne",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """The rules of one auction house, and what fills its streams by them."""

    when: EventTime
    of_epoch: tuple[int, int, int]  # persons, auctions and bids of so many events in a row
    skewed: Keys | None  # how auctions are chosen in place of the rules
    active_persons: int
    lead: int
    hot_auctions: int
    hot_bidders: int
    hot_sellers: int
    session: Session

    @property
    def persons(self) -> tuple[int, int, int]:
        return (self.of_epoch[0], 0, sum(self.of_epoch))

    @property
    def auctions(self) -> tuple[int, int, int]:
        return (self.of_epoch[1], self.of_epoch[0], sum(self.of_epoch))

    @property
    def bids(self) -> tuple[int, int, int]:
        return (self.of_epoch[2], sum(self.of_epoch[:2]), sum(self.of_epoch))

    # -- records -----------------------------------------------------------------------------------

    def _person(self, filler: Filler, name: str, mixture: Any, hot: int, hot_at: int) -> None:
        filler.references(
            name,
            mixture,
            self.persons[:2],
            FIRST_ID,
            hot=hot,
            hot_at=hot_at,
            active=self.active_persons,
            lead=self.lead,
        )

    def fill_bid(self, filler: Filler) -> None:
        self._person(filler, "bidder", self.bids, self.hot_bidders, 1)
        if self.skewed is not None:
            self.skewed.fill(filler, "auction", FIRST_ID)
        else:
            filler.references(
                "auction",
                self.bids,
                self.auctions[:2],
                FIRST_ID,
                hot=self.hot_auctions,
                hot_at=0,
                active=AUCTIONS_IN_FLIGHT + 1,
                lead=self.lead,
            )
        filler.prices("price")
        filler.times("time", self.when, self.bids)

    def fill_person(self, filler: Filler) -> None:
        filler.index("id", FIRST_ID)
        filler.letters("name", 12)
        filler.letters("email", 16)
        filler.letters("credit_card", 16)
        filler.choice("city", CITIES)
        filler.choice("state", STATES)
        filler.uniform("income", 10_000, 190_000)
        filler.uniform("rating", 0, 100)
        filler.uniform("zip", 10_000, 90_000)
        filler.uniform("age", 18, 72)
        filler.uniform("country", 0, 200)
        filler.uniform("flags", 0, 16)
        filler.times("time", self.when, self.persons)

    def fill_auction(self, filler: Filler) -> None:
        filler.index("id", FIRST_ID)
        self._person(filler, "seller", self.auctions, self.hot_sellers, 0)
        filler.uniform("condition", 0, 4)
        filler.uniform("category", FIRST_CATEGORY, CATEGORIES)
        on_time = EventTime(start_us=self.when.start_us, step_us=self.when.step_us)
        filler.times("start", on_time, self.auctions)
        closing = _closing(on_time, sum(self.of_epoch), self.of_epoch[1])
        filler.times("end", closing, self.auctions)
        filler.uniform("quantity", 1, 10)
        filler.letters("item", 20)
        filler.letters("description", 200)
        filler.times("time", self.when, self.auctions)

    # -- queries -----------------------------------------------------------------------------------

    def nb7(self, read: Any) -> AggregatePlan:
        return AggregatePlan(
            input=read("bid"),
            keys=("auction",),
            window=Tumbling(size_us=duration_us("60 seconds", "window")),
            aggregates=(Aggregate(kind="max", column="price"),),
        )

    def nb8(self, read: Any) -> JoinPlan:
        return JoinPlan(
            left=read("person"),
            right=read("auction"),
            left_keys=("id",),
            right_keys=("seller",),
            window=Tumbling(size_us=duration_us("12 hours", "window")),
            columns=((0, "id", "person"), (0, "name", "name"), (1, "id", "auction")),
        )

    def nb11(self, read: Any) -> JoinPlan:
        return JoinPlan(
            left=read("bid"),
            right=read("person"),
            left_keys=("bidder",),
            right_keys=("id",),
            window=self.session,
            columns=((0, "bidder", "bidder"), (0, "auction", "auction"), (0, "price", "price")),
        )

    def q11(self, read: Any) -> AggregatePlan:
        return AggregatePlan(
            input=read("bid"),
            keys=("bidder",),
            window=self.session,
            aggregates=(Aggregate(kind="count"),),
        )


def nexmark(
    *,
    paper: bool = False,
    keys: int = 1_000_000,
    zipf: float | None = None,
    pareto: float | None = None,
    active_persons: int | None = None,
    hot_auctions: int = HOT_AUCTIONS,
    hot_bidders: int = HOT_BIDDERS,
    hot_sellers: int = HOT_SELLERS,
    seed: int = 1,
    step_us: int = STEP_US,
    session_gap: str = "10 seconds",
    **times: Any,
) -> Workload:
    """The streams `bid`, `person` and `auction`; the queries `nb7`, `nb8`, `nb11` and `q11`.

    `hot_auctions` and so on: one of so many is not hot; 1 means that none is.  `step_us` is the
    time between two events of any stream."""
    if not isinstance(paper, bool):
        raise ConfigError(f"paper={paper!r} is neither", hint="give true or false")
    if active_persons is None:
        active_persons = EVERYBODY if paper else ACTIVE_PERSONS
    for name, value in (
        ("hot_auctions", hot_auctions), ("hot_bidders", hot_bidders), ("hot_sellers", hot_sellers),
        ("active_persons", active_persons),
    ):  # fmt: skip
        check_number(name, value, 1, EVERYBODY)
    check_number("step_us", step_us, 0, EVERYBODY)
    skewed = Keys(range=keys, zipf=zipf, pareto=pareto)
    house = House(
        when=EventTime(step_us=step_us, **times),
        of_epoch=(1, 4, 4) if paper else (1, 3, 46),
        skewed=skewed if zipf or pareto else None,
        active_persons=active_persons,
        lead=0 if paper else LEAD,
        hot_auctions=1 if paper else hot_auctions,
        hot_bidders=1 if paper else hot_bidders,
        hot_sellers=1 if paper else hot_sellers,
        session=Session(gap_us=duration_us(session_gap, "session_gap")),
    )
    streams = (
        ("bid", BID, house.fill_bid, house.bids),
        ("person", PERSON, house.fill_person, house.persons),
        ("auction", AUCTION, house.fill_auction, house.auctions),
    )
    return Workload(
        name="nexmark",
        streams={
            name: Stream(name=name, layout=layout, fill=fill, seed=seed, mixture=mixture)
            for name, layout, fill, mixture in streams
        },
        queries={"nb7": house.nb7, "nb8": house.nb8, "nb11": house.nb11, "q11": house.q11},
    )


def _closing(when: EventTime, total: int, auctions: int) -> EventTime:
    """When auctions end: on average after AUCTIONS_IN_FLIGHT more were opened, at most twice as
    late."""
    longest = 2 * when.step_us * AUCTIONS_IN_FLIGHT * total // auctions
    return EventTime(
        start_us=when.start_us + longest, step_us=when.step_us, disorder_us=max(0, longest - 1)
    )
