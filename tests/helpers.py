"""Small builders shared by tests: a tiny model, random trajectories and rows, a tiny task, and quick compilation."""

import contextlib
import pathlib
import random
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.data.protocols import Outcome
from sao_jax.data.rows import make_row, stack_rows
from sao_jax.data.segments import read_trajectory
from sao_jax.data.storage import TrajectoryStore
from sao_jax.data.tokenizers import CharTokenizer
from sao_jax.data.trajectory import Trajectory, TrajectoryBuilder
from sao_jax.envs import registry
from sao_jax.envs.base import Environment, TaskFamily
from sao_jax.learner import sharding
from sao_jax.learner.layout import Layout
from sao_jax.learner.learner import Learner
from sao_jax.learner.objective import Numbers
from sao_jax.learner.window import MAXIMA
from sao_jax.models.compute import PLAIN
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs, prefix_values
from sao_jax.models.decoder import bind, init_params
from sao_jax.models.logprobs import next_token_logprobs
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.ledger import Ledger
from sao_jax.runtime.metrics import read_metrics
from sao_jax.runtime.signals import Interrupted

MODEL = ModelConfig(vocab_size=6, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
MODEL_FLAGS = dict(dim=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_dim=32)
LENGTH = 12


# -- compilation -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quick_compilation(folder):
    """Leaves out XLA's slow passes, and keeps compiled programs in `folder`: equal programs are compiled once."""
    from jax.experimental.compilation_cache import compilation_cache

    wanted = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def quick_compile(request):
    """Import it into a module whose tests compile much."""
    with quick_compilation(cache_folder(request.config)):
        yield


def cache_folder(config) -> pathlib.Path:
    """Compiled programs of earlier sessions; `pytest --cache-clear` empties it."""
    return config.cache.mkdir("compiled")


def compilation_environment(folder) -> dict[str, str]:
    """The same for a subprocess."""
    return {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


# -- trajectories ------------------------------------------------------------------------------------------------------


def random_trajectory(
    rng: np.random.Generator,
    *,
    actions=(2, 2),
    prompt: int = 2,
    observation: int = 1,
    reward: float | None = None,
    version: int = 0,
    end: str = "terminated",
    vocab: int = MODEL.vocab_size,
    **labels,
) -> Trajectory:
    """Actions of the given numbers of tokens with observations between them; the reward comes at the end."""

    def ids(count):
        return rng.integers(0, vocab, count)

    builder = TrajectoryBuilder(ids(prompt), **labels)
    for index, count in enumerate(actions):
        if index:
            builder.add_observation(ids(observation))
        builder.add_action(ids(count), -rng.uniform(0.3, 3.0, count), [version] * count)
        builder.end_action()
    builder.add_reward(rng.normal() if reward is None else reward)
    return builder.build(end)


def random_rows(
    seed: int, count: int, *, length: int = LENGTH, steps_per_segment: int = 1, **options
) -> list[dict[str, np.ndarray]]:
    """Rows of unequal lengths and masks."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        actions = rng.integers(1, 4, rng.integers(1, 3))
        t = random_trajectory(rng, actions=actions, end=rng.choice(["terminated", "truncated"]), **options)
        numbers = dict(lambda_=rng.uniform(0.3, 1.0), advantage=float(rng.normal()))
        rows.append(make_row(t, length=length, steps_per_segment=steps_per_segment, **numbers))
    return rows


# -- a task ------------------------------------------------------------------------------------------------------------


class Tiny(TaskFamily):
    """Episodes of a few characters: `ab?` asks `turns` times for anything that ends in `;`.

    All actions but the last are answered by `-`. An attempt whose first action holds an `a` has reward 1.

    Args:
      turns: actions of an attempt.
      wait: seconds a step takes on a worker thread; `slow` those of every second instance.
      bad: what every `every`-th training instance does: "raise", "nan" or "hang" (on a worker thread); to the action
        `since` and later ones.
      reward: the same for all attempts, if given.
      tokens: of a whole attempt, if not the usual number.
    """

    name, stop, max_tokens = "tiny", ";", 10
    tokenizer = CharTokenizer("ab?-;")

    def __init__(
        self,
        turns: int = 1,
        wait: float = 0.0,
        slow: float | None = None,
        bad: str = "",
        every: int = 3,
        since: int = 1,
        reward: float | None = None,
        tokens: int | None = None,
    ):
        self.max_tokens = tokens or self.max_tokens
        self.max_turns, self.wait, self.slow, self.reward = turns, wait, slow, reward
        self.bad, self.every, self.since = bad, every, since
        self.fast = not (wait or slow or bad == "hang")

    def sample(self, rng):
        return rng.getrandbits(40)

    def prompt(self, problem):
        return ("ab", "ba", "aa")[problem % 3] + "?"

    def respond(self, problem, actions):
        if len(actions) < self.max_turns:
            return Outcome(observation="-")
        reward = float("a" in actions[0]) if self.reward is None else self.reward
        return Outcome(end="terminated", reason="answer", reward=reward, parts={"a": float("a" in actions[0])})

    def expert(self, problem, actions, rng: random.Random):
        return rng.choice(["a;", "ba;"])

    def environment(self):
        return TinyEnvironment(self)


class TinyEnvironment(Environment):
    """Misbehaves as the family says, but not in demonstrations."""

    _shown = False

    def demonstrate(self, rng):
        self._shown = True
        return super().demonstrate(rng)

    def restore(self, instance, actions):
        self._instance = instance
        super().restore(instance, actions)

    def step(self, action):
        family, instance = self._family, self._instance
        is_slow = family.slow is not None and instance.split == "train" and instance.index % 2
        if seconds := family.slow if is_slow else family.wait:
            time.sleep(seconds)
        outcome = super().step(action)
        is_bad = instance.split == "train" and instance.index % family.every == family.every - 1
        if family.bad and is_bad and not self._shown and len(self._actions) >= family.since:
            if family.bad == "raise":
                raise RuntimeError("broken on purpose")
            if family.bad == "hang":
                time.sleep(3600)
            return Outcome(reward=float("nan"), end="terminated")
        return outcome


if "tiny" not in registry.names():
    registry.register("tiny", Tiny)


def assert_answers_anything(family, actions):
    """No action raises; observations are in the vocabulary, rewards 0 or 1, and a restored attempt goes on alike."""
    environment, instance, done = family.environment(), family.instance("train", 0), []
    environment.reset(instance)
    for action in actions:
        restored = family.environment()
        restored.restore(instance, done)
        outcome = environment.step(action)
        assert restored.step(action) == outcome
        family.tokenizer.encode(outcome.observation)
        assert outcome.reward in (0.0, 1.0)
        done.append(action)
        if outcome.end:
            break


# -- runs --------------------------------------------------------------------------------------------------------------


class SilentDisplay:
    """Takes what a run shows; keeps the notes, and whether programs are being compiled."""

    def __init__(self):
        self.notes: list[str] = []
        self.compiling = False

    def stage(self, name, *_):
        self.compiling = name == "compiling"

    def advance(self, *_, **__):
        self.compiling = False

    def note(self, line):
        self.notes.append(line)


class StopAt:
    """A check that interrupts its n-th call, those between compiled programs not counted."""

    def __init__(self, n, display):
        self.left, self.display = n, display

    def __call__(self):
        self.left -= not self.display.compiling
        if self.left == 0:
            raise Interrupted(signal.SIGTERM)


class Record:
    """What a run folder holds after the run."""

    def __init__(self, folder: pathlib.Path):
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            self.counts = ledger.check()
            self.rollouts = ledger.stored()
            self.events = list(ledger.events())
            self.dropped = ledger.dropped_by()
            self.missing = ledger.running()
        with TrajectoryStore(folder / "trajectories") as store:
            self.trajectories = {r.id: read_trajectory(store, r.location) for r in self.rollouts}
        self.lines = read_metrics(folder / "metrics.jsonl")

    def of_kind(self, kind):
        return [event.payload for event in self.events if event.kind == kind]

    @property
    def updates(self) -> list[list[int]]:
        """Rollouts of each update, in order of arrival."""
        batches, batch = [], []
        for event in self.events:
            if event.kind == "arrive":
                batch.append(event.payload["rollout"])
            elif event.kind == "update":
                batches.append(batch)
                batch = []
        return batches

    @property
    def trained(self) -> list[int]:
        """Rollouts in the order in which they were trained, those of an unfinished batch left out."""
        return [rollout for batch in self.updates for rollout in batch]

    @property
    def staleness(self) -> list[int]:
        """Version at training minus oldest version, per trained RL rollout, in order of training."""
        versions = [payload["version"] for payload in self.of_kind("update")]
        return [
            version - 1 - self.trajectories[rollout].oldest_version
            for version, batch in zip(versions, self.updates, strict=True)
            for rollout in batch
        ]


# -- attention ---------------------------------------------------------------------------------------------------------


def value_and_gradients(form, q, k, v, d):
    """A form of attention at q, k, v, and its gradients for the cotangent d."""

    @jax.jit
    def run(q, k, v, d):
        out, pullback = jax.vjp(form, q, k, v)
        return out, *pullback(d)

    return [np.asarray(x, np.float32) for x in run(q, k, v, d)]


# -- learners ----------------------------------------------------------------------------------------------------------


def make_learner(
    choices,
    *,
    devices=1,
    micro_rows=2,
    batch=8,
    length=LENGTH,
    most=1,
    pieces=1,
    buckets=1,
    seed=0,
    shard_params=False,
    compute=PLAIN,
    **numbers,
):
    """A learner of the tiny model; distributions are far from uniform, and the critic's trunk has a gradient."""
    policy = jax.tree.map(lambda x: 2 * x, init_params(MODEL, jax.random.key(seed)))
    layout = Layout.fit(batch, length, devices, micro_rows=micro_rows, most=most, pieces=pieces, buckets=buckets)
    how = dict(shard_params=shard_params, compute=compute)
    learner = Learner(MODEL, choices, Numbers(**numbers), layout, data_mesh(devices), policy, **how)
    if choices.has_critic:
        head = learner.state["critic"]["head"]
        w = 0.3 * np.random.default_rng(seed).normal(size=head["w"].shape)
        head["w"] = jax.device_put(w.astype(np.float32), head["w"].sharding)
    learner.start = jax.tree.map(jnp.copy, learner.state)
    return learner


def restart(learner, **numbers):
    """The learner as it was made, with other numbers: nothing is compiled again."""
    learner.load(jax.tree.map(jnp.copy, learner.start), 0)
    learner.critic_only = False
    learner.numbers = jax.device_put(Numbers(**numbers).traced(), jax.NamedSharding(learner.mesh, jax.P()))
    return learner


def put_all(learner, rows):
    for row in rows:
        learner.put(row)
    return learner


def host(tree):
    return jax.tree.map(np.asarray, tree)


def gradients(learner, name="policy"):
    """The gradient sum over devices since the last boundary."""
    return host(sharding.reduce(learner._totals[name], learner.programs.specs[name]))


def assert_close(actual, desired, tolerance=1e-5):
    """Leaf by leaf, relative to the leaf's largest entry (at least 1)."""
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(desired), strict=True):
        scale = max(1.0, float(np.max(np.abs(b), initial=0.0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


def metric_sums(learner):
    return {k: float(np.max(v) if k in MAXIMA else np.sum(v)) for k, v in host(learner._totals["sums"]).items()}


def policy_logp(policy, rows) -> np.ndarray:
    """[N, L] log-probs under a policy, all rows at once on one device."""
    policy, batch = host(policy), stack_rows(rows)
    return np.asarray(_logp(policy, batch["tokens"], batch["temperature"]))


@jax.jit
def _logp(policy, tokens, temperature):
    model = bind(MODEL, policy)
    return next_token_logprobs(model(tokens), model.head(), tokens, temperature)[0]


def values_of(critic, rows) -> np.ndarray:
    """[N, L] the critic's V_t, all rows at once on one device."""
    critic, batch = host(critic), stack_rows(rows)
    return np.asarray(_values(critic, batch["tokens"], batch["length"])[0])


@jax.jit
def _values(critic, tokens, length):
    return prefix_values(critic_outputs(MODEL, critic, tokens), length)
