"""Which placement a learner has, and what it says of it."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.learner.small import Remembers
from torch import nn

import atoll
from atoll.learner.boundary import SharedMailbox
from atoll.learner.placement import PlacementWish, choose_placement, device_bytes, staging_bytes
from atoll.learner.trained_model import TorchModel
from atoll.mailbox.box import BoxLayout
from atoll.mailbox.channel import MailboxReady, Welcomed
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner.effects import Stepped
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

PLAN = make_plan([TensorSpec("w", (240, 1000), "float32")], 24)
SETTINGS = Settings(fragments=24, sync_every=24, codec="int8")
NEED = device_bytes(PLAN, SETTINGS)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.mark.parametrize(
    ("wish", "device", "free", "on_device", "reason"),
    [
        ("auto", CPU, None, False, ""),
        ("host", CPU, None, False, "host (as asked): base and feedback are in shared memory, the courier encodes"),
        ("auto", GPU, 4 * NEED, True, "at most a quarter"),
        ("auto", GPU, 4 * NEED - 1, False, "more than a quarter"),
        ("auto", GPU, None, False, "more than a quarter"),
        ("host", GPU, 100 * NEED, False, "host (as asked)"),
        ("device", GPU, NEED, True, "device (as asked)"),
        ("device", CPU, None, True, "device (as asked)"),
    ],
)
def test_it_follows_the_wish_or_what_is_free(
    wish: PlacementWish, device: torch.device, free: int | None, on_device: bool, reason: str
) -> None:
    found = choose_placement(wish, device, PLAN, SETTINGS, free)
    assert found.on_device == on_device and reason in found.text
    taken = NEED if on_device else staging_bytes(PLAN)
    if device.type == "cuda":
        assert f"{taken / 2**20:,.0f} MiB of cuda:0" in found.text


def test_unasked_the_device_encodes_only_where_that_takes_time() -> None:
    for codec in ("fp32", "bf16"):
        found = choose_placement("auto", GPU, PLAN, msgspec.structs.replace(SETTINGS, codec=codec), 100 * NEED)
        assert not found.on_device and f"host (contributions in {codec} are cheap to encode)" in found.text


def test_a_rank_has_host_and_says_so_where_device_was_asked_for() -> None:
    found = choose_placement("auto", GPU, PLAN, SETTINGS, 100 * NEED, ranks=True)
    assert not found.on_device and "host (a rank sends parts of fragments)" in found.text
    with pytest.raises(ConfigError, match="a learner of several ranks has host"):
        choose_placement("device", GPU, PLAN, SETTINGS, 100 * NEED, ranks=True)


@pytest.mark.parametrize("wish", ["auto", "device"])
def test_a_run_that_carries_may_have_the_device_and_a_replay_has_host(wish: PlacementWish) -> None:
    carries = msgspec.structs.replace(SETTINGS, adopt="carry")
    assert choose_placement(wish, GPU, PLAN, carries, 100 * NEED).on_device
    assert choose_placement(wish, GPU, PLAN, SETTINGS, 100 * NEED, replays=True) == (False, "")


def test_copies_to_subtract_are_counted_wherever_the_run_may_carry() -> None:
    """Carry can be set while an asynchronous run goes on; a synchronous one says it when it begins."""
    synchronous = msgspec.structs.replace(SETTINGS, synchronous=True)
    carries = msgspec.structs.replace(synchronous, adopt="carry")
    slots = BoxLayout.of(PLAN, SETTINGS, on_device=True).first_outgoing
    assert NEED - device_bytes(PLAN, synchronous) == (slots + 1) * 4 * PLAN.largest
    assert device_bytes(PLAN, msgspec.structs.replace(SETTINGS, adopt="carry")) == NEED == device_bytes(PLAN, carries)


def test_what_does_not_fit_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"placement = device takes .* of cuda:0, where .* are free: use placement"):
        choose_placement("device", GPU, PLAN, SETTINGS, NEED - 1)


class Courier(Remembers):
    replays = False


def test_a_welcome_makes_the_memory_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    courier, model = Courier(), nn.Linear(4, 4)
    shared = SharedMailbox(TorchModel(model), courier, courier, placement="device")  # type: ignore[arg-type]
    shared.describe()
    settings = Settings(fragments=2, codec="topk", adopt="overwrite").resolved(2)
    plan = make_plan(shared.tensors, 2)
    assert shared.apply_welcome(Welcomed(settings, plan.fingerprint, 1))
    shared.hand_to_courier(Stepped(0, (), ()))
    [ready] = courier.told()
    assert isinstance(ready, MailboxReady) and ready.on_device
    assert not shared.apply_welcome(Welcomed(settings, plan.fingerprint, 2)), "the same run: nothing is made anew"
    for rule in ("blend", "carry"):
        set_since = msgspec.structs.replace(settings, sync_every=3, overlap=2, adopt=rule)
        assert not shared.apply_welcome(Welcomed(set_since, plan.fingerprint, 2)), "steps would be lost with the memory"
    shared.hand_to_courier(Stepped(0, (), ()))
    assert courier.told()[-1] == ready, "a new courier finds its slots by what the memory was made for"
    assert capsys.readouterr().err.count("atoll: placement device (as asked)") == 1
    shared.close()


def test_memory_of_a_run_that_never_carries_does_not_serve_one_that_may(capsys: pytest.CaptureFixture[str]) -> None:
    courier, model = Courier(), nn.Linear(4, 4)
    shared = SharedMailbox(TorchModel(model), courier, courier, placement="device")  # type: ignore[arg-type]
    shared.describe()
    waits = Settings(fragments=2, synchronous=True).resolved(2)
    fingerprint = make_plan(shared.tensors, 2).fingerprint
    assert shared.apply_welcome(Welcomed(waits, fingerprint, 1))
    may_carry = Settings(fragments=2).resolved(2)
    assert shared.apply_welcome(Welcomed(may_carry, fingerprint, 1)), "another run"
    assert not shared.apply_welcome(Welcomed(waits, fingerprint, 1)), "copies are kept, and nobody asks for them"
    assert capsys.readouterr().err.count("placement device (as asked): base, feedback and copies take") == 2
    shared.close()


def test_the_environment_says_it_where_the_script_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def wished(**given: PlacementWish) -> str:
        return atoll.Learner(nn.Linear(2, 2), **given)._joining.placement

    assert wished() == "auto"
    monkeypatch.setenv("ATOLL_PLACEMENT", "device")
    assert wished() == "device" and wished(placement="host") == "host"
    monkeypatch.setenv("ATOLL_PLACEMENT", "gpu")
    with pytest.raises(ValueError, match="placement = 'gpu' is not known"):
        wished()


@pytest.mark.parametrize(("versions", "is_base"), [((), True), ((-1, -1), True), ((3, 2), False)])
def test_the_model_is_the_base_unless_the_run_has_versions(versions: tuple[int, ...], is_base: bool) -> None:
    """A newcomer's own values are replaced before it trains: writing them would only keep it from the run's."""
    courier, model = Courier(), nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    shared = SharedMailbox(TorchModel(model), courier, courier)  # type: ignore[arg-type]
    shared.describe()
    settings = Settings(fragments=2).resolved(2)
    assert shared.apply_welcome(Welcomed(settings, make_plan(shared.tensors, 2).fingerprint, 1, versions))
    assert shared.box is not None
    assert any(shared.box.base(fragment).any() for fragment in range(2)) == is_base
    shared.close()
