"""The in-process sampler: fixed slots, continuous batching, one device program per dispatch.

A dispatch enqueues one compiled program that, on every device, (1) applies the slots' new states, (2) feeds the prompt
and observation chunks of the rows that join, a fixed number of rows at a time, (3) decodes up to `burst` tokens a row
and stops early when no row is live, and (4) merges the new keys and values into the cache. There is one program per
attended length; all else is data, so nothing compiles after `warm_up`.

A row's tokens and log-probs are the same bits whatever its mates, its slot, its device and the order of calls, at a
fixed number of slots, of devices and of burst steps: random numbers come from (run seed, rollout, attempt, index of the
token), every product has the same shape whoever takes part, and a chunk's length class is the row's own.

Not thread-safe: one host thread owns the engine, as it owns every other program on these devices.
"""

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models import decoding
from sao_jax.models.config import ModelConfig
from sao_jax.models.decoder import bind, rotary_angles
from sao_jax.rollout.sampling import check_temperature, sample_tokens, token_uniforms

_STATE = ("token", "position", "remaining", "temperature", "rollout", "attempt", "offset")


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to continue: tokens so far, and how many may be sampled. Temperature 0 is greedy.

    offset: tokens of the attempt that are left out of `tokens`, so that random numbers belong to the attempt's tokens.
    """

    rollout: int
    attempt: int
    tokens: np.ndarray
    max_new: int
    temperature: float = 1.0
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one burst sampled for one rollout; the three arrays have equal length, a stop token is included.

    logp is that of the distribution each token was drawn from (at T = 0: at T = 1). done: "" still running | "stop" a
    stop token was sampled | "length" max_new is used up.
    """

    rollout: int
    tokens: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    done: str


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where things lie in the plan: the one int32 vector that a device gets per dispatch.

    [steps, (per slot) change? + new state, (per chunk length) number of groups, slot and start of each row, tokens]
    """

    slots: int
    rows: int
    groups: int
    buckets: tuple[int, ...]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"steps": (), "change": (self.slots,)} | {name: (self.slots,) for name in _STATE}
        for T in self.buckets:
            shapes |= {
                f"count{T}": (),
                f"place{T}": (self.groups, 2, self.rows),
                f"tokens{T}": (self.groups, self.rows, T),
            }
        return shapes

    @functools.cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def fields(self, plan):
        """The parts of a plan [..., size] by name: views of a NumPy array, slices of a JAX array."""
        parts, offset = {}, 0
        for name, shape in self.shapes.items():
            end = offset + math.prod(shape)
            parts[name] = plan[..., offset:end].reshape(plan.shape[:-1] + shape)
            offset = end
        return parts


def attended_lengths(context: int) -> tuple[int, ...]:
    """Lengths for which a program exists: the quarters of the context, rounded up to multiples of 32."""
    return tuple(sorted({-(-context * quarter // 128) * 32 for quarter in (1, 2, 3, 4)}))


def _sample_burst(config, layout, burst, attended, params, cache, state, plan, seed, stop):
    """The program of one device, see above. Returns (cache, state, result int32 [B, 1 + 2 * burst])."""
    model = bind(config, params)
    plan = layout.fields(plan[0])
    change = plan["change"] > 0
    new = {k: jax.lax.bitcast_convert_type(plan[k], v.dtype) for k, v in state.items()}
    state = {k: jnp.where(change, new[k], v) for k, v in state.items()}

    for T in reversed(layout.buckets):  # the longest first: a long chunk is split into those and one remainder
        place, tokens = plan[f"place{T}"], plan[f"tokens{T}"]

        def feed(g, cache, place=place, tokens=tokens):
            slots, start = place[g]
            return decoding.extend(model, cache, slots, tokens[g], start, attended=attended)[1]

        cache = jax.lax.fori_loop(0, plan[f"count{T}"], feed, cache)

    past = state["position"]
    B = past.shape[0]
    positions = past[:, None] + jnp.arange(burst)
    index = positions + 1 + state["offset"][:, None]  # of the token that is drawn, in the whole attempt
    uniforms = token_uniforms(jax.random.wrap_key_data(seed), state["rollout"], state["attempt"], index)
    cos, sin = (t[:, :, None] for t in rotary_angles(positions.T, config.head_dim, config.rope_theta))
    head = model.head().astype(config.dtype)

    def more(carry):
        step, _, _, remaining, *_ = carry
        return (step < plan["steps"]) & jnp.any(remaining > 0)

    def decode(carry):
        step, window, token, remaining, count, ids, logps = carry
        hidden, window = decoding.decode_step(model, window, token, cos[step], sin[step], past, step, steps=burst)
        logits = jnp.dot(hidden, head, preferred_element_type=jnp.float32)
        drawn, logp = sample_tokens(logits, uniforms[:, step], state["temperature"])
        live = remaining > 0
        token = jnp.where(live, drawn, token)
        remaining = jnp.where(live & ~stop[token], remaining - 1, 0)
        return step + 1, window, token, remaining, count + live, ids.at[step].set(token), logps.at[step].set(logp)

    window = decoding.open_window(cache, past, attended=attended, steps=burst)
    zeros = jnp.zeros((burst, B), jnp.int32)
    start = (0, window, state["token"], state["remaining"], zeros[0], zeros, zeros.astype(jnp.float32))
    _, window, token, remaining, count, ids, logps = jax.lax.while_loop(more, decode, start)
    cache = decoding.close_window(cache, window, past, steps=burst)
    state = state | {"token": token, "position": past + count, "remaining": remaining}
    result = jnp.concatenate([count[None], ids, jax.lax.bitcast_convert_type(logps, jnp.int32)]).T
    return cache, state, result


class Engine:
    """Samples from a decoder for many rollouts at once.

    config, params: the policy; the parameters are copied. mesh: one axis "data"; `slots` is split over its devices and
    must be a multiple of their number. context: longest sequence, in tokens. stop_ids: tokens that end an action.
    burst: decode steps per dispatch. prefill_buckets: chunk lengths; a longer chunk is split. prefill_rows: rows per
    prefill call and device. kv_after_swap: "keep" leaves the cache of unfinished rows as it is when weights change,
    "recompute" feeds their tokens again with the new weights.

    The life of a rollout: submit -> (dispatch, collect) until a Piece is done -> extend with the observation, or
    release. Several dispatches may be outstanding; collect returns the results of the oldest.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        *,
        mesh: jax.sharding.Mesh,
        slots: int,
        context: int,
        stop_ids: Sequence[int],
        seed: int,
        burst: int = 8,
        prefill_buckets: Sequence[int] = (8, 32),
        prefill_rows: int = 2,
        version: int = 0,
        kv_after_swap: str = "keep",
    ):
        devices = mesh.devices.size
        if mesh.axis_names != ("data",):
            raise ValueError(f"the mesh has axes {mesh.axis_names}; the engine needs the single axis 'data'")
        if slots < 1 or slots % devices:
            raise ValueError(
                f"{slots} slots cannot be split evenly over {devices} devices; use a multiple of {devices}"
            )
        for name, value in (("context", context), ("burst", burst), ("prefill_rows", prefill_rows)):
            if value < 1:
                raise ValueError(f"engine {name} is {value}; it must be at least 1")
        if not prefill_buckets or min(prefill_buckets) < 1:
            raise ValueError(f"prefill_buckets is {tuple(prefill_buckets)}; give one or more positive lengths")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed is {seed}; it must lie in [0, 2**32)")
        if kv_after_swap not in ("keep", "recompute"):
            raise ValueError(f"kv_after_swap is {kv_after_swap!r}; allowed: keep, recompute")
        self.config, self.slots, self.context, self.burst = config, slots, context, burst
        self.version, self.last_schedule = version, None
        self.watch: Callable = lambda start, result, live, name: None  # see DeviceWatch
        self._recompute = kv_after_swap == "recompute"
        self._stale = False  # the cache was computed with weights older than self.version
        self._devices, self._local = devices, slots // devices
        self._lengths = attended_lengths(context)
        buckets = tuple(sorted(set(prefill_buckets)))
        rows = min(prefill_rows, self._local)
        self._layout = _Layout(self._local, rows, -(-self._local // rows), buckets)

        self._sharded = jax.NamedSharding(mesh, jax.P("data"))
        self._replicated = jax.NamedSharding(mesh, jax.P())
        put = functools.partial(jax.device_put, device=self._replicated)
        self._params = put(jax.tree.map(jnp.copy, params))
        self._seed = put(jax.random.key_data(jax.random.key(seed)))
        self._stop_host = np.zeros(config.vocab_size, bool)
        self._stop_host[self._checked(stop_ids)] = True
        self._stop = put(self._stop_host)
        capacity = self._lengths[-1] + max(burst, buckets[-1])
        state = {name: jnp.zeros(slots, jnp.float32 if name == "temperature" else jnp.int32) for name in _STATE}
        self._cache, self._state = jax.device_put((decoding.init_cache(config, slots, capacity), state), self._sharded)

        # On CPU a device has one core: loops of a step split over threads would wait for each other, and a sum over a
        # row, which XLA would make into a tree of windows there, is faster as the plain loop that it is.
        passes = {"xla_disable_hlo_passes": "cpu-parallel-task-assigner,tree_reduction_rewriter"}
        options = passes if mesh.devices.flat[0].platform == "cpu" else None

        @functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3), compiler_options=options)
        def program(attended, *args):
            d, r = jax.P("data"), jax.P()
            body = functools.partial(_sample_burst, config, self._layout, burst, attended)
            # No collectives and no gradients here, so there is nothing for the check of replication to find.
            return jax.shard_map(body, mesh=mesh, in_specs=(r, d, d, d, r, r), out_specs=(d, d, d), check_vma=False)(
                *args
            )

        self._program = program

        # The host's view of the slots. `position` is that of the newest token, which is not in the cache yet.
        self._history = np.zeros((slots, context), np.int32)
        self._position = np.zeros(slots, np.int64)
        self._ahead = np.zeros(slots, np.int64)  # steps enqueued and not yet collected
        self._remaining = np.zeros(slots, np.int64)
        self._serial = np.zeros(slots, np.int64)  # counts the tenants of a slot
        self._temperature = np.zeros(slots, np.float32)
        self._rollout = np.zeros(slots, np.int64)
        self._attempt = np.zeros(slots, np.int64)
        self._offset = np.zeros(slots, np.int64)
        self._changed = np.zeros(slots, bool)
        self._slot_of: dict[int, int] = {}
        self._free = list(range(slots))
        self._chunks: dict[int, tuple[int, int]] = {}  # slot -> first position and end of the tokens to feed
        self._joins: list[list[int]] = []
        self._outstanding: collections.deque = collections.deque()

    @property
    def free(self) -> int:
        """Number of slots that can take a request."""
        return len(self._free)

    # ---- requests

    def submit(self, request: Request) -> None:
        """Takes a free slot for a new sequence; it joins at the next dispatch."""
        tokens = self._checked(request.tokens)
        rollout = int(request.rollout)
        temperature = check_temperature(request.temperature)
        if rollout in self._slot_of:
            raise ValueError(f"rollout {rollout} has a slot already; release it first")
        for name, value in (("rollout", rollout), ("attempt", request.attempt), ("offset", request.offset)):
            if not 0 <= value < 2**31:
                raise ValueError(f"{name} is {value}; it must lie in [0, 2**31)")
        if not tokens.size:
            raise ValueError(f"rollout {rollout} has an empty prompt; at least one token is needed")
        self._check_room(rollout, tokens.size, request.max_new)
        if not self._free:
            raise ValueError(f"no free slot for rollout {rollout}; all {self.slots} are taken")
        slot = self._free.pop(0)
        self._slot_of[rollout] = slot
        self._serial[slot] += 1
        self._ahead[slot] = 0
        self._rollout[slot], self._attempt[slot] = rollout, request.attempt
        self._temperature[slot], self._offset[slot] = temperature, request.offset
        self._join(slot, 0, 0, tokens, request.max_new)

    def extend(self, rollout: int, tokens: Sequence[int], max_new: int, attempt: int | None = None) -> None:
        """Appends tokens (an observation; none is allowed) to a row that is done, and samples up to max_new more.

        A new `attempt` gives the row other random numbers, for a position that it may have sampled at before.
        """
        slot = self._slot(rollout)
        if self._remaining[slot]:
            raise ValueError(f"rollout {rollout} is still running; extend it when its action is done")
        tokens = self._checked(tokens)
        newest = int(self._position[slot])
        self._check_room(rollout, newest + 1 + tokens.size, max_new)
        self._attempt[slot] = self._attempt[slot] if attempt is None else attempt
        self._join(slot, newest + 1, newest, tokens, max_new)

    def truncate(self, rollout: int, length: int) -> None:
        """Forgets all but the first `length` tokens of a sequence; the row then waits for extend or release.

        For stop strings, which only the text shows. Nothing may be outstanding for the row.
        """
        slot = self._slot(rollout)
        if not 1 <= length <= self._position[slot] + 1:
            raise ValueError(f"rollout {rollout} has {self._position[slot] + 1} tokens; cannot keep {length}")
        if slot in self._chunks or (self._outstanding and self._remaining[slot]):
            raise ValueError(f"rollout {rollout} has tokens under way; collect before truncating")
        self._position[slot], self._remaining[slot], self._changed[slot] = length - 1, 0, True

    def release(self, rollout: int) -> None:
        """Gives the slot back, at any time; tokens of the row that are still under way are discarded."""
        slot = self._slot(rollout)
        del self._slot_of[rollout]
        self._chunks.pop(slot, None)
        self._joins = [join for join in self._joins if join[0] != rollout]
        self._serial[slot] += 1
        self._remaining[slot], self._changed[slot] = 0, True
        self._free.append(slot)

    def publish(self, params: dict, version: int) -> None:
        """New weights from the next dispatch on. The engine keeps `params`: they must not be donated by anyone."""
        if version < self.version:
            raise ValueError(f"version {version} is older than the engine's version {self.version}")
        self._params = jax.device_put(params, self._replicated)
        self.version, self._stale = version, self._recompute

    # ---- device work

    def dispatch(self) -> bool:
        """Enqueues the joins and one burst for all live rows; False, and nothing enqueued, if no row is live."""
        live = self._remaining > 0
        if not live.any():
            return False
        if self._stale:
            if self._outstanding:
                raise ValueError("kv_after_swap='recompute' needs the outstanding bursts collected before a dispatch")
            self._chunks |= {slot: (0, int(self._position[slot])) for slot in self._slot_of.values()}
            self._stale = False
        needed = int(np.max(np.where(live, self._position + self._ahead, 0)))
        needed = max([needed, *(end for _, end in self._chunks.values())])
        attended = next(length for length in self._lengths if length >= min(needed, self._lengths[-1]))
        plans, start = self._plans(), time.monotonic()
        for plan in plans:
            result = self._run(attended, plan)
        result.copy_to_host_async()
        self._outstanding.append((result, self.version, self._serial.copy(), live))
        self.watch(start, result, live.reshape(self._devices, self._local).mean(axis=1), "burst")
        self._ahead += live * self.burst
        self.last_schedule = {"version": int(self.version), "joins": self._joins, "steps": self.burst}
        self._joins = []
        return True

    def collect(self) -> list[Piece]:
        """What the oldest outstanding burst sampled, one piece a rollout; [] if nothing is outstanding."""
        if not self._outstanding:
            return []
        result, version, serial, live = self._outstanding.popleft()
        result = np.asarray(result)
        counts, ids, logps = result[:, 0], result[:, 1 : 1 + self.burst], result[:, 1 + self.burst :].view(np.float32)
        current = (serial == self._serial) & live
        self._ahead -= current * self.burst
        counts = np.where(current, counts, 0)
        (rows,) = np.nonzero(counts)
        counts = counts[rows]
        last = ids[rows, counts - 1]
        where, column = np.nonzero(np.arange(self.burst) < counts[:, None])
        self._history[rows[where], self._position[rows][where] + 1 + column] = ids[rows[where], column]
        self._position[rows] += counts
        left = self._remaining[rows] - counts
        stopped = self._stop_host[last]
        self._remaining[rows] = np.where(stopped, 0, left)
        versions = np.full(self.burst, version, np.int32)
        return [
            Piece(
                rollout,
                ids[row, :n].copy(),
                logps[row, :n].copy(),
                versions[:n],
                "stop" if s else "" if m else "length",
            )
            for row, rollout, n, s, m in zip(
                rows.tolist(),
                self._rollout[rows].tolist(),
                counts.tolist(),
                stopped.tolist(),
                left.tolist(),
                strict=True,
            )
        ]

    def warm_up(self, check: Callable[[], None] = lambda: None) -> dict[str, int]:
        """Compiles every program without sampling anything, `check()` before each; returns {name: attended length}."""
        for attended in self._lengths:
            check()
            jax.block_until_ready(self._run(attended, np.zeros((self._devices, self._layout.size), np.int32)))
        return {f"burst_{attended}": attended for attended in self._lengths}

    def programs(self) -> int:
        """Number of compiled programs; constant after warm_up."""
        return self._program._cache_size()

    # ---- inner parts

    def _checked(self, tokens) -> np.ndarray:
        tokens = np.asarray(tokens, np.int32).reshape(-1)
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.config.vocab_size):
            bad = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)][0]
            raise ValueError(f"token id {bad} is outside the vocabulary of {self.config.vocab_size}")
        return tokens

    def _check_room(self, rollout: int, length: int, max_new: int) -> None:
        if max_new < 1:
            raise ValueError(f"rollout {rollout}: max_new is {max_new}; it must be at least 1")
        if length + max_new > self.context:
            raise ValueError(
                f"rollout {rollout}: {length} tokens and {max_new} new ones exceed the context of {self.context}"
            )

    def _slot(self, rollout: int) -> int:
        if rollout not in self._slot_of:
            raise KeyError(f"rollout {rollout} has no slot")
        return self._slot_of[rollout]

    def _join(self, slot: int, at: int, feed_from: int, tokens: np.ndarray, max_new: int) -> None:
        """Puts tokens at positions at..; prefill feeds all but the newest, the first decode step feeds that one."""
        end = at + tokens.size
        self._history[slot, at:end] = tokens
        self._position[slot], self._remaining[slot], self._changed[slot] = end - 1, max_new, True
        if end - 1 > feed_from:
            self._chunks[slot] = (feed_from, end - 1)
        offset = [int(self._offset[slot])] if self._offset[slot] else []
        self._joins.append([int(self._rollout[slot]), int(self._attempt[slot]), at, int(tokens.size), *offset])

    def _groups(self, device: int) -> dict[int, list[list[tuple[int, int, int]]]]:
        """Per chunk length, groups of at most `rows` chunks (slot, start, end); a row's own chunks stay in order."""
        layout, (*_, longest) = self._layout, self._layout.buckets
        rounds, rest = collections.defaultdict(list), {T: [] for T in layout.buckets}
        for slot, (start, end) in sorted(self._chunks.items()):
            if slot // self._local != device:
                continue
            number = 0
            while end - start > longest:
                rounds[number].append((slot, start, start + longest))
                start, number = start + longest, number + 1
            rest[next(T for T in layout.buckets if end - start <= T)].append((slot, start, end, number))
        for slot, start, end, number in rest.pop(longest):
            rounds[number].append((slot, start, end))
        lists = {T: [[c[:3] for c in chunks]] for T, chunks in rest.items()}
        lists[longest] = [rounds[number] for number in sorted(rounds)]
        return {
            T: [chunks[i : i + layout.rows] for chunks in lists[T] for i in range(0, len(chunks), layout.rows)]
            for T in reversed(layout.buckets)
        }

    def _plans(self) -> list[np.ndarray]:
        """The plans of one dispatch: one, or more if the chunks are too many; only the last one decodes."""
        layout = self._layout
        waiting = [self._groups(d) for d in range(self._devices)]
        plans = []
        while not plans or any(groups for device in waiting for groups in device.values()):
            # A fresh array each time: the transfer may still be reading the previous one.
            plan = np.zeros((self._devices, layout.size), np.int32)
            fields = layout.fields(plan)
            for device, queues in enumerate(waiting):
                for T, groups in queues.items():
                    now, queues[T] = groups[: layout.groups], groups[layout.groups :]
                    self._write_groups(fields, device, T, now)
                    if queues[T]:
                        break  # shorter chunks may continue rows that still have long ones waiting
            plans.append(plan)
        self._chunks.clear()
        first = layout.fields(plans[0])
        shape = (self._devices, self._local)
        first["change"][:] = self._changed.reshape(shape)
        for name in ("token", "position", "remaining", "rollout", "attempt", "offset"):
            values = (
                self._history[np.arange(self.slots), self._position] if name == "token" else getattr(self, f"_{name}")
            )
            first[name][:] = values.reshape(shape)
        first["temperature"][:] = self._temperature.view(np.int32).reshape(shape)
        self._changed[:] = False
        layout.fields(plans[-1])["steps"][:] = self.burst
        return plans

    def _write_groups(self, fields, device: int, T: int, groups) -> None:
        fields[f"count{T}"][device] = len(groups)
        for g, group in enumerate(groups):
            for p in range(self._layout.rows):
                # A spare row repeats the first one: it writes the same values to the same place.
                slot, start, end = group[p] if p < len(group) else group[0]
                fields[f"place{T}"][device, g, :, p] = slot % self._local, start
                fields[f"tokens{T}"][device, g, p, : end - start] = self._history[slot, start:end]

    def _run(self, attended: int, plan: np.ndarray) -> jax.Array:
        self._cache, self._state, result = self._program(
            attended,
            self._params,
            self._cache,
            self._state,
            jax.device_put(plan, self._sharded),
            self._seed,
            self._stop,
        )
        return result
