"""A learner that can reach nothing but an HTTP proxy: its processes join by the link all the same."""

from __future__ import annotations

import pytest
from tests.connect_proxy import FAR, ConnectProxy
from tests.system.conftest import SCRIPTS, Run, members
from tests.system.joining import link_of, make_keys

from atoll.fabric.address import parse_address
from atoll.store.verify import verify_run

pytestmark = pytest.mark.system


@pytest.mark.faults
def test_a_learner_contributes_through_a_proxy_that_reads_nothing(run: Run) -> None:
    keys, port = make_keys(run), run.free_port()
    with ConnectProxy().beside() as proxy:
        run.start(
            "syncer", "--learners", "1", "--out", run.out, "--keys", keys, "--port", str(port),
            "--advertise", f"{FAR}:{port}",
        )  # fmt: skip
        link = link_of(run, keys)
        learner = run.beside(
            "learn", SCRIPTS / "line.py", "--join", link, "--name", "learner-0", "--proxy", proxy.url,
            "--", "--width", "1024",
        )  # fmt: skip
        run.until(lambda events: members(events) == {("learner-0", 1)})
        run.until(lambda events: sum(e["kind"] == "round" for e in events) >= 5)
        run.interrupt()
        run.ended()
        assert learner.wait(60) == 0, (run.folder / "beside.log").read_text()
    report = verify_run(run.out)
    assert report.ok, report.problem
    assert set(proxy.asked_for) == {f"{FAR}:{port}"}, "a name that only the proxy can resolve"
    assert len(proxy.seen) > 5 * (2 << 20), "bodies went this way too"
    token = parse_address(link, {}).token
    assert token and token.encode() not in bytes(proxy.seen) + "".join(proxy.heads).encode()
