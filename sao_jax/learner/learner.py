"""The learner: device-resident state that trajectories are put into one by one.

    learner.put(*rows)        an arrival: the rows of one trajectory, in order; copied to the device at once
    learner.accumulate()      gradient calls on every row not used yet
    learner.update()          the boundary: critic steps, policy step, smoothing; version + 1

The result is a function of the order of these calls and the rows alone, so a recorded order can be replayed, and every
process of a mesh over several makes the same calls.
"""

import time
from collections.abc import Callable, Container, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from sao_jax.data.packing import Packing
from sao_jax.learner.layout import Layout
from sao_jax.learner.objective import Choices, Numbers
from sao_jax.learner.programs import FLOAT_FIELDS, INT_FIELDS, SCALAR_FIELDS, Programs
from sao_jax.learner.sharding import own_copy, place
from sao_jax.models.compute import PLAIN, Compute, check_backend
from sao_jax.models.config import ModelConfig


def _nothing(*_) -> None:
    pass


class Learner:
    """Owns the state of one run on a mesh. All methods enqueue device work; only metrics are ever fetched.

    Attributes:
      state: what a checkpoint holds, see `programs`.
      version: optimizer steps of the policy.
    """

    def __init__(
        self,
        config: ModelConfig,
        choices: Choices,
        numbers: Numbers,
        layout: Layout,
        mesh: jax.sharding.Mesh,
        policy: dict,
        *,
        shard_params: bool = False,
        compute: Compute = PLAIN,
    ):
        check_backend(compute)
        if layout.devices != mesh.size:
            raise ValueError(f"the layout is for {layout.devices} devices, the mesh has {mesh.size}")
        self.programs = Programs(config, choices, layout, mesh, shard_params, compute)
        _ = self.programs.frozen  # a pattern that matches nothing is an error now, not after minutes of compiling
        self.choices, self.layout, self.mesh = choices, layout, mesh
        self._replicated = jax.NamedSharding(mesh, jax.P())
        self._by_device = jax.NamedSharding(mesh, jax.P("data"))
        self._own = [n for n, device in enumerate(mesh.devices.flat) if device in mesh.local_devices]
        self.numbers = place(numbers.traced(), self._replicated)
        self.state = self.programs.new_state(place(policy, self._replicated))
        self.version = 0
        self.critic_only = False
        self._totals = self.programs.new_totals()
        self._buffer = self.programs.new_buffer()
        self._indices = [place(jnp.int32(w), self._replicated) for w in range(layout.windows)]
        self._filled = self._pending = self._arrived = 0
        self._packing = layout.packing() if layout.packed else None
        self._lengths: list[int] = []  # of the rows of the batch so far
        self._chains: list[range] = []  # rows of trajectories that have several, among those no gradient call has used
        self.used_modes: set[str] = set()
        self._check: Callable[[], None] = _nothing  # called before each program; set while they are compiled
        self.watch: Callable = _nothing  # told of every call: when it began, and one of its results

    # -- arrivals ------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        return self._arrived == self.layout.batch

    @property
    def empty(self) -> bool:
        return self._arrived == 0

    @property
    def filled(self) -> int:
        """Rows of the batch so far."""
        return self._filled

    @property
    def pending(self) -> int:
        """Rows that no gradient call has used."""
        return self._pending

    @property
    def window_ready(self) -> bool:
        """Whether the rows not used yet complete a window or the batch, so that a gradient call wastes nothing.

        Packed, a window is complete when the next trajectory does not fit it: ask `packing()` before that is put.
        """
        if self._packing is not None:
            return self._pending > 0 and self.full
        complete = self.layout.completes_window(self._filled, self._filled - self._pending)
        return self._pending > 0 and (self.full or complete)

    def packing(self) -> Packing | None:
        """The places of the batch's pieces so far, a copy to plan with; None if rows are not packed."""
        return self._packing and self._packing.copy()

    def put(self, *rows: dict[str, np.ndarray]) -> None:
        """Copies the rows of a trajectory to their places; an arrival-trained critic steps on them right away."""
        self._place(rows)
        if self.choices.critic_update == "arrival" and self.choices.has_critic and not self.critic_only:
            self.accumulate()
            self._step_critic()

    def _place(self, rows: Sequence[dict]) -> None:
        if self.full:
            raise RuntimeError("the batch is full; update first")
        if not 1 <= len(rows) <= self.layout.most:
            raise ValueError(f"a trajectory of {len(rows)} rows; this learner takes 1 to {self.layout.most}")
        if len(rows) > 1:
            self._chains.append(range(self._filled, self._filled + len(rows)))
        for row in rows:
            self._lengths.append(int(row["length"]))
            if self._packing is not None:
                self._packing.add(self._lengths[-1])
            device, slot = self._place_of(self._filled)
            parts = (
                np.stack([row[k].astype(np.int32) for k in INT_FIELDS]),
                np.stack([row[k].astype(np.float32) for k in FLOAT_FIELDS]),
                np.array([row[k] for k in SCALAR_FIELDS], np.float32),
            )
            parts = place((np.int32(device), np.int32(slot), *parts), self._replicated)
            self._check()
            self._buffer = self.programs.put(self._buffer, *parts)
            self._filled += 1
            self._pending += 1
        self._arrived += 1

    def accumulate(self) -> None:
        """Adds the unnormalised gradients of all rows not used yet."""
        waits = self.critic_only or self.choices.policy_at_boundary
        first, last = self._filled - self._pending, self._filled
        self._link()
        self._call_windows("critic" if waits else "both", first, last)
        self._pending = 0

    def _link(self) -> None:
        """Gives the rows of a trajectory that has several what their advantages need of the rows that follow."""
        chains, self._chains = self._chains, []
        if not (chains and self.programs.linked):
            return
        rows = [n for chain in chains for n in chain]
        chosen = set(rows)
        for index in sorted({self._window_of(n) for n in rows}):
            live = self._live(index, chosen)
            self._check()
            start = time.monotonic()
            self._buffer = self.programs.links(
                self.state, self._buffer, self._indices[index], place(live, self._by_device), self.numbers
            )
            self.watch(start, self._buffer["links"], live.mean(axis=1)[self._own], "links")
        order = np.full(self.layout.devices * self.layout.slots, self.layout.devices * self.layout.slots, np.int32)
        places = [self._place_of(n) for n in reversed(rows)]
        order[: len(places)] = [device * self.layout.slots + slot for device, slot in places]
        self._check()
        names = ("links", "followed", "seam")
        found = self.programs.chain(*(self._buffer[k] for k in names), place(order, self._replicated))
        self._buffer |= found

    def _place_of(self, n: int) -> tuple[int, int]:
        """(device, slot) of the batch's n-th row."""
        if self._packing is None:
            return self.layout.place(n)
        at = self._packing.places[n]
        return at.device, at.slot

    def _window_of(self, n: int) -> int:
        return self.layout.window(n) if self._packing is None else self._packing.places[n].window

    def _slots_of_pieces(self, numbers: Iterable[int]) -> np.ndarray:
        """The slots of these pieces in their rows: int32 [devices, windows, rows of a window, pieces]; `slots` where
        there is none."""
        layout = self.layout
        slots = np.full((layout.devices, layout.windows, layout.rows, layout.pieces), layout.slots, np.int32)
        for n in numbers:
            at = self._packing.places[n]
            row = slots[at.device, at.window, at.row]
            row[np.argmax(row == layout.slots)] = at.slot
        return slots

    def _live(self, index: int, rows: Container[int]) -> np.ndarray:
        """Which rows of a window are among `rows`: bool [devices, rows of a window], or `_slots_of_pieces` of it."""
        if self._packing is not None:
            return self._slots_of_pieces(n for n in self._packing.pieces_in(index) if n in rows)[:, index]
        live = np.zeros((self.layout.devices, self.layout.rows), bool)
        for n in self.layout.rows_of(index):
            if n in rows:
                device, slot = self.layout.place(n)
                live[device, slot - index * self.layout.rows] = True
        return live

    def _call_windows(self, mode: str, first: int, last: int) -> None:
        """One call per window that holds arrivals first..last-1, with the others masked."""
        if first == last:
            return
        self.used_modes.add(mode)
        for index in range(self._window_of(first), self._window_of(last - 1) + 1):
            live = self._live(index, range(first, last))
            length = self.layout.length
            if self.layout.buckets > 1:
                members = self.layout.rows_of(index)
                length = self.layout.bucket(max(self._lengths[max(first, members.start) : min(last, members.stop)]))
            program = self.programs.window(mode, not self.critic_only, length)
            self._check()
            start = time.monotonic()
            self._totals, self._buffer = program(
                self.state,
                self._totals,
                self._buffer,
                self._indices[index],
                place(live, self._by_device),
                self.numbers,
            )
            used = live if self._packing is None else live[..., 0] < self.layout.slots
            self.watch(start, self._totals["sums"]["tokens"], used.mean(axis=1)[self._own], f"gradient {mode}")

    # -- boundaries ----------------------------------------------------------------------------------------------

    def _step_critic(self):
        step = self.programs.critic_step(not self.critic_only)
        self._check()
        start = time.monotonic()
        self.state["critic"], self.state["critic_opt"], self._totals, norm = step(
            self.state["critic"], self.state["critic_opt"], self._totals, self.numbers
        )
        self.watch(start, norm, 1.0, "critic step")
        return norm

    def _filled_mask(self):
        mask = np.zeros((self.layout.devices, self.layout.slots), bool)
        for n in range(self._filled):
            mask[self._place_of(n)] = True
        return place(mask, self._by_device)

    def _filled_rows(self):
        if self._packing is None:
            return self._filled_mask()
        slots = self._slots_of_pieces(range(self._filled))
        return place(slots.reshape(self.layout.devices, self.layout.slots, -1), self._by_device)

    def update(self) -> dict[str, jax.Array]:
        """Ends the batch, full or not. Returns metric sums still on the device.

        With `critic_only` set the policy keeps its weights, the version does not move, and the critic steps once.
        """
        if self.empty:
            raise RuntimeError("an update needs at least one trajectory")
        self.accumulate()
        if self.choices.policy_at_boundary and not self.critic_only:
            self._check()
            self._buffer = self.programs.whiten(self._buffer, self._filled_mask())
            self._call_windows("policy", 0, self._filled)
        metrics = {}
        if self.choices.has_critic and (self.choices.critic_update == "batch" or self.critic_only):
            metrics["critic_grad_norm"] = self._step_critic()
            for _ in range(0 if self.critic_only else self.choices.critic_passes - 1):
                self._call_windows("again", 0, self._filled)
                self._step_critic()
        self._check()
        if self.critic_only:
            self._totals, sums = self.programs.clear(self._totals)
        else:
            names = ("kl_coef", "adv_mean", "adv_sq")
            scalars = {k: self.state[k] for k in names}
            start = time.monotonic()
            self.state["policy"], self.state["policy_opt"], scalars, self._totals, sums = self.programs.policy_step(
                self.state["policy"],
                self.state["policy_opt"],
                scalars,
                self._totals,
                self._buffer,
                self._filled_rows(),
                self.numbers,
            )
            self.watch(start, sums["tokens"], 1.0, "policy step")
            self.state |= scalars
            self.version += 1
        self._clear()
        return metrics | sums

    def _clear(self) -> None:
        self._filled = self._pending = self._arrived = 0
        self._chains.clear()
        self._lengths.clear()
        if self._packing is not None:
            self._packing.clear()

    def score(self, trajectories: Sequence[Sequence[dict]]) -> dict[str, jax.Array]:
        """Critic metric sums over the rows of trajectories without learning from them; the batch must be empty."""
        if not self.empty:
            raise RuntimeError("scoring needs an empty batch")
        for start in range(0, len(trajectories), self.layout.batch):
            for rows in trajectories[start : start + self.layout.batch]:
                self._place(rows)
            self._link()
            self._call_windows("critic", 0, self._filled)  # its gradients go with the totals
            self._clear()
        self._totals, sums = self.programs.clear(self._totals)
        return sums

    def warm_up(self, row: dict, *, preheat: bool, check: Callable[[], None] = _nothing) -> list[str]:
        """Compiles every program on a blank row and puts the state back; returns what was compiled.

        `check()` is called before each program; if it raises, the learner is of no further use.
        """
        saved = jax.tree.map(jnp.copy, self.state), self.version, self.critic_only
        self._check = check
        for critic_only in (True, False) if preheat else (False,):
            self.critic_only = critic_only
            for length in self.layout.lengths:
                one = row if self.layout.buckets == 1 else row | {"length": np.int32(length)}
                rows = (one,) if self.layout.most == 1 else (one | {"followed": np.True_}, one)
                for _ in range(2):  # the second round has the programs' own results as inputs
                    self.put(*rows)
                    self.update()
                if critic_only:
                    self.score([rows])
        self.state, self.version, self.critic_only = saved
        self._check = _nothing
        if self.programs.shard_params:
            self.published_policy()
            self.whole_state()
        steps = ["put", "policy step"] + (["critic step"] if self.choices.has_critic else [])
        steps += ["links"] if self.programs.linked else []
        return steps + [f"gradient {mode}" for mode in sorted(self.used_modes)]

    # -- weights -------------------------------------------------------------------------------------------------

    def published_policy(self) -> dict:
        """The policy's parameters, whole on every device of this process, safe to keep: they are never donated."""
        policy = self.state["policy"]
        if self.programs.shard_params:
            policy = self.programs.whole(policy)
        return own_copy(policy, self.mesh)

    def whole_state(self) -> dict:
        """The state in arrays that this process can read all of, for a checkpoint."""

        def whole(x):  # leaf by leaf: the devices have no room for all of a state that was cut
            readable = x.is_fully_addressable or x.is_fully_replicated
            return x if readable else multihost_utils.process_allgather(x, tiled=True)

        return jax.tree.map(whole, self.state)

    def start(self, policy: dict) -> None:
        """Begins anew with these parameters: fresh optimizers, and a critic that starts as the policy."""
        self._begin(self.programs.new_state(place(policy, self._replicated)), 0)

    def load(self, state: dict, version: int) -> None:
        """Continues from a restored state at a boundary."""
        if self.mesh.is_multi_process:  # what was restored is the host's
            state = jax.tree.map(place, state, self.programs.shardings)
        self._begin(state, version)

    def _begin(self, state: dict, version: int) -> None:
        self.state, self.version = state, version
        self._totals = self.programs.new_totals()
        self._clear()
