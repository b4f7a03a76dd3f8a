"""By which names a port answers: its own, and none that somebody else made to lead here."""

from __future__ import annotations

import pytest
from tests.fabric.conftest import ServedFabric

from atoll.fabric.authorizer import Rejected, check_host, host_name, own_names

NAMES = ("syncer.example.org", "10.0.0.5", "*.wild.example")


@pytest.mark.parametrize(
    "said",
    [
        *("127.0.0.1:80", "localhost", "LOCALHOST:1", "localhost.", "[::1]:7077", "127.8.9.1"),
        *("Syncer.Example.org:443", "10.0.0.5:7077", "a.wild.example", *own_names()),
    ],
)
def test_own_names(said: str) -> None:
    check_host([said], {*NAMES, *own_names()})


@pytest.mark.parametrize(
    "said",
    [
        *("10.0.0.1", "evil.example:80", "localhost.evil.example", "syncer.example.org.evil", "a.b.wild.example"),
        *("wild.example", "", "a:b:c", "evil@localhost", "localhost/evil", "127.0.0.1:x", "\x1b[2J", "127.1", "[::1"),
    ],
)
def test_names_of_others(said: str) -> None:
    with pytest.raises(Rejected, match="this syncer is not known as") as caught:
        check_host([said], NAMES)
    assert caught.value.status == 403 and "\x1b" not in str(caught.value)


def test_one_host_and_no_more() -> None:
    for said in ([], ["localhost", "localhost"], ["localhost", "evil.example"]):
        with pytest.raises(Rejected):
            check_host(said, NAMES)
    assert host_name("[2001:DB8::1]:7077") == "2001:db8::1"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", path) for path in ("/v1/status", "/v1/manifest", "/v1/fragments/0", "/v1/control", "/v1/probe/8", "/no")]
    + [("POST", "/v1/settings"), ("POST", "/v1/drain"), ("POST", "/v1/scores"), ("PUT", "/v1/initial/a/0")],
)
async def test_a_name_that_was_made_to_lead_here_gets_nothing_on_any_route(
    place: ServedFabric, method: str, path: str
) -> None:
    """Also where no token is asked for: DNS rebinding read the weights there."""
    await place.open()
    status, text = await place.request(method, path, headers={"Host": f"evil.example:{place.server.port}"})
    assert status == 403 and "this syncer is not known as" in text
