from __future__ import annotations

import pytest

from atoll.fabric.security import check_loopback
from atoll.protocol.errors import ConfigError


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    check_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "", "192.168.1.2"])
def test_every_other_address_is_refused_with_the_fix(host: str) -> None:
    with pytest.raises(ConfigError, match=r"secure join that is not there yet: use 127\.0\.0\.1"):
        check_loopback(host)
