"""What compressing a model's states costs: a model is trained on a task, then compressors on its states, then both are
scored on attempts that neither has seen.

Attempts are the scripted expert's, or those of a run's policy; returns are the rewards after a token. Everything
follows from the configuration.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.envs.registry import make_family
from sao_jax.learner import compression, supervised
from sao_jax.learner.compression import USES, WEIGHTS
from sao_jax.learner.sharding import place
from sao_jax.models import compressor, memory
from sao_jax.models.compressor import KINDS, CompressorConfig
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, init_params
from sao_jax.runtime.compression_data import Attempts, play, sampled
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.run import family_and_context, make_learner, read_config, restored_state

SAMPLE = 8192  # rows that a compressor's start is computed from


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """What is trained and compressed. Text fields with several values take them by comma."""

    task: str = "mathword:level=4"
    """Task with a scripted expert, as in experiments.train."""
    run: str | None = None
    """Folder of a run: its policy and attempts that it makes, instead of a model that is trained here."""
    compress: str = "states,critic,kv"
    """Uses: states kept of finished segments, the critic's memory of earlier segments, latent keys and values."""
    kinds: str = "moe,linear,pca,truncation"
    """Compressors to compare."""
    segment: int = 16
    """Tokens of a segment."""
    width: int | None = None
    """Width of a code of a state (default: a quarter of the model's width); keys and values keep the same share."""
    experts: int = 4
    """Experts of the mixture."""
    top_k: int = 1
    """Experts per vector."""
    dim: int = 1024
    """Width of the model."""
    layers: int = 2
    """Layers of the model."""
    heads: int = 8
    """Query heads, and as many for keys and values."""
    head_dim: int = 64
    """Width of a head."""
    mlp_dim: int = 512
    """Width of the MLP."""
    attempts: int = 1024
    """Attempts to train on."""
    codec_attempts: int = 256
    """How many of them compressors and critics are trained on."""
    test_attempts: int = 96
    """Attempts at held-out instances to score on."""
    model_steps: int = 150
    """Supervised steps of the model."""
    codec_steps: int = 60
    """Steps of each compressor and of each critic."""
    batch_tokens: int = 768
    """Tokens of a step, at least one row per device."""
    lr: float = 1e-3
    """Learning rate of the model."""
    codec_lr: float = 1e-4
    """Learning rate of compressors."""
    critic_lr: float = 1e-3
    """Learning rate of critics that read a memory."""
    seed: int = 0
    """Seed of the expert's choices, weights and batches."""
    devices: int | None = None
    """Devices to use (default: all)."""

    def check(self) -> None:
        """Raises ValueError for values that are not allowed, or that would have no effect."""
        for name, allowed in (("compress", USES), ("kinds", KINDS)):
            chosen = self.named(name)
            if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(allowed):
                value = getattr(self, name)
                raise ValueError(f"--{name} is {value!r}; allowed: {', '.join(allowed)}, several by comma, none twice")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and field.name != "seed" and value < 1:
                raise ValueError(f"--{field.name.replace('_', '-')} is {value}; it must be at least 1")
        if self.codec_attempts > self.attempts:
            raise ValueError(
                f"--codec-attempts is {self.codec_attempts}; there are {self.attempts} attempts to train on"
            )
        if "moe" not in self.named("kinds") and (self.experts, self.top_k) != (4, 1):
            raise ValueError("--experts and --top-k have no effect here; they need moe among --kinds")
        if "critic" not in self.named("compress") and self.critic_lr != CompressionConfig.critic_lr:
            raise ValueError("--critic-lr has no effect here; it needs critic in --compress")
        if not {"moe", "linear"} & set(self.named("kinds")) and self.codec_lr != CompressionConfig.codec_lr:
            raise ValueError("--codec-lr has no effect here; it needs moe or linear among --kinds")

    def named(self, name: str) -> tuple[str, ...]:
        return tuple(part for part in getattr(self, name).split(",") if part)

    def model(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=vocab_size,
            dim=self.dim,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
        )

    def codec(self, model: ModelConfig, width_in: int, kind: str) -> CompressorConfig:
        """The same share of another width: keys and values of a layer need not be as many as the model is wide."""
        width = max(1, (self.width or model.dim // 4) * width_in // model.dim)
        return compressor.config_of(kind, CompressorConfig(width_in, width, self.experts, self.top_k))


class Bench:
    """A trained model, its states, and what is needed to train and score compressors on them."""

    def __init__(self, config: CompressionConfig, report: Callable[[str], None], check: Callable[[], None]):
        self.config, self.check, self.report = config, check, report
        self.mesh = data_mesh(config.devices)
        self.by_row = jax.NamedSharding(self.mesh, jax.P("data"))
        self.everywhere = jax.NamedSharding(self.mesh, jax.P())
        policy = None
        if config.run is None:
            family = make_family(config.task)
            self.model = config.model(family.tokenizer.vocab_size)
            train = play(family, "train", config.attempts, config.segment, config.seed, check)
            test = play(family, "test", config.test_attempts, config.segment, config.seed, check)
        else:
            self.model, policy, found = _of_run(config, check)
            test = found.rows(slice(config.test_attempts))
            train = found.rows(slice(config.test_attempts, None))
        length = max(train.tokens.shape[1], test.tokens.shape[1])
        self.train, self.test = train.lengthened(length), test.lengthened(length)
        self.codec_train = self.train.rows(slice(config.codec_attempts))
        self.rows = -(-max(1, config.batch_tokens // length) // self.mesh.size) * self.mesh.size
        fitted = self._fit_model(policy)
        self.params, self.value = fitted["model"], fitted["value"]
        self.states = self._of_splits(self._hidden)
        self.head = jax.jit(lambda params: bind(self.model, params).head())(self.params)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _fit_model(self, policy: dict | None) -> dict:
        """{"model", "value"}: likelihood of action tokens and a value head, trained together; the head alone where
        there is a policy."""
        c, rng = self.config, np.random.default_rng(self.config.seed)
        program = compression.step_program("kv", self.model, None, self.mesh, segment=self.train.tokens.shape[1])

        def fresh(key):
            mean = self.train.returns[self.train.mask].mean()
            head = {"w": jnp.zeros((self.model.dim, 1)), "b": jnp.full((1,), mean)}
            return compression.init({"value": head} | ({} if policy else {"model": init_params(self.model, key)}))

        frozen = jax.device_put({} if policy is None else {"model": policy}, self.everywhere)
        state = jax.jit(fresh, out_shardings=self.everywhere)(jax.random.key(c.seed))
        weights = self._weights()
        for step in range(c.model_steps):
            self.check()
            batch = place(self.batch("kv", "train", rng.integers(0, len(self.train.tokens), self.rows)), self.by_row)
            rates = self._rates(step, c.model_steps, {name: c.lr for name in state["params"]})
            state, means = program(state, frozen, batch, weights, rates)
            if (step + 1) % 25 == 0 or step + 1 == c.model_steps:
                self.report(f"model: step {step + 1} of {c.model_steps}, {_line(means)}")
        return frozen | state["params"]

    def _weights(self):
        return jax.device_put({k: np.float32(v) for k, v in WEIGHTS.items()}, self.everywhere)

    def _rates(self, step: int, total: int, peaks: dict[str, float]) -> dict:
        warmup = max(1, min(20, total // 5))
        rates = {name: np.float32(supervised.cosine(step, total, peak, warmup)) for name, peak in peaks.items()}
        return place(rates, self.everywhere)

    def _map(self, function, attempts: Attempts) -> np.ndarray:
        """function(params, tokens) of all rows, a batch at a time, on the host."""
        program = jax.jit(function)
        out = []
        for start in range(0, len(attempts.tokens), self.rows):
            self.check()
            tokens = attempts.tokens[start : start + self.rows]
            part = np.pad(tokens, ((0, self.rows - len(tokens)), (0, 0)))
            out.append(np.asarray(program(self.params, place(part, self.by_row)))[: len(tokens)])
        return np.concatenate(out)

    def _of_splits(self, function) -> dict[str, np.ndarray]:
        return {name: self._map(function, getattr(self, name)) for name in ("codec_train", "test")}

    def _hidden(self, params, tokens):
        return bind(self.model, params)(tokens)

    # -- batches and frozen arrays per use -----------------------------------------------------------------------------

    @functools.cached_property
    def alone(self) -> dict[str, np.ndarray]:
        """States of segments read by themselves."""
        segment = self.config.segment
        return self._of_splits(lambda params, tokens: memory.segment_states(bind(self.model, params), tokens, segment))

    def kept(self, attempts: Attempts) -> np.ndarray:
        return np.asarray(memory.kept_positions(jnp.asarray(attempts.mask), self.config.segment)) & attempts.live

    def batch(self, use: str, split: str, chosen: np.ndarray) -> dict:
        """The rows `chosen` of a split as the batch of a use; rows below 0 are blank."""
        attempts = getattr(self, split).rows(chosen)
        present = (chosen >= 0)[:, None]
        mask, live = attempts.mask & present, attempts.live & present
        if use == "kv":
            return {"tokens": attempts.tokens, "mask": mask, "live": live, "return": attempts.returns}
        kept = self.kept(attempts) & present
        if use == "critic":
            states = self.alone[split][chosen]
            return {"states": states, "kept": kept, "mask": mask, "live": live, "return": attempts.returns}
        states = self.states[split][chosen]
        ahead = lambda x: np.concatenate([x[:, 1:], np.zeros_like(x[:, :1])], axis=1).reshape(-1)  # noqa: E731
        return {
            "states": states.reshape(-1, states.shape[-1]),
            "next_token": ahead(attempts.tokens),
            "return": ahead(attempts.returns),
            "action": ahead(mask),
            "live": kept.reshape(-1),
        }

    def vectors(self, use: str) -> list[np.ndarray]:
        """Sample of what a use compresses, [N, F]; one per layer for "kv"."""
        rng = np.random.default_rng(self.config.seed)
        if use == "kv":
            layers = self._kv_rows(rng)
        else:
            states = (self.states if use == "states" else self.alone)["codec_train"]
            layers = [states[self.kept(self.codec_train)]]
        return [x[rng.permutation(len(x))[:SAMPLE]] for x in layers]

    def _kv_rows(self, rng) -> list[np.ndarray]:
        tokens, live = self.codec_train.tokens, self.codec_train.live
        some = rng.permutation(len(tokens))[: max(self.rows, 2 * SAMPLE // tokens.shape[1])]
        found = self._map(
            lambda params, tokens: jnp.stack(memory.kv_rows(bind(self.model, params), tokens), axis=1),
            self.codec_train.rows(some),
        )
        return [found[:, layer][live[some]] for layer in range(self.model.num_layers)]

    def start(self, use: str, kind: str, vectors: list[np.ndarray]) -> tuple[CompressorConfig, list[dict]]:
        codec = self.config.codec(self.model, vectors[0].shape[1], kind)
        key = jax.random.key(self.config.seed)
        starts = [
            compressor.start_params(kind, codec, jax.random.fold_in(key, i), jnp.asarray(x))
            for i, x in enumerate(vectors)
        ]
        return codec, starts

    # -- one use, one kind ---------------------------------------------------------------------------------------------

    def measure(self, use: str, kind: str | None, vectors: list[np.ndarray]) -> dict[str, float]:
        """Trains what is to be trained and scores it: `kind` None is uncompressed."""
        c = self.config
        codec, params = None, {}
        if kind is not None:
            codec, starts = self.start(use, kind, vectors)
            params = {"codec": starts if use == "kv" else starts[0]}
        if use == "critic":
            params["readout"] = memory.init_readout(self.model, jax.random.key(c.seed), self.value)
        variances = [np.float32(x.var(0).mean()) for x in vectors]
        frozen = {"value": self.value, "variance": variances if use == "kv" else variances[0]}
        frozen |= {"states": {"head": self.head}, "critic": {}, "kv": {"model": self.params}}[use]
        frozen = jax.device_put(frozen, self.everywhere)
        learns = kind in ("moe", "linear")
        state = jax.jit(compression.init, out_shardings=self.everywhere)(params)
        if learns or use == "critic":
            state = self._train(use, kind, codec, state, frozen, learns)
        return self._score(use, codec, state["params"], frozen)

    def _train(self, use, kind, codec, state, frozen, learns):
        c, rng = self.config, np.random.default_rng(self.config.seed)
        program = compression.step_program(
            use, self.model, codec, self.mesh, segment=c.segment, train_codec=learns or codec is None
        )
        weights = self._weights()
        for step in range(c.codec_steps):
            self.check()
            batch = place(
                self.batch(use, "codec_train", rng.integers(0, len(self.codec_train.tokens), self.rows)), self.by_row
            )
            peaks = {"codec": c.codec_lr, "readout": c.critic_lr}
            rates = self._rates(step, c.codec_steps, {name: peaks[name] for name in state["params"]})
            state, means = program(state, frozen, batch, weights, rates)
            if step == 0 or step + 1 == c.codec_steps:
                self.report(f"{use}, {kind or 'uncompressed'}: step {step + 1} of {c.codec_steps}, {_line(means)}")
        return state

    def _score(self, use, codec, params, frozen) -> dict[str, float]:
        program = compression.score_program(use, self.model, codec, self.mesh, segment=self.config.segment)
        totals: dict[str, np.ndarray] = {}
        for start in range(0, self.config.test_attempts, self.rows):
            self.check()
            chosen = np.arange(start, start + self.rows)
            chosen = np.where(chosen < self.config.test_attempts, chosen, -1)
            sums = program(params, frozen, place(self.batch(use, "test", chosen), self.by_row))
            for name, pair in sums.items():
                totals[name] = totals.get(name, 0) + np.array(pair, np.float64)
        means = {name: total / max(count, 1) for name, (total, count) in totals.items()}
        layers = self.model.num_layers if use == "kv" else 1
        for name in ("reconstruction", "balance"):
            if name in means:
                means[name] /= layers
        if "value" in means:
            means["value"] = math.sqrt(means["value"])
        return {k: float(v) for k, v in means.items()}

    def bytes_per_token(self, use: str, codec: CompressorConfig | None) -> float:
        """Of what a use keeps of a finished token on average, without the compressor's own parameters."""
        if use == "kv":
            width, share = memory.kv_width(self.model), self.model.num_layers
        else:
            width, share = self.model.dim, self.kept(self.test).sum() / self.test.live.sum()
        return float(share) * (4 * width if codec is None else codec.code_bytes)


def _line(means: dict) -> str:
    return ", ".join(f"{name} {float(mean):.4f}" for name, mean in means.items())


# -- what is stored of a finished segment ------------------------------------------------------------------------------


def state_columns(codec: CompressorConfig, params: dict, states_TxD, kept_T: np.ndarray, segment: int) -> list[dict]:
    """Per segment of one trajectory the columns {positions [M], latent [M, C], experts, gates} of its kept states.

    `read_columns` gives the states back, as good as the compressor is.
    """
    pieces = []
    for start in range(0, len(kept_T), segment):
        positions = start + np.flatnonzero(kept_T[start : start + segment])
        model = compressor.bind(codec, params)
        code = model.compact(model.encode(jnp.asarray(states_TxD)[positions])[0])
        columns = {name: np.asarray(part) for name, part in code._asdict().items()}
        pieces.append({"positions": positions.astype(np.int32)} | columns)
    return pieces


def read_columns(codec: CompressorConfig, params: dict, columns: dict) -> tuple[np.ndarray, np.ndarray]:
    """(positions [M], decoded states [M, D]) of what `state_columns` made of a segment."""
    code = compressor.Code(*(jnp.asarray(columns[name]) for name in compressor.Code._fields))
    return columns["positions"], np.asarray(compressor.bind(codec, params).decode(code))


# -- all of it ---------------------------------------------------------------------------------------------------------


def _of_run(config: CompressionConfig, check: Callable[[], None]) -> tuple[ModelConfig, dict, Attempts]:
    folder = pathlib.Path(config.run)
    run = read_config(folder)
    family, context = family_and_context(run)
    learner = make_learner(run, family, context, data_mesh(run.devices))
    state, _ = restored_state(folder, learner)
    found = sampled(run, folder, config.attempts + config.test_attempts, config.segment, check)
    return learner.programs.config, jax.tree.map(np.asarray, state["policy"]), found


def compare(
    config: CompressionConfig, report: Callable[[str], None] = lambda _: None, check: Callable[[], None] = lambda: None
) -> list[dict]:
    """One record per use and compressor, the uncompressed first: use, kind ("none"), bytes_per_token, parameter_bytes
    and the means over held-out attempts: reconstruction (share of the variance lost), balance, nll (nats per action
    token), value (root mean squared error against returns); nll_change and value_change in % of the uncompressed.
    """
    config.check()
    bench, records = Bench(config, report, check), []
    for use in config.named("compress"):
        vectors = bench.vectors(use)
        exact = bench.measure(use, None, vectors)
        blind = float(bench.test.returns[bench.test.mask].std())  # the error of the best constant
        plain = {"bytes_per_token": bench.bytes_per_token(use, None), "value_of_a_constant": blind}
        records.append({"use": use, "kind": "none"} | plain | exact)
        report(f"{use}, uncompressed, held out: {_line(exact)}")
        for kind in config.named("kinds"):
            found = bench.measure(use, kind, vectors)
            codec = config.codec(bench.model, vectors[0].shape[1], kind)
            shared = [name for name in ("nll", "value") if name in exact]
            changes = {f"{name}_change": 100 * (found[name] / (exact[name] or math.nan) - 1) for name in shared}
            sizes = {
                "bytes_per_token": bench.bytes_per_token(use, codec),
                "parameter_bytes": parameter_bytes(codec, len(vectors)),
            }
            records.append({"use": use, "kind": kind} | sizes | found | changes)
            report(f"{use}, {kind}, held out: {_line(found | changes)}")
    return records


def parameter_bytes(codec: CompressorConfig, count: int = 1) -> int:
    shapes = jax.eval_shape(lambda key: compressor.init_params(codec, key), jax.random.key(0))
    return count * sum(4 * math.prod(x.shape) for x in jax.tree.leaves(shapes))
