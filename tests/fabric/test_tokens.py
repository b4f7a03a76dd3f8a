from __future__ import annotations

import time

import msgspec
import pytest

from atoll.fabric.join_tokens import SECRET, JoinToken, JoinTokens, new_secret
from atoll.protocol.errors import ConfigError


def token(id: str = "join", **more: object) -> JoinToken:
    return msgspec.convert({"id": id, "secret": new_secret(), **more}, JoinToken)


def test_a_secret_fits_into_a_link_and_is_never_the_same() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100 and all(SECRET.fullmatch(secret) and len(secret) == 64 for secret in made)


def test_a_token_is_found_by_what_is_shown_and_by_nothing_else() -> None:
    one, two = token("one"), token("two")
    tokens = JoinTokens([one, two])
    assert tokens.find(one.secret) is one and tokens.find(two.secret) is two
    for shown in ("", "one", one.secret[:-1], one.secret.upper(), one.secret + " ", "\udcff", "ü" * 16):
        assert tokens.find(shown) is None


def test_what_is_as_usual_is_not_written_down() -> None:
    """A version that knows no `names` still reads the file, unless somebody asked for them."""
    plain = msgspec.json.decode(msgspec.json.encode(token()))
    assert set(plain) == {"id", "secret"}
    assert msgspec.json.decode(msgspec.json.encode(token(names=7)))["names"] == 7


def test_a_token_is_changed_and_the_others_stay() -> None:
    one, two = token("one"), token("two", most=3)
    changed = JoinTokens([one, two]).with_changed("one", names=9, most=2)
    assert changed.named("two") is two and changed.find(one.secret) is changed.named("one")
    assert (changed.named("one").names, changed.named("one").most) == (9, 2)
    with pytest.raises(ConfigError, match="there is no token 'three'"):
        changed.with_changed("three", names=9)


def test_a_token_without_a_name_to_bring_is_none() -> None:
    with pytest.raises(ConfigError, match="names of token 'join' is 1 or above"):
        JoinToken(id="join", secret=new_secret(), names=0)


def test_a_token_does_not_count_once_it_is_revoked_or_over() -> None:
    now = time.time()
    assert token().refuses(now) == ""
    assert "was revoked: ask for another join link" in token(revoked=True).refuses(now)
    ends = token(expires=1_700_000_000.0)
    assert ends.refuses(1_699_999_999.9) == ""
    assert (
        ends.refuses(1_700_000_000.0) == "the token 'join' expired on 2023-11-14 22:13 UTC: ask for another join link"
    )


@pytest.mark.parametrize(
    ("said", "name", "allowed"),
    [
        ("", "anybody", True),
        ("*", "anybody", True),
        ("eu-*", "eu-1", True),
        ("eu-*", "eu-", True),
        ("eu-*", "us-1", False),
        ("eu-*", "eu", False),
        ("anna", "anna", True),
        ("anna", "anna2", False),
        ("anna", "Anna", False),
    ],
)
def test_a_token_may_be_for_some_names_only(said: str, name: str, allowed: bool) -> None:
    assert token(learner=said).allows(name) is allowed


def test_revoking_one_leaves_the_others() -> None:
    tokens = JoinTokens([token("one"), token("two")])
    less = tokens.without("one")
    assert [one.revoked for one in less.all] == [True, False]
    assert [one.revoked for one in tokens.all] == [False, False]
    with pytest.raises(ConfigError, match=r"there is no token 'three'; there are: one, two"):
        tokens.without("three")


def test_the_first_of_a_role_that_counts() -> None:
    tokens = JoinTokens([token("old", expires=1.0), token("view", role="viewer"), token("new")])
    assert tokens.with_role("learner", time.time()) is tokens.named("new")
    assert tokens.with_role("operator", time.time()) is None


def test_names_and_secrets_are_each_somebodys_own() -> None:
    one = token("one")
    with pytest.raises(ConfigError, match="two tokens are called 'one'"):
        JoinTokens([one]).added(token("one"))
    with pytest.raises(ConfigError, match="the same secret"):
        JoinTokens([one, msgspec.structs.replace(one, id="two", revoked=True)])


@pytest.mark.parametrize(
    "bad",
    [
        {"secret": ""},
        {"secret": "short"},
        {"secret": "with spaces in it and long enough"},
        {"secret": "x" * 129},
        {"id": ""},
        {"id": "two\nlines"},
        {"most": -1},
        {"expires": -1.0},
        {"expires": float("nan")},
        {"expires": float("inf")},
    ],
)
def test_what_is_no_token_is_refused_without_its_secret(bad: dict[str, object]) -> None:
    good = {"id": "one", "secret": "s3cret-s3cret-s3cret"}
    with pytest.raises(ConfigError) as caught:
        JoinToken(**{**good, **bad})  # type: ignore[arg-type]
    assert "s3cret" not in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_token_can_be_printed() -> None:
    one = token()
    assert one.secret not in repr(one) and one.secret not in f"{[one]}"
