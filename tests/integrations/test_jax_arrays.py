"""A pytree of JAX arrays as a learner's model: read, adopted, captured, restored, and refused where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx

from atoll.extras import install_command
from atoll.integrations.jax import Learner, load
from atoll.integrations.jax_arrays import JaxModel
from atoll.learner.capture import OtherLibrary
from atoll.learner.model import describe
from atoll.learner.snapshot import Snapshot, decode, encode
from atoll.learner.trained_model import TorchModel
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import ConfigError, PeerError, PlanError
from atoll.store.rundir import save_model

pytestmark = [pytest.mark.integrations]


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_JOIN", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


OPTIMIZER = optax.adamw(1e-2)


def tree(seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed)
    kernel = jnp.asarray(drawn.standard_normal((3, 4)), jnp.float32)
    return {"layers": [{"kernel": kernel, "bias": jnp.zeros(4)}], "scale": jnp.ones((4,), jnp.bfloat16)}


def trained(seed: int = 0, steps: int = 2, **options: Any) -> JaxModel:
    model = JaxModel(tree(seed), OPTIMIZER.init(tree(seed)), **options)
    for _ in range(steps):
        model.take_arrays(*step(*model.hand_over()))
    return model


def step(params: Any, opt_state: Any) -> tuple[Any, Any]:
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def equal(one: Any, other: Any) -> bool:
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), one, other
    )
    return all(jax.tree.leaves(same))


def sent(snapshot: Snapshot) -> Snapshot:
    header, parts = encode(snapshot)
    return decode(b"".join([header, *parts]))


# ---- names and layouts ----------------------------------------------------------------------------------------------


def test_tensors_are_called_by_their_paths() -> None:
    specs = {spec.name: (spec.shape, spec.dtype, spec.embedding) for spec in JaxModel(tree()).describe()}
    assert specs == {
        "layers.0.bias": ((4,), "float32", False),
        "layers.0.kernel": ((3, 4), "float32", False),
        "scale": ((4,), "bfloat16", False),
    }


def test_of_flax_modules_the_names_of_their_attributes_are_left() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.words = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
            self.blocks = nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(1))])

    _, params = nnx.split(Net(), nnx.Param)
    specs = {spec.name: spec.embedding for spec in JaxModel(params, optax.adam(0.1).init(params)).describe()}
    assert specs == {"words.embedding": True, "blocks.0.kernel": False, "blocks.0.bias": False}


def test_a_torch_module_of_the_same_tensors_has_the_same_plan() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    params = {
        "0": {"kernel": jnp.zeros((3, 4)), "bias": jnp.zeros(4)},
        "2": {"kernel": jnp.zeros((4, 2)), "bias": jnp.zeros(2)},
    }
    as_torch = JaxModel(
        params, names=lambda path: path.replace("kernel", "weight"), transposed=lambda name: name.endswith("weight")
    )
    assert make_plan(as_torch.describe(), 2).fingerprint == make_plan(describe(model), 2).fingerprint


def test_what_is_transposed_goes_out_and_comes_in_so() -> None:
    model = JaxModel(tree(), transposed=["layers.0.kernel"])
    held = model.tensors()["layers.0.kernel"]
    assert np.array_equal(held.numpy(), np.asarray(tree()["layers"][0]["kernel"]).T)
    held[0, 2] = 7.0
    model.note_adopted(["layers.0.kernel"])
    assert model.hand_over()[0]["layers"][0]["kernel"][2, 0] == 7.0


# ---- between two steps ----------------------------------------------------------------------------------------------


def test_adopted_values_are_in_what_is_handed_over_and_all_else_is_the_scripts_own() -> None:
    model = trained()
    given = step(*model.hand_over())
    model.take_arrays(*given)
    model.tensors()["scale"].fill_(2.5)
    model.tensors()["layers.0.bias"]  # read alone
    model.note_adopted(["scale"])
    params, opt_state = model.hand_over()
    assert np.asarray(params["scale"], np.float32).tolist() == [2.5] * 4 and params["scale"].dtype == jnp.bfloat16
    assert params["layers"][0]["bias"] is given[0]["layers"][0]["bias"] and equal(opt_state, given[1])


def test_nothing_is_written_into_the_scripts_arrays() -> None:
    params = tree()
    before = jax.tree.map(lambda array: np.array(array), params)
    model = JaxModel(params)
    for name, tensor in model.tensors().items():
        tensor.fill_(9.0)
        model.note_adopted([name])
    assert not equal(model.hand_over()[0], before) and equal(params, before)


def test_a_jitted_step_is_compiled_once_whatever_is_adopted_and_donated() -> None:
    traced = []

    def count(params: Any, opt_state: Any) -> tuple[Any, Any]:
        traced.append(1)
        return step(params, opt_state)

    jitted = jax.jit(count, donate_argnums=(0, 1))
    params = {**tree(), "factor": jnp.asarray(1.0) * 2.0}
    model = JaxModel(params, OPTIMIZER.init(params))
    state = model.hand_over()
    for number in range(4):
        model.take_arrays(*jitted(*state))
        if number % 2:
            model.restore({}, sent(model.begin_capture({}).finish()))
        state = model.hand_over()
    assert len(traced) == 1 and jitted._cache_size() == 1


def test_what_came_while_the_script_had_the_arrays_takes_the_place_of_its_step() -> None:
    model = trained()
    state = model.hand_over()
    model.tensors()["layers.0.bias"].fill_(5.0)
    model.note_adopted(["layers.0.bias"])
    stepped = step(*state)
    model.take_arrays(*stepped)
    params, opt_state = model.hand_over()
    assert params["layers"][0]["bias"].tolist() == [5.0] * 4
    assert equal(params["layers"][0]["kernel"], stepped[0]["layers"][0]["kernel"]) and equal(opt_state, stepped[1])
    model.take_arrays(*step(params, opt_state))
    assert model.hand_over()[0]["layers"][0]["bias"].tolist() != [5.0] * 4  # once


# ---- capture and restore --------------------------------------------------------------------------------------------


def test_a_captured_process_goes_on_bit_for_bit_in_another() -> None:
    first, second = trained(seed=0, steps=3), trained(seed=1, steps=1)
    second.restore({}, sent(first.begin_capture({}).finish()))
    one, other = step(*first.hand_over()), step(*second.hand_over())
    assert equal(one, other)


def test_a_snapshot_holds_what_was_there_also_when_the_arrays_are_donated_at_once() -> None:
    model = trained()
    params, opt_state = model.hand_over()
    before = jax.tree.map(np.array, (params, opt_state))
    begun = model.begin_capture({})
    for array in jax.tree.leaves((params, opt_state)):
        array.delete()
    other = trained(seed=1)
    other.restore({}, begun.finish())
    assert equal(other.hand_over(), before)


def test_a_newcomer_takes_a_peers_optimizer_and_leaves_its_parameters() -> None:
    peer, newcomer = trained(seed=0, steps=5), trained(seed=1, steps=0)
    own = newcomer.look()[0]
    newcomer.take_peer_state({}, sent(peer.begin_capture({}, parameters=False, rng=False).finish()))
    params, opt_state = newcomer.hand_over()
    assert equal(opt_state, peer.look()[1]) and equal(params, own)


@pytest.mark.parametrize("lie", [{"0.mu.scale": float("nan")}, {"0.count": -1}])
def test_a_peers_broken_numbers_are_refused_and_nothing_changes(lie: dict[str, float]) -> None:
    peer, newcomer = trained(seed=0), trained(seed=1)
    for name, value in lie.items():
        arrays = peer._inner.tree.arrays
        place = peer._inner.tree.names.index(name)
        arrays[place] = jnp.full_like(arrays[place], value)
    before = newcomer.look()
    with pytest.raises(PeerError, match=next(iter(lie)).replace(".", r"\.")):
        newcomer.take_peer_state({}, sent(peer.begin_capture({}, parameters=False, rng=False).finish()))
    assert equal(newcomer.look(), before)


def test_what_the_other_librarys_optimizer_keeps_is_not_taken_and_its_peer_not_blamed() -> None:
    module = torch.nn.Linear(2, 2)
    theirs = TorchModel(module, torch.optim.AdamW(module.parameters()))
    with pytest.raises(OtherLibrary, match="the peer's is torch's, and this one is optax's"):
        trained().take_peer_state({}, sent(theirs.begin_capture({}, parameters=False, rng=False).finish()))
    with pytest.raises(OtherLibrary, match="the peer's is optax's, and this one is torch's"):
        theirs.take_peer_state({}, sent(trained().begin_capture({}, parameters=False, rng=False).finish()))


def test_an_optimizer_that_starts_afresh_is_as_the_script_made_it() -> None:
    scheduled = optax.inject_hyperparams(optax.adam)(learning_rate=0.25)
    model = JaxModel(tree(), scheduled.init(tree()))
    params, opt_state = model.hand_over()
    for _ in range(2):  # the first one makes the moments of bfloat16 float32
        opt_state = scheduled.update(jax.tree.map(jnp.ones_like, params), opt_state, params)[1]
        model.take_arrays(params, opt_state)
    assert model.reset_optimizer()
    first, now = (jax.tree.leaves(one) for one in (scheduled.init(tree()), model.hand_over()[1]))
    assert all(
        np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in zip(first, now, strict=True)
    )


def test_an_exported_model_loads_back(tmp_path: Path) -> None:
    values = {name: tensor.float().numpy() for name, tensor in trained().tensors().items()}
    save_model(tmp_path / "model.safetensors", values, {})
    assert equal(load(tree(1), tmp_path / "model.safetensors"), trained().look()[0])


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: {**p, "extra": jnp.zeros(1)}, "another structure than when this learner began: 'extra' is new"),
        (lambda p: {"layers": p["layers"]}, "another structure than when this learner began: 'scale' is gone"),
        (lambda p: {**p, "scale": jnp.ones(4)}, r"'scale' is \(4,\) float32 now, and was \(4,\) bfloat16"),
        (lambda p: {**p, "scale": jnp.ones(5, jnp.bfloat16)}, r"'scale' is \(5,\) bfloat16 now"),
    ],
    ids=["more", "fewer", "type", "shape"],
)
def test_a_tree_of_another_form_is_refused(change: Any, told: str) -> None:
    model = trained()
    params, opt_state = model.hand_over()
    with pytest.raises(ConfigError, match=f"^params.*{told}"):
        model.take_arrays(change(params), opt_state)


def test_donated_arrays_are_refused() -> None:
    model = trained()
    params, opt_state = model.hand_over()
    params["scale"].delete()
    with pytest.raises(ConfigError, match=r"'scale' was donated to a jitted function already: give learner\.step what"):
        model.take_arrays(params, opt_state)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"n": jnp.zeros(2, jnp.int32)}, "'n' is int32, which Atoll cannot merge"),
        ({}, "params holds no arrays"),
        ({"w": jnp.zeros((0, 3))}, "'w' is empty"),
        ({"w": "text"}, "'w' is of type str"),
        ({"key": jax.random.key(0)}, "'key' is a typed random key"),
    ],
    ids=["integers", "nothing", "empty", "text", "key"],
)
def test_what_cannot_be_merged_is_told_in_one_line(params: Any, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Learner(params)
    assert ended.value.code == 2 and told in (line := capsys.readouterr().err) and line.count("\n") == 1


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="two arrays of params are called 'w'"):
        JaxModel(tree(), names=lambda path: "w")


def test_arrays_on_several_devices_are_refused_in_one_line() -> None:
    code = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from atoll.integrations.jax import Learner
mesh = jax.make_mesh((2,), ("d",))
Learner({"w": jax.device_put(jnp.zeros((4, 2)), NamedSharding(mesh, PartitionSpec("d")))})
"""
    assert ask(code, XLA_FLAGS="--xla_force_host_platform_device_count=2").startswith(
        "atoll: params: 'w' is sharded over 2 devices, which is not supported"
    )


def test_without_jax_one_line_says_what_to_install() -> None:
    told = ask("import sys; sys.modules['jax'] = None; import atoll.integrations.jax")
    assert told.splitlines()[-1].endswith(f": {install_command('jax')}")


def ask(code: str, **environment: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    return done.stderr


def test_a_name_that_is_none_is_refused() -> None:
    with pytest.raises(PlanError, match=r"names\(\) gave None for 'layers.0.bias': give a name"):
        JaxModel(tree(), names={}.get, transposed=lambda name: name.endswith("kernel"))  # type: ignore[arg-type]


def test_alone_a_wrong_tree_ends_the_script_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Learner(tree()) as learner:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            learner.step({"w": jnp.zeros(1)}, tokens=1)
    assert capsys.readouterr().err == "atoll: params has another structure than when this learner began: 'w' is new\n"


# ---- alone ----------------------------------------------------------------------------------------------------------


def test_alone_it_trains_as_it_does_without(capsys: pytest.CaptureFixture[str]) -> None:
    plain = (tree(), OPTIMIZER.init(tree()))
    with Learner(*plain) as learner:
        params, opt_state = learner.params, learner.opt_state
        for batch in learner.batches(np.zeros((8, 2), np.float32), batch_size=2):
            assert isinstance(batch, np.ndarray) and batch.shape == (2, 2)
            plain = step(*plain)
            params, opt_state = learner.step(*step(params, opt_state), tokens=2, loss=jnp.float32(1))
    assert learner.steps == 4 and equal((learner.params, learner.opt_state), plain)
    assert "alone" in capsys.readouterr().err


def test_a_learner_with_the_optimizer_makes_the_scripts_steps_itself() -> None:
    params, opt_state = tree(), OPTIMIZER.init(tree())
    with Learner(tree(), OPTIMIZER) as learner:
        for _ in range(3):
            params, opt_state = jax.jit(step)(params, opt_state)
            learner.update(jax.tree.map(jnp.ones_like, learner.params), tokens=1)
    assert learner.steps == 3 and equal(learner.params, params) and equal(learner.opt_state, opt_state)
    assert learner._apply._cache_size() == 1
    with Learner(tree(), opt_state) as learner, pytest.raises(TypeError, match=r"Learner\(params, optimizer\)"):
        learner.update(tree(), tokens=1)


def test_a_flax_module_trains(capsys: pytest.CaptureFixture[str]) -> None:
    graph, params = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = optax.sgd(0.5, momentum=0.9)

    @jax.jit
    def train_step(params: Any, opt_state: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(lambda own: jnp.mean((nnx.merge(graph, own)(jnp.ones((4, 2))) - 3) ** 2))(
            params
        )
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    with Learner(params, optimizer.init(params)) as learner:
        params, opt_state = learner.params, learner.opt_state
        for _ in range(40):
            params, opt_state, loss = train_step(params, opt_state)
            params, opt_state = learner.step(params, opt_state, tokens=4, loss=loss)
            losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0] and type(learner.params) is type(params)
    assert train_step._cache_size() == 1
