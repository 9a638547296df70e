import json
import logging
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from orbax.checkpoint import v1 as ocp

from sao_jax.runtime import checkpoints as checkpoints_module
from sao_jax.runtime.checkpoints import MANIFEST, CheckpointError, Checkpoints
from sao_jax.runtime.devices import data_mesh


def sharded(num_devices, *axes):
    return jax.NamedSharding(data_mesh(num_devices), jax.P(*axes))


def state_of(value, num_devices=1):
    replicated, rows = sharded(num_devices), sharded(num_devices, "data")
    params = {
        "embed": jax.device_put(np.arange(32, dtype=np.float32).reshape(8, 4) + value, rows),
        "layers": [{"w": jax.device_put(jnp.full((4,), value, jnp.bfloat16), replicated)}],
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = optimizer.init(params)
    opt_state = jax.tree.map(lambda x: jax.device_put(x, replicated) if x.ndim < 2 else x, opt_state)
    return {"policy": {"params": params, "opt": opt_state}, "beta": 0.25, "updates": 7, "seen": np.arange(3)}


def abstract(state, place):
    """`state` with each device array replaced by its shape on other devices."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)) if isinstance(x, jax.Array) else x, state
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y), path
        x, y = (jax.random.key_data(v) if v.dtype == jax.random.key(0).dtype else v for v in map(jnp.asarray, (x, y)))
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=str(path))


def test_state_comes_back_bitwise_in_its_own_structure_and_placement(tmp_path):
    state = state_of(1.5, num_devices=4) | {"key": jax.random.key(3), "loose": jnp.arange(2)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {"version": 12, "data": {"task": "sum"}})
        checkpoints.wait()
        restored, meta = checkpoints.restore(0, state)
    assert_same(restored, state)
    assert meta == {"version": 12, "data": {"task": "sum"}}
    embed = restored["policy"]["params"]["embed"]
    assert embed.sharding == state["policy"]["params"]["embed"].sharding
    assert embed.committed
    assert not restored["loose"].committed
    assert isinstance(restored["policy"]["opt"][1][0], optax.ScaleByAdamState)


def test_random_keys_continue_the_same_stream(tmp_path):
    state = {"key": jax.random.key(3), "fast": jax.random.key(4, impl="rbg")}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {})
        checkpoints.wait()
        for like in (state, jax.eval_shape(lambda: state)):
            restored, _ = checkpoints.restore(0, like)
            for name, key in state.items():
                assert restored[name].dtype == key.dtype
                np.testing.assert_array_equal(jax.random.uniform(restored[name], 4), jax.random.uniform(key, 4))


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_four_devices_save_and_another_number_restores(tmp_path, num_devices):
    state = state_of(2.0, num_devices=4)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state, {"version": 1})
    rows, replicated = sharded(num_devices, "data"), sharded(num_devices)
    like = abstract(state, lambda x: rows if x.ndim == 2 else replicated)
    restored, _ = Checkpoints(tmp_path).restore(0, like)
    assert_same(restored, state)
    assert restored["policy"]["params"]["embed"].sharding == rows
    assert restored["policy"]["opt"][1][0].count.sharding == replicated


def test_parameters_are_plain_dicts_for_other_programs(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, state_of(1.0), {})
    loaded = ocp.load(tmp_path / "0")
    assert set(loaded["policy"]["params"]) == {"embed", "layers"}
    assert set(loaded["policy"]["opt"]["1"]["0"]) == {"count", "mu", "nu"}


def test_meta_data_is_read_without_jax(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, state_of(1.0), {"version": 2})
    program = (
        "import sys; from sao_jax.runtime.checkpoints import Checkpoints; c = Checkpoints(sys.argv[1]);"
        "print(c.newest(), c.read_meta(4)); assert 'jax' not in sys.modules"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert result.stdout == "4 {'version': 2}\n", result.stderr


def test_the_learning_rate_schedule_continues(tmp_path):
    # lr at update i = 0.1 * (i + 1) / 4, up to 0.1
    schedule = optax.join_schedules([optax.linear_schedule(0.025, 0.1, 3), optax.constant_schedule(0.1)], [3])
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=schedule)

    def updates(params, opt_state, count):
        rates = []
        for i in range(count):
            grads = jax.tree.map(lambda p, i=i: p * (i + 1.0), params)
            change, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, change)
            rates.append(float(opt_state.hyperparams["learning_rate"]))
        return params, opt_state, rates

    start = {"w": jnp.array([1.0, -2.0])}
    params, opt_state, first = updates(start, optimizer.init(start), 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, {"params": params, "opt": opt_state}, {"version": 3})
    straight, straight_opt, rest = updates(params, opt_state, 3)
    like = jax.eval_shape(lambda: {"params": start, "opt": optimizer.init(start)})
    restored, _ = Checkpoints(tmp_path).restore(0, like)
    resumed, resumed_opt, resumed_rest = updates(restored["params"], restored["opt"], 3)
    np.testing.assert_allclose(first + rest, [0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rtol=1e-6)
    np.testing.assert_allclose(resumed_rest, [0.1, 0.1, 0.1], rtol=1e-6)
    assert_same((resumed, resumed_opt), (straight, straight_opt))


def test_a_save_holds_the_moment_of_the_call(tmp_path, monkeypatch):
    """Donating updates and a changed meta dict while the writer has not even begun."""
    write = Checkpoints._write

    def late(self, *arguments):
        time.sleep(0.3)
        write(self, *arguments)

    monkeypatch.setattr(Checkpoints, "_write", late)
    update = jax.jit(lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0)
    place = sharded(2)
    state = update({name: jax.device_put(np.full((64, 64), i, np.float32), place) for i, name in enumerate("abc")})
    after_one = jax.tree.map(np.array, state)
    host = np.arange(4)
    meta = {"version": 1}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"params": state, "host": host}, meta)
        for version in (2, 3, 4):
            pointer = state["a"].addressable_shards[0].data.unsafe_buffer_pointer()
            state = update(state)
            meta["version"] = version
            host += 1
            # The save must not have made a view that silently turns donation off.
            assert state["a"].addressable_shards[0].data.unsafe_buffer_pointer() == pointer
        assert checkpoints.newest() is None
        checkpoints.wait()
        assert checkpoints.newest() == 1
        like = {"params": after_one, "host": host}
        restored, stored_meta = checkpoints.restore(1, like)
    assert stored_meta == {"version": 1}
    assert_same(restored, {"params": after_one, "host": np.arange(4)})


def test_the_newest_ones_are_kept_and_one_version_can_be_saved_twice(tmp_path):
    state = {"w": jnp.ones(3)}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for version in (0, 0, 1, 2):
            checkpoints.save(checkpoints.next_step(), state, {"version": version})
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
        assert checkpoints.newest() == 3
        assert [checkpoints.read_meta(step)["version"] for step in (2, 3)] == [1, 2]
        with pytest.raises(ValueError, match=r"checkpoint 3 cannot be saved.*next is 4"):
            checkpoints.save(3, state, {})


def damage(name, change):
    def apply(folder):
        path = max(folder.rglob(name), key=lambda p: p.stat().st_size)
        change(path)
        return path

    return apply


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped": damage("d/*", flip),
    "cut": damage("d/*", lambda path: os.truncate(path, path.stat().st_size // 2)),
    "missing": damage("_METADATA", pathlib.Path.unlink),
    "meta": damage("meta.json", flip),
    "manifest flipped": damage(MANIFEST, flip),
    "manifest cut": damage(MANIFEST, lambda path: path.write_text(path.read_text().splitlines()[0] + "\n")),
    "unfinished": damage(MANIFEST, pathlib.Path.unlink),
}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with Checkpoints(folder) as checkpoints:
        for step in range(3):
            weights = np.random.default_rng(step).random(2000, np.float32)
            checkpoints.save(step, {"w": weights}, {"version": step})
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_broken_checkpoint_is_named_and_the_one_before_is_taken(three_steps, tmp_path, caplog, kind):
    folder = tmp_path / "copy"
    shutil.copytree(three_steps, folder)
    DAMAGES[kind](folder / "2")
    with Checkpoints(folder) as checkpoints:
        with caplog.at_level(logging.WARNING):
            assert checkpoints.newest() == 1
        assert [r.message for r in caplog.records if "checkpoint 2" in r.message and "is skipped" in r.message]
        like = {"w": np.empty(2000, np.float32)}
        with pytest.raises(CheckpointError, match=r"checkpoint 2 .* cannot be restored: "):
            checkpoints.restore(2, like)
        restored, meta = checkpoints.restore(1, like)
        np.testing.assert_array_equal(restored["w"], np.random.default_rng(1).random(2000, np.float32))
        assert meta == {"version": 1}
        # The run goes on; what is broken counts neither as kept nor as a free number.
        for step in (3, 4):
            assert checkpoints.next_step() == step
            checkpoints.save(step, {"w": restored["w"] + step}, {"version": step})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3, 4]
        assert checkpoints.newest() == 4


def test_there_may_be_no_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.newest() is None
    assert checkpoints.next_step() == 0
    with pytest.raises(CheckpointError, match=r"checkpoint 0 in .*none cannot be read: there is no such step"):
        checkpoints.read_meta(0)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="keep is 0"):
        Checkpoints(tmp_path, keep=0)


def test_another_model_is_refused_by_its_first_leaf_that_differs(three_steps):
    checkpoints = Checkpoints(three_steps)
    cases = [
        ({"w": np.empty(3000, np.float32)}, r"w is float32\[2000\] in the checkpoint, float32\[3000\] is expected"),
        ({"w": np.empty(2000, np.float16)}, r"w is float32\[2000\] in the checkpoint, float16\[2000\] is expected"),
        (
            {"w": np.empty(2000, np.float32), "z": {"b": np.empty(1, np.int32)}},
            r"z/b is nothing in the checkpoint, int32\[1\] is expected",
        ),
        ({}, r"w is float32\[2000\] in the checkpoint, nothing is expected"),
    ]
    for like, message in cases:
        with pytest.raises(ValueError, match="checkpoint 2 does not fit: " + message):
            checkpoints.restore(2, like)


def test_names_that_would_fall_together_are_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="same name"):
        checkpoints.save(0, {"a.b": 1.0, "a": {"b": 2.0}}, {})


def test_a_full_disk_is_reported_and_older_checkpoints_stay(tmp_path, caplog):
    weights = np.random.default_rng(0).random(100_000)  # does not compress
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, {"w": weights[:10]}, {"version": 0})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
            checkpoints.save(1, {"w": weights}, {"version": 1})
            with pytest.raises(CheckpointError, match=r"checkpoint 1 in .* was not saved: .*[Ff]ile too large"):
                checkpoints.save(2, {"w": weights}, {"version": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        checkpoints.wait()  # reported once
        assert checkpoints.newest() == 0
        assert checkpoints.steps() == [0]
        checkpoints.save(1, {"w": weights}, {"version": 2})
        checkpoints.wait()
        assert checkpoints.newest() == 1
        assert checkpoints.steps() == [1]
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
            checkpoints.save(2, {"w": weights}, {"version": 3})
            with pytest.raises(CheckpointError, match="checkpoint 2"):
                checkpoints.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Checkpoints(tmp_path).newest() == 1
    assert not [r for r in caplog.records if r.name == "absl"]  # told once, not by every thread of the writer


def test_a_folder_that_cannot_be_made_is_reported_at_close(tmp_path):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "checkpoints")
    checkpoints.save(0, {"w": np.ones(2)}, {})
    with pytest.raises(CheckpointError, match=r"checkpoint 0 in .* was not saved: "):
        checkpoints.close()


def test_a_kill_between_arrays_and_checksums_leaves_the_step_before(tmp_path, monkeypatch):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(0, {"w": np.ones(2)}, {"version": 0})
        checkpoints.wait()

        def killed(*_):
            raise OSError("killed")

        monkeypatch.setattr(checkpoints_module, "write_durably", killed)
        checkpoints.save(1, {"w": np.ones(2)}, {"version": 1})
        with pytest.raises(CheckpointError, match="killed"):
            checkpoints.wait()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.newest() == 0
        assert checkpoints.next_step() == 2


_SAVER = """
import sys
import numpy as np
from sao_jax.runtime.checkpoints import Checkpoints
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    print("ready", flush=True)
    while True:
        step = checkpoints.next_step()
        checkpoints.save(step, {"w": np.full(300_000, step), "n": step}, {"step": step})
        print(step, flush=True)
"""


@pytest.mark.slow
def test_kills_during_saves_leave_a_complete_one(tmp_path):
    newest = -1
    for delay in (0.0, 0.05, 0.12):
        command = [sys.executable, "-c", _SAVER, str(tmp_path)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        root = pathlib.Path(__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=root) as process:
            for _ in range(3):  # "ready", and two steps, the first of which is complete when the second is begun
                process.stdout.readline()
            time.sleep(delay)
            process.kill()
        with Checkpoints(tmp_path) as checkpoints:
            step = checkpoints.newest()
            assert step is not None
            assert step > newest
            newest = step
            state, meta = checkpoints.restore(step, {"w": np.empty(300_000, np.int64), "n": 0})
        assert (state["n"], meta) == (step, {"step": step})
        np.testing.assert_array_equal(state["w"], step)
        assert json.loads((tmp_path / str(step) / "meta.json").read_text())["step"] == step
