"""Join links: what they say, what is no link, and what of them may be shown."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.fabric.address import SyncerAddress, check_bind, host_port, is_loopback, parse_address, without_secrets
from atoll.protocol.errors import ConfigError

SECRET = "f00d" * 16
PIN = "ab" * 32
LINK = f"atoll://{SECRET}@syncer.example.org:7077/r1/{PIN}"

names = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=20)
hosts = st.one_of(
    names.filter(lambda name: name.strip("-")).map(lambda name: f"{name}.example.org"),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
)
addresses = st.builds(host_port, hosts, st.integers(1, 65535)).map(lambda host: f"https://{host}")
tokens = st.text(string.ascii_letters + string.digits + "_-", min_size=16, max_size=128)
ways = st.builds(
    SyncerAddress,
    urls=st.lists(addresses, min_size=1, max_size=3).map(tuple),
    run=st.text(string.ascii_letters + string.digits + "._-", max_size=64),
    token=st.one_of(st.just(""), tokens),
    pin=st.one_of(
        st.just("ca"),
        st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), min_size=1, max_size=4).map(",".join),
    ),
)


def complaint(text: str) -> str:
    """Empty: it is a way."""
    try:
        parse_address(text, {})
    except ConfigError as error:
        return str(error)
    return ""


@given(ways)
def test_a_link_says_what_was_put_into_it(address: SyncerAddress) -> None:
    assert parse_address(address.link(), {}) == address


@given(ways.filter(lambda address: address.token), st.data())
def test_a_spoiled_link_is_an_error_of_one_line_without_its_token(address: SyncerAddress, data: st.DataObject) -> None:
    link = address.link()
    at = data.draw(st.integers(0, len(link) - 1))
    spoiled = link[:at] + data.draw(st.text(max_size=3)) + link[at + data.draw(st.integers(0, 2)) :]
    said = complaint(spoiled)
    assert len(said.splitlines()) <= 1 and address.token not in said


@given(st.text(max_size=200))
def test_whatever_is_pasted_is_a_way_or_a_config_error(text: str) -> None:
    for pasted in (text, f"atoll://{text}", f"http://{text}"):
        assert len(complaint(pasted).splitlines()) <= 1


@pytest.mark.parametrize(
    "bad",
    [
        f"https://{SECRET}@syncer.example.org:7077/r1/{PIN}",
        f"ATOLL://{SECRET}@syncer.example.org:7077/r1/{PIN}",
        f"atoll:/{SECRET}@syncer.example.org:7077/r1/{PIN}",
        f"atoll://{SECRET}/syncer.example.org:7077/r1/{PIN}",
        f"atoll://{SECRET}@syncer.example.org:7077/r1/{PIN}/more",
        f"atoll://{SECRET}@syncer.example.org:7077/r1/{PIN[:-1]}",
        f"atoll://{SECRET}@syncer.example.org:7077/r1/{PIN},",
        f"atoll://{SECRET}@syncer.example.org:7077/r1/{PIN},ca",
        f"atoll://{SECRET}@syncer.example.org:7077/r1/{','.join([PIN] * 5)}",
        f"atoll://{SECRET}@syncer.example.org/r1/{PIN}",
        f"atoll://{SECRET}@syncer.example.org:0/r1/{PIN}",
        f"atoll://{SECRET}@syncer.example.org:99999/r1/{PIN}",
        f"atoll://{SECRET}@[::1/r1/{PIN}",
        f"atoll://{SECRET}@two@h:7077/r1/{PIN}",
        f"atoll://{SECRET}@h:7077?x=1/r1/{PIN}",
        f"atoll://short@h:7077/r1/{PIN}",
        f"atoll://{SECRET}@h:7077/../r1/{PIN}",
        f"atoll://{SECRET}@h:7077/r1 /{PIN}",
        f"atoll://{SECRET}@syncer.example.org:7077/r1",
        f"http://{SECRET}@127.0.0.1:7077",
        f"http://127.0.0.1:7077/{SECRET}",
        f"http://127.0.0.1:7077?token={SECRET}",
        "http://[::1",
        "",
    ],
)
def test_what_is_no_link_is_said_without_its_secret(bad: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(bad, {})
    assert SECRET not in str(caught.value) and "short@" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "host", ["192.0.2.1", "syncer.example.org", "0.0.0.0", "[2001:db8::1]", "localhost.example.org"]
)
def test_plain_http_goes_nowhere_but_to_this_machine(host: str) -> None:
    for text in (f"http://{host}:7077", f"atoll://{host}:7077/r1", f"atoll://{SECRET}@{host}:7077/r1"):
        with pytest.raises(ConfigError, match="in the clear: use its join link"):
            parse_address(text, {})


def test_plain_addresses_of_this_machine() -> None:
    assert parse_address("http://127.0.0.1:7077,http://[::1]:7078/", {}).urls == (
        "http://127.0.0.1:7077",
        "http://[::1]:7078",
    )
    address = parse_address("atoll://localhost:7077/r1", {})
    assert (address.urls, address.run, address.private, address.context()) == (
        ("http://127.0.0.1:7077",),
        "r1",
        False,
        None,
    )


def test_what_every_request_shows() -> None:
    address = parse_address(LINK, {})
    shown = {"Authorization": f"Bearer {SECRET}", "Atoll-Run": "r1"}
    assert address.headers_for("https://syncer.example.org:7077/v1/status") == shown
    assert parse_address("http://127.0.0.1:7", {}).headers_for("http://127.0.0.1:7/v1/status") == {}


def test_a_way_shows_its_token_to_the_syncers_own_addresses_alone() -> None:
    """Bodies of a peer are fetched on the same session."""
    address = parse_address(f"atoll://{SECRET}@syncer.example.org:443,127.0.0.1:7077/r1/{PIN}", {})
    for own in ("https://syncer.example.org/v1/control", "https://127.0.0.1:7077/v1/control"):
        assert address.headers_for(own)["Authorization"] == f"Bearer {SECRET}"
    for other in ("http://127.0.0.1:7077/v1/state/x", "https://127.0.0.1:7078/x", "https://syncer.example.org.evil/"):
        assert address.headers_for(other) == {}


def test_a_way_can_be_printed() -> None:
    address = parse_address(LINK, {"ATOLL_PROXY": "http://me:password@proxy:3128"})
    for text in (repr(address), str(address), f"{address}", without_secrets(LINK)):
        assert SECRET not in text and "password" not in text
    assert "syncer.example.org:7077" in repr(address) and "syncer.example.org:7077" in without_secrets(LINK)


@pytest.mark.parametrize(
    ("link", "env", "proxy"),
    [
        (LINK, {}, ""),
        (LINK, {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        (LINK, {"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        (LINK, {"HTTP_PROXY": "http://proxy:3128"}, ""),
        (LINK, {"HTTPS_PROXY": "http://proxy:3128", "ATOLL_PROXY": "http://own:1"}, "http://own:1"),
        (LINK, {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "other.org, .example.org"}, ""),
        (LINK, {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "*"}, ""),
        (LINK, {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "ample.org"}, "http://proxy:3128"),
        (LINK, {"ATOLL_PROXY": "http://own:1", "NO_PROXY": "*"}, "http://own:1"),
        (f"atoll://{SECRET}@127.0.0.1:7077/r1/{PIN}", {"HTTPS_PROXY": "http://proxy:3128"}, ""),
        (f"atoll://{SECRET}@127.0.0.1:7077/r1/{PIN}", {"ATOLL_PROXY": "http://own:1"}, "http://own:1"),
        (f"atoll://{SECRET}@127.0.0.1:7077/r1", {"ATOLL_PROXY": "http://own:1"}, ""),
    ],
)
def test_proxies_come_from_the_environment(link: str, env: dict[str, str], proxy: str) -> None:
    assert parse_address(link, env).proxy == proxy


@pytest.mark.parametrize("proxy", ["socks5://proxy:1", "http://", "http://me:password@proxy:99999"])
def test_a_proxy_that_is_none_is_said_without_its_password(proxy: str) -> None:
    with pytest.raises(ConfigError, match="HTTPS_PROXY is no address") as caught:
        parse_address(LINK, {"HTTPS_PROXY": proxy})
    assert "password" not in str(caught.value)


def test_files_come_from_the_environment() -> None:
    address = parse_address(LINK, {"ATOLL_CA": "ca.crt", "ATOLL_CERT": "me.crt", "ATOLL_KEY": "me.key"})
    assert (address.authority, address.certificate, address.key) == ("ca.crt", "me.crt", "me.key")
    with pytest.raises(ConfigError, match="cannot be used"):
        address.context()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_is_bound_without_keys(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, secured=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "syncer.example.org", "", "127.1", "2130706433"])
def test_others_are_let_in_only_with_tls_and_tokens(host: str) -> None:
    with pytest.raises(ConfigError, match="atoll cert"):
        check_bind(host, secured=False)
    check_bind(host, secured=True)
