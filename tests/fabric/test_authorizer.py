"""Who is let in: by the header that is shown, the path that is asked for, and the run that the link is of."""

from __future__ import annotations

import base64
import hashlib
import time
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from aiohttp import web
from multidict import CIMultiDict

from atoll.fabric.authorizer import NOBODY, OpenAuthorizer, Rejected, TokenAuthorizer, Visitor
from atoll.fabric.join_tokens import JoinToken, JoinTokens, NameOwners, roles_for
from atoll.protocol.errors import PeerError


def named(id: str, **more: object) -> JoinToken:
    secret = hashlib.sha256(id.encode()).hexdigest()  # the same in every process of the tests
    return msgspec.convert({"id": id, "secret": secret, **more}, JoinToken)


LEARNER = named("join", learner="eu-*", most=2)
VIEWER = named("look", role="viewer")
EVALUATOR = named("score", role="evaluator")
RELAY = named("north", role="relay")
OPERATOR = named("boss", role="operator")
REVOKED = named("gone", revoked=True)
OVER = named("over", expires=1.0)
ALL = JoinTokens([LEARNER, VIEWER, EVALUATOR, RELAY, OPERATOR, REVOKED, OVER])
DOOR = TokenAuthorizer(lambda: ALL, lambda: "r1")


def asks(path: str = "/v1/status", *authorization: str, **more: str) -> web.Request:
    shown = [("Authorization", value) for value in authorization]
    headers = CIMultiDict([*shown, *((key.replace("_", "-"), value) for key, value in more.items())])
    cookies = dict(one.split("=", 1) for one in headers.getall("Cookie", []))
    return cast(web.Request, SimpleNamespace(path=path.partition("?")[0], headers=headers, cookies=cookies))


def bearer(token: JoinToken) -> str:
    return f"Bearer {token.secret}"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def refusal(request: web.Request, door: TokenAuthorizer = DOOR) -> tuple[int, str]:
    with pytest.raises(Rejected) as caught:
        door.admit(request)
    return caught.value.status, str(caught.value)


@pytest.mark.parametrize(
    ("path", "roles"),
    [
        ("/", "viewer learner evaluator relay operator"),
        ("/metrics", "viewer learner evaluator relay operator"),
        ("/assets/app.js", "viewer learner evaluator relay operator"),
        ("/v1/status", "viewer learner evaluator relay operator"),
        ("/v1/live", "viewer learner evaluator relay operator"),
        ("/v1/control", "learner relay operator"),
        ("/v1/contributions/learner-0/1/0", "learner relay operator"),
        ("/v1/initial/learner-0/0", "learner relay operator"),
        ("/v1/fragments/0", "learner evaluator relay operator"),
        ("/v1/moments/0/1", "learner relay operator"),
        ("/v1/manifest", "learner evaluator relay operator"),
        ("/v1/relay/t", "learner relay operator"),
        ("/v1/scores", "evaluator"),
        ("/v1/probe/1", "learner relay operator"),
        ("/v1/whatever-comes-next", "learner relay operator"),
        ("/v1/relays", "relay operator"),
        ("/v1/held/learner-0/1/0", "relay operator"),
        ("/v1/sums/1", "relay operator"),
        ("/v1/settings", "operator"),
        ("/v1/drain", "operator"),
    ],
)
def test_what_each_path_takes(path: str, roles: str) -> None:
    takes = roles.split()
    assert roles_for(path) == tuple(takes)
    least = f"an {takes[0]}" if takes[0] in ("evaluator", "operator") else f"a {takes[0]}"
    for token in (VIEWER, LEARNER, EVALUATOR, RELAY, OPERATOR):
        if token.role in takes:
            assert DOOR.admit(asks(path, bearer(token))).token == token.id
        else:
            status, reason = refusal(asks(path, bearer(token)))
            assert status == 403 and reason.startswith(f"the token {token.id!r} is for a")
            assert f"{token.role}, and this takes {least}: atoll tokens add NAME --role " in reason


@pytest.mark.parametrize(
    "shown",
    [
        (),
        ("",),
        ("Bearer",),
        ("Bearer ",),
        (LEARNER.secret,),
        (f"Token {LEARNER.secret}",),
        ("Basic !!!",),
        ("Basic ü",),
        ("Basic \udcff",),
        ("Basic " + base64.b64encode(b"\xff\xfe:\xff").decode(),),
        ("Basic " + base64.b64encode(LEARNER.secret.encode()).decode(),),
        (bearer(LEARNER), bearer(LEARNER)),
        ("Bearer x", bearer(LEARNER)),
    ],
    ids=repr,
)
def test_who_shows_no_token_is_a_stranger(shown: tuple[str, ...]) -> None:
    status, reason = refusal(asks("/v1/status", *shown))
    assert status == 401 and reason.startswith("this syncer asks for a token")


@pytest.mark.parametrize(
    "value", ["Bearer nobody-knows-this", "Bearer \udcff\udcfe", "Bearer ü", "bearer " + "x" * 8000]
)
def test_an_unknown_token_is_not_told_what_it_nearly_was(value: str) -> None:
    assert refusal(asks("/v1/status", value)) == (
        401,
        "this token is not known here: is the join link of another run?",
    )


def test_a_token_in_the_query_is_none() -> None:
    assert refusal(asks(f"/v1/status?token={LEARNER.secret}&access_token={LEARNER.secret}"))[0] == 401


def test_a_browser_shows_it_as_a_password_under_any_name() -> None:
    for user in ("", "anna", "ünä"):
        assert DOOR.admit(asks("/", basic(user, VIEWER.secret))).token == "look"
    assert refusal(asks("/", basic(VIEWER.secret, "")))[0] == 401


@pytest.mark.parametrize(("token", "why"), [(REVOKED, "was revoked"), (OVER, "expired on 1970-01-01")])
def test_a_token_that_counts_no_more_is_told_so(token: JoinToken, why: str) -> None:
    status, reason = refusal(asks("/v1/status", bearer(token)))
    assert status == 401 and why in reason


def test_a_link_of_another_run_is_told_so() -> None:
    assert DOOR.admit(asks("/v1/control", bearer(LEARNER), Atoll_Run="r1")).token == "join"
    for other in ("r2", "R1", "r1\udcff", "\x1b[2J"):
        status, reason = refusal(asks("/v1/control", bearer(LEARNER), Atoll_Run=other))
        assert (status, reason) == (403, "the join link is for another run, and this is run r1: ask for its link")


def test_a_link_of_a_lost_run_that_this_one_goes_on_for_is_as_good_as_its_own() -> None:
    door = TokenAuthorizer(lambda: ALL, lambda: "r3", succeeds=("r1", "r2"))
    for run in ("r1", "r2", "r3"):
        assert door.admit(asks("/v1/control", bearer(LEARNER), Atoll_Run=run)).token == "join"
    assert refusal(asks("/v1/control", "Bearer nobody-knows-this", Atoll_Run="r1"))[0] == 401, "only by its keys"
    with pytest.raises(Rejected, match="for another run, and this is run r3"):
        door.admit(asks("/v1/control", bearer(LEARNER), Atoll_Run="r4"))


def test_a_stranger_learns_nothing_of_the_run() -> None:
    assert "r1" not in refusal(asks("/v1/control", "Bearer nobody-knows-this", Atoll_Run="r2"))[1]


def came_by(id: str, tokens: JoinTokens) -> Visitor:
    return Visitor(id, mark=tokens.named(id).mark)


def test_who_may_join_under_a_name() -> None:
    visitor = Visitor("join", mark=LEARNER.mark)
    DOOR.may_join(visitor, "eu-1", set(), NameOwners())
    DOOR.may_join(visitor, "eu-1", {"eu-1", "eu-2"}, NameOwners())
    with pytest.raises(PeerError, match=r"is for eu-\*, not for us-1"):
        DOOR.may_join(visitor, "us-1", set(), NameOwners())
    with pytest.raises(PeerError, match="is for 2 learners at once"):
        DOOR.may_join(visitor, "eu-3", {"eu-1", "eu-2"}, NameOwners())
    with pytest.raises(PeerError, match="was revoked"):
        DOOR.may_join(Visitor("gone", mark=REVOKED.mark), "eu-1", set(), NameOwners())


def test_a_token_that_vanished_since_it_was_shown_is_the_peers_trouble_not_ours() -> None:
    with pytest.raises(PeerError, match="is not there any more"):
        DOOR.may_join(Visitor("deleted"), "eu-1", set(), NameOwners())


def test_tokens_are_looked_at_each_time() -> None:
    tokens = [JoinTokens([LEARNER])]
    door = TokenAuthorizer(lambda: tokens[0], lambda: "r1")
    door.admit(asks("/v1/status", bearer(LEARNER)))
    assert door.gone("join", LEARNER.mark) == ""
    tokens[0] = tokens[0].without("join")
    assert refusal(asks("/v1/status", bearer(LEARNER)), door)[0] == 401
    assert "was revoked" in door.gone("join", LEARNER.mark)
    assert door.gone("never", "") == "the token 'never' is not there any more"


def test_another_token_of_the_same_name_is_another_token() -> None:
    tokens = [JoinTokens([LEARNER])]
    door = TokenAuthorizer(lambda: tokens[0], lambda: "r1")
    before = door.admit(asks("/v1/status", bearer(LEARNER)))
    tokens[0] = JoinTokens([anew := msgspec.structs.replace(LEARNER, secret="a-secret-that-came-later")])
    after = door.admit(asks("/v1/status", bearer(anew)))
    assert "was replaced by another of its name" in door.gone(before.token, before.mark)
    assert door.gone(after.token, after.mark) == ""
    with pytest.raises(PeerError, match="was replaced"):
        door.may_join(before, "eu-1", set(), NameOwners())
    assert LEARNER.secret not in before.mark


def test_an_expiry_is_looked_at_by_the_clock_of_now() -> None:
    soon = named("soon", expires=time.time() + 3600)
    assert TokenAuthorizer(lambda: JoinTokens([soon]), lambda: "r1").gone("soon", soon.mark) == ""


def test_a_door_that_is_open_lets_everybody_do_everything() -> None:
    door = OpenAuthorizer()
    assert door.admit(asks("/v1/settings")) is NOBODY
    door.may_join(NOBODY, "learner-0", set(), NameOwners())
    assert door.gone("", "") == ""


# ---- whose a name is, and how many one token brings ------------------------------------------------------------------

ANNA, BERT = named("anna", names=4), named("bert", names=4)


def joins(door: TokenAuthorizer, owners: NameOwners, token: str, *names: str) -> None:
    for name in names:
        door.may_join(came_by(token, door._tokens()), name, set(), owners)
        owners.assign_name(name, token)


def test_a_name_belongs_to_the_token_that_it_came_by_until_that_counts_no_more() -> None:
    tokens = [JoinTokens([ANNA, BERT])]
    door, owners = TokenAuthorizer(lambda: tokens[0], lambda: "r1"), NameOwners({"laptop": "anna"})
    joins(door, owners, "anna", "laptop")
    with pytest.raises(PeerError, match="the name laptop belongs to whoever holds the token 'anna': choose another"):
        joins(door, owners, "bert", "laptop")
    tokens[0] = tokens[0].without("anna")
    joins(door, owners, "bert", "laptop")
    assert owners.owner_of("laptop") == "bert" and (owners.count_names("anna"), owners.count_names("bert")) == (0, 1)


def test_a_name_is_kept_for_the_token_that_is_for_it() -> None:
    most = [
        named("join"),
        named("eu", learner="eu-*"),
        named("anna", learner="eu-anna"),
        named("old", learner="eu-bert"),
    ]
    tokens = JoinTokens(most).without("old")
    door, owners = TokenAuthorizer(lambda: tokens, lambda: "r1"), NameOwners({"eu-anna": "join"})
    for token in ("join", "eu"):
        with pytest.raises(
            PeerError, match="the name eu-anna is kept for the token 'anna': choose another with --name"
        ):
            door.may_join(came_by(token, tokens), "eu-anna", set(), NameOwners())
    with pytest.raises(PeerError, match="the name eu-1 is kept for the token 'eu'"):
        joins(door, owners, "join", "eu-1")
    joins(door, owners, "anna", "eu-anna")  # also from one that had it before there was a token for it
    joins(door, owners, "eu", "eu-bert")  # one that counts no more keeps nothing
    joins(door, owners, "join", "us-1")
    assert [owners.owner_of(name) for name in ("eu-anna", "eu-bert", "us-1")] == ["anna", "eu", "join"]


def test_a_token_brings_so_many_names_and_no_more_also_when_they_have_left() -> None:
    door, owners = TokenAuthorizer(lambda: JoinTokens([ANNA, BERT]), lambda: "r1"), NameOwners({"old": "anna"})
    joins(door, owners, "anna", "b", "c", "d")
    joins(door, owners, "anna", "old", "b", "c", "d")  # names that stay cost nothing
    with pytest.raises(PeerError) as caught:
        joins(door, owners, "anna", "e")
    assert str(caught.value) == (
        "the token 'anna' has brought 4 different names, and no more: give learners names that stay (--name), "
        "or let it have more: atoll tokens change anna --names 8"
    )
    joins(door, owners, "bert", "e")  # nobody else pays for it


def test_its_owner_is_told_in_time_and_once() -> None:
    said: list[str] = []
    tokens = [JoinTokens([ANNA])]
    door, owners = TokenAuthorizer(lambda: tokens[0], lambda: "r1", said.append), NameOwners()
    joins(door, owners, "anna", "a", "b")
    assert said == []
    joins(door, owners, "anna", "c", "d", "d")
    assert said == [
        "the token 'anna' has brought 3 of at most 4 names: give learners names that stay (--name), "
        "or let it have more: atoll tokens change anna --names 8"
    ]
    tokens[0] = tokens[0].with_changed("anna", names=8)
    joins(door, owners, "anna", "e", "f")
    assert len(said) == 2 and "6 of at most 8" in said[1], "that it may bring more now is looked at each time"


def test_where_nobody_is_asked_nothing_is_owned() -> None:
    owners = NameOwners({"laptop": "anna"})
    OpenAuthorizer().may_join(NOBODY, "laptop", set(), owners)
    owners.assign_name("laptop", "")
    owners.assign_name("another", "")
    assert owners.owner_of("laptop") == "anna" and owners.owner_of("another") == "" and owners.count_names("") == 0
