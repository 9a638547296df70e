"""The compiled programs of the learner and the arrays they work on.

state   what a checkpoint holds: parameters, optimizer states, KL coefficient, running moments of the advantages
buffer  the rows of the batch in the making, [devices, slots, ...] on the mesh
totals  unnormalised gradient sums and metric sums since the last boundary

Calls between two boundaries read `state` and change only `totals` and `buffer`; the boundary divides, steps and clears.
The policy's parameters are never donated: the sampler may still read them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sao_jax.learner import packed, sharding
from sao_jax.learner import window as win
from sao_jax.learner.layout import Layout
from sao_jax.learner.objective import Choices
from sao_jax.models.compute import PLAIN, Compute
from sao_jax.models.config import ModelConfig
from sao_jax.models.critic import critic_outputs, init_critic, matching_leaves
from sao_jax.objectives import statistics
from sao_jax.objectives.divergences import rollout_kl, update_kl_coefficient
from sao_jax.objectives.smoothing import smooth_update_with_kl

P = jax.P
INT_FIELDS = ("tokens", "action_mask", "segment_ids")
FLOAT_FIELDS = ("rollout_logp", "rewards")
# What a gradient call does: compute values, advantages and targets anew; the policy's gradient; the critic's gradient.
MODES = {
    "both": (True, True, True),
    "critic": (True, False, True),  # the policy waits for the boundary, or is not trained at all
    "policy": (False, True, False),  # at the boundary, from stored advantages
    "again": (False, False, True),  # a further pass of the critic over stored targets
}
SCALAR_FIELDS = ("length", "truncated", "lambda_", "advantage", "staleness", "temperature", "followed", "seam")


def adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without its learning rate, which is a traced number."""
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def global_norm(tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))


def optimizer_step(params, opt_state, gradients, numbers: dict, *, prefix: str = "", frozen=None):
    """Clips by global norm, then AdamW with linear warm-up; frozen leaves stay as they are.

    Returns (params, optimizer state, norm before clipping). The step count of the schedule is the optimizer's own, so
    it survives a checkpoint.
    """
    norm = global_norm(gradients)
    limit = numbers[f"{prefix}grad_clip"]
    gradients = jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)), gradients)
    transform = adam(numbers["adam_b1"], numbers["adam_b2"], numbers["adam_eps"])
    directions, opt_state = transform.update(gradients, opt_state, params)
    warm = jnp.minimum(1.0, opt_state.count / jnp.maximum(numbers["lr_warmup"], 1.0))
    rate = numbers[f"{prefix}lr"] * warm

    def move(p, d, fixed=False):
        return p if fixed else p - rate * (d + numbers["weight_decay"] * p)

    moved = jax.tree.map(move, params, directions, *([] if frozen is None else [frozen]))
    return moved, opt_state, norm


def divide(sums, count):
    return jax.tree.map(lambda g: g / jnp.maximum(count, 1.0), sums)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions for one model, set of choices, layout and mesh; built once, cheap to call."""

    config: ModelConfig
    choices: Choices
    layout: Layout
    mesh: jax.sharding.Mesh
    shard_params: bool = False
    compute: Compute = PLAIN

    # -- shardings ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def abstract(self) -> dict:
        """Shapes of the state, without computing it."""
        from sao_jax.models.decoder import init_params

        return jax.eval_shape(lambda key: self._new_state(init_params(self.config, key)), jax.random.key(0))

    @functools.cached_property
    def specs(self) -> dict:
        """PartitionSpec of every leaf of the state; moments follow their parameters."""
        return sharding.param_specs(self.abstract, self.mesh, shard=self.shard_params)

    @functools.cached_property
    def shardings(self) -> dict:
        return sharding.shardings(self.specs, self.mesh)

    def abstract_state(self) -> dict:
        """What `Checkpoints.restore` needs: shapes, types and shardings on this mesh; arrays of the host if other
        processes have a part of it."""
        if self.mesh.is_multi_process:
            return jax.tree.map(lambda x: np.empty(x.shape, x.dtype), self.abstract)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.abstract, self.shardings
        )

    @functools.cached_property
    def frozen(self):
        if not (self.choices.has_critic and self.choices.freeze):
            return jax.tree.map(lambda _: False, self.abstract["critic"])
        return matching_leaves(self.abstract["critic"], self.choices.freeze)

    # -- construction ------------------------------------------------------------------------------------------------

    def _new_state(self, policy: dict) -> dict:
        critic = init_critic(self.config, policy) if self.choices.has_critic else {}
        transform = adam(0.9, 0.999, 1e-8)
        zero = jnp.zeros((), jnp.float32)
        return {
            "policy": policy,
            "critic": critic,
            "policy_opt": transform.init(policy),
            "critic_opt": transform.init(critic),
            "kl_coef": zero,
            "adv_mean": zero,
            "adv_sq": zero + 1.0,
        }

    def new_state(self, policy: dict) -> dict:
        """Fresh optimizer states, and a critic that starts as the policy with a zero head."""
        return jax.jit(self._new_state, out_shardings=self.shardings)(policy)

    @property
    def _totals_spec(self) -> dict:
        totals = {name: sharding.accumulator_specs(specs) for name, specs in self._summed.items()}
        return totals | {"sums": {name: P(sharding.AXIS) for name in win.SUMS + win.MAXIMA}}

    @property
    def _summed(self) -> dict:
        """Specs of the parameters that each gradient sum belongs to; the penalty is in the policy's, or apart."""
        summed = {name: self.specs[name] for name in ("policy", "critic")}
        return summed | {"penalty": self.specs["policy"]} if self.choices.separate_penalty else summed

    @property
    def _totals_shardings(self) -> dict:
        return sharding.shardings(self._totals_spec, self.mesh)

    def new_totals(self) -> dict:
        D = self.layout.devices

        def make():
            totals = {
                name: sharding.zero_accumulator(self.abstract["critic" if name == "critic" else "policy"], specs, D)
                for name, specs in self._summed.items()
            }
            return totals | {"sums": {name: jnp.zeros((D,), jnp.float32) for name in win.SUMS + win.MAXIMA}}

        return jax.jit(make, out_shardings=self._totals_shardings)()

    def new_buffer(self) -> dict:
        D, S, L = self.layout.devices, self.layout.slots, self.layout.length
        shapes = {k: ((D, S, L), np.int32) for k in ("tokens", "segment_ids")}
        shapes["action_mask"] = ((D, S, L), bool)
        shapes |= {k: ((D, S, L), np.float32) for k in ("rollout_logp", "rewards", "values", "advantages", "targets")}
        shapes |= {k: ((D, S), np.float32) for k in ("lambda_", "advantage", "staleness")}
        shapes |= {"length": ((D, S), np.int32)} | {k: ((D, S), bool) for k in ("truncated", "followed", "seam")}
        if self.linked:
            shapes |= {k: ((D, S), np.float32) for k in ("next_value", "carry", "critic_carry")}
            shapes["links"] = ((D, S, win.LINKS), np.float32)
        on_mesh = jax.NamedSharding(self.mesh, P(sharding.AXIS))
        buffer = {k: sharding.place(np.zeros(*spec), on_mesh) for k, spec in shapes.items()}
        return buffer | {"temperature": sharding.place(np.ones((D, S), np.float32), on_mesh)}

    # -- programs ----------------------------------------------------------------------------------------------------

    def _on_mesh(self, function, in_specs, out_specs):
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    @functools.cached_property
    def put(self):
        """(buffer, device, slot, ints [3, L], floats [2, L], scalars [8]) -> buffer with that row in place."""

        def place(buffer, device, slot, ints, floats, scalars):
            fields = dict(zip(INT_FIELDS, ints, strict=True)) | dict(zip(FLOAT_FIELDS, floats, strict=True))
            fields |= dict(zip(SCALAR_FIELDS, scalars, strict=True))
            here = jax.lax.axis_index(sharding.AXIS) == device
            out = dict(buffer)
            for name, x in fields.items():
                old = jax.lax.dynamic_index_in_dim(buffer[name][0], slot, keepdims=False)
                row = jnp.where(here, x.astype(old.dtype), old)
                out[name] = jax.lax.dynamic_update_index_in_dim(buffer[name][0], row, slot, 0)[None]
            return out

        spec = P(sharding.AXIS)
        mapped = self._on_mesh(place, (spec, P(), P(), P(), P(), P()), spec)
        return jax.jit(mapped, donate_argnums=0)

    # A window's rows are named by its index and by which of them are live [rows]; packed, by the slots [rows, pieces]
    # of their pieces (`slots`: none) in place of the latter.

    def _take(self, buffer, index, live, length: int | None = None):
        """(rows, which of them are live, forward pass of the policy, of the critic) of a window.

        `live` None: unpacked, the field "filled" of the buffer says it. `length`: that of the rows, if not all of it.
        """
        if self.layout.packed:
            data, live, shared = packed.take(buffer, live[0])
            policy = functools.partial(packed.policy_forward, self.config, rows=data, shared=shared)
            return data, live, policy, functools.partial(packed.critic_forward, self.config, rows=data, shared=shared)
        data = win.shorten(win.take_window(buffer, index, self.layout.rows), length or self.layout.length)
        policy = functools.partial(win.policy_forward, self.config, rows=data)
        live = data["filled"] if live is None else live[0]
        return data, live, policy, functools.partial(critic_outputs, self.config, tokens_BxT=data["tokens"])

    def _put(self, buffer, index, live, fresh):
        if self.layout.packed:
            return packed.put(buffer, live, fresh)
        return win.put_window(buffer, index, self.layout.rows, live, fresh)

    def window(self, mode: str, frozen: bool = True, length: int | None = None):
        """`_window`, at one of the layout's lengths; by default the longest."""
        return self._window(mode, frozen, length or self.layout.length)

    @functools.cache  # noqa: B019 -- the instance lives as long as the run
    def _window(self, mode: str, frozen: bool, length: int):
        """(state, totals, buffer, window index, live [D, rows], numbers) -> totals, buffer, for one of `MODES`.

        A window whose gradient is not finite on some device adds nothing but to the count of skipped windows; `frozen`
        applies the critic's freeze patterns.
        """
        choices, specs, compute = self.choices, self.specs, self.compute
        scored, with_policy, with_critic = MODES[mode]
        fixed = self.frozen if frozen else jax.tree.map(lambda _: False, self.frozen)
        parts = [name for name, used in (("policy", with_policy), ("critic", with_critic)) if used]

        logp_for_targets = scored and choices.has_critic and choices.critic_targets == "dis"

        def body(params, scalars, totals, buffer, index, live, numbers):
            data, used, policy_forward, critic_forward = self._take(buffer, index, live, length)
            data["action_mask"] &= used[:, None]
            local = {name: sharding.localize(params[name], specs[name]) for name in ("policy", "critic")}
            trained = {name: local[name] for name in parts}

            def loss(trained):
                # One forward pass of each model serves its loss and, with its gradient stopped, the targets.
                whole = {name: sharding.gather(p, specs[name]) for name, p in (local | trained).items()}
                seen, fresh, total, sums = data, {}, jnp.zeros(()), {}
                logp = entropy = outputs = None
                if with_policy or logp_for_targets:
                    logp, entropy = policy_forward(params=whole["policy"], compute=compute)
                if choices.has_critic and (scored or with_critic):
                    critic = win.frozen_as_constants(whole["critic"], fixed)
                    outputs = critic_forward(params=critic, compute=compute)
                if scored:
                    fresh = win.score(choices, numbers, scalars, data, outputs, jax.lax.stop_gradient(logp))
                    seen = data | fresh
                if with_policy:
                    total, sums = win.policy_terms(choices, numbers, scalars["kl_coef"], seen, logp, entropy)
                if with_critic and choices.has_critic:
                    total += win.critic_loss(choices, numbers, seen, outputs)
                    sums["critic_count"] = win.visited_tokens(choices, seen).sum().astype(jnp.float32)
                if scored and choices.has_critic:
                    sums = sums | win.critic_sums(seen)
                return total, (sums, fresh)

            def penalty(policy):
                # The forward pass is that of the loss: the compiler finds them equal and does it once.
                logp, _ = policy_forward(params=sharding.gather(policy, specs["policy"]), compute=compute)
                return win.penalty(scalars["kl_coef"], data, logp)

            gradients, (sums, fresh) = jax.grad(loss, has_aux=True)(trained)
            if with_policy and choices.separate_penalty:
                gradients["penalty"] = jax.grad(penalty)(trained["policy"])
            keep = win.all_finite((gradients, sums))
            out = {"sums": win.add_sums(totals["sums"], sums, keep)}
            for name, summed in self._summed.items():
                out[name] = totals[name]
                if name in gradients:
                    kept = jax.tree.map(lambda g: jnp.where(keep, g, 0.0), gradients[name])
                    out[name] = sharding.accumulate(totals[name], kept, summed)
            fresh.pop("advantages_raw", None)  # for metrics only
            return out, self._put(buffer, index, live[0], fresh)

        rest = P(sharding.AXIS)
        both = {name: specs[name] for name in ("policy", "critic")}
        in_specs = (both, P(), self._totals_spec, rest, P(), rest, P())
        mapped = self._on_mesh(body, in_specs, (self._totals_spec, rest))

        def gradient(state, totals, buffer, index, live, numbers):
            params = {name: state[name] for name in ("policy", "critic")}
            scalars = {name: state[name] for name in ("kl_coef", "adv_mean", "adv_sq")}
            return mapped(params, scalars, totals, buffer, index, live, numbers)

        return jax.jit(gradient, donate_argnums=(1, 2))

    @property
    def linked(self) -> bool:
        """Whether a trajectory may have several rows whose advantages depend on each other."""
        return self.choices.has_critic and self.layout.most > 1

    @functools.cached_property
    def links(self):
        """(state, buffer, window index, live [D, rows], numbers) -> buffer with `links` of the live rows."""
        choices, specs = self.choices, self.specs

        def body(params, buffer, index, live, numbers):
            data, _, policy_forward, critic_forward = self._take(buffer, index, live)
            whole = {k: sharding.gather(sharding.localize(p, specs[k]), specs[k]) for k, p in params.items()}
            outputs = critic_forward(params=whole["critic"])
            logp = policy_forward(params=whole["policy"])[0] if "policy" in whole else None
            found = win.links(choices, numbers, data, outputs, logp)
            return self._put(buffer, index, live[0], {"links": found})

        names = ("policy", "critic") if choices.critic_targets == "dis" else ("critic",)
        rest = P(sharding.AXIS)
        mapped = self._on_mesh(body, ({k: specs[k] for k in names}, rest, P(), rest, P()), rest)

        def links(state, buffer, index, live, numbers):
            return mapped({k: state[k] for k in names}, buffer, index, live, numbers)

        return jax.jit(links, donate_argnums=1)

    @functools.cached_property
    def chain(self):
        """(links, followed, seam of the buffer, order [N]) -> what rows get from those that follow them, [D, S]."""
        D, S = self.layout.devices, self.layout.slots

        def chain(links, followed, seam, order):
            found = win.chain(self.choices, links.reshape(D * S, -1), followed.reshape(-1), seam.reshape(-1), order)
            return {k: v.reshape(D, S) for k, v in found.items()}

        return jax.jit(chain, out_shardings=jax.NamedSharding(self.mesh, P(sharding.AXIS)))

    @functools.cache  # noqa: B019
    def critic_step(self, frozen: bool = True):
        """(critic, critic_opt, totals, numbers) -> critic, critic_opt, totals without that gradient, its norm."""

        def step_critic(critic, opt, totals, numbers):
            count = totals["sums"]["critic_count"].sum()
            gradient = divide(sharding.reduce(totals["critic"], self.specs["critic"]), count)
            critic, opt, norm = optimizer_step(
                critic, opt, gradient, numbers, prefix="critic_", frozen=self.frozen if frozen else None
            )
            cleared = {
                "critic": jax.tree.map(jnp.zeros_like, totals["critic"]),
                "sums": totals["sums"] | {"critic_count": jnp.zeros_like(totals["sums"]["critic_count"])},
            }
            return critic, opt, totals | cleared, norm

        out = (self.shardings["critic"], self.shardings["critic_opt"], self._totals_shardings, None)
        return jax.jit(step_critic, donate_argnums=(0, 1, 2), out_shardings=out)

    @functools.cached_property
    def whiten(self):
        """(buffer, filled [D, slots]) -> buffer with advantages standardised over all action tokens of the batch."""

        def whiten(buffer, filled):
            mask = buffer["action_mask"] & filled[..., None]
            return buffer | {"advantages": statistics.whiten(buffer["advantages"], mask)}

        return jax.jit(whiten, donate_argnums=0, out_shardings=jax.NamedSharding(self.mesh, P(sharding.AXIS)))

    @functools.cached_property
    def policy_step(self):
        """(policy, policy_opt, scalars, totals, buffer, filled, numbers) -> the first four anew, and metrics.

        `filled` is [D, slots], or, packed, the slots of the pieces of all rows [D, slots, pieces].
        Ends an update: the policy's step, its smoothing, the KL coefficient and running moments, cleared totals. Of the
        inputs only the optimizer state and the totals are donated.
        """
        specs = self.specs["policy"]

        def step_policy(policy, opt, scalars, totals, buffer, filled, numbers):
            sums = {k: v.max() if k in win.MAXIMA else v.sum() for k, v in totals["sums"].items()}
            gradient = divide(sharding.reduce(totals["policy"], specs), sums["policy_count"])
            measured = sums["tokens"] - sums["nonfinite"]  # tokens that the divergence is over
            if self.choices.separate_penalty:
                apart = divide(sharding.reduce(totals["penalty"], specs), measured)
                gradient = jax.tree.map(jnp.add, gradient, apart)
            proposed, opt, norm = optimizer_step(policy, opt, gradient, numbers)
            kl = sums["kl"] / jnp.maximum(measured, 1.0)
            metrics = sums | {"policy_grad_norm": norm, "kl_before": kl, "smooth_fraction": jnp.ones(())}
            scalars = dict(scalars)
            kl_of = functools.partial(self._mean_kl, buffer=buffer, filled=filled)
            if self.choices.kl == "smooth":
                policy, metrics["smooth_fraction"], metrics["kl_after"], _ = smooth_update_with_kl(
                    policy, proposed, kl_of, target=numbers["kl_target"], old_kl=kl
                )
            else:
                policy = proposed
            if self.choices.kl == "penalty":
                metrics["kl_after"] = kl_of(policy)
                scalars["kl_coef"] = update_kl_coefficient(
                    scalars["kl_coef"], kl, target=numbers["kl_target"], step_size=numbers["kl_step"]
                )
            metrics["kl_coef"] = scalars["kl_coef"]
            scalars = self._moments(scalars, sums)
            return policy, opt, scalars, jax.tree.map(jnp.zeros_like, totals), metrics

        scalars = {name: self.shardings[name] for name in ("kl_coef", "adv_mean", "adv_sq")}
        out = (self.shardings["policy"], self.shardings["policy_opt"], scalars, self._totals_shardings, None)
        return jax.jit(step_policy, donate_argnums=(1, 3), out_shardings=out)

    @functools.cached_property
    def whole(self):
        """policy -> the same, whole on every device."""
        return jax.jit(lambda policy: policy, out_shardings=jax.NamedSharding(self.mesh, P()))

    @functools.cached_property
    def clear(self):
        """totals -> (zeroed totals, metrics): ends an update of the critic alone."""

        def clear(totals):
            sums = {k: v.max() if k in win.MAXIMA else v.sum() for k, v in totals["sums"].items()}
            return jax.tree.map(jnp.zeros_like, totals), sums

        return jax.jit(clear, donate_argnums=0, out_shardings=(self._totals_shardings, None))

    def _moments(self, scalars: dict, sums: dict) -> dict:
        """Running moments of the advantages: exponential averages over about ten updates."""
        count = jnp.maximum(sums["value_count"], 1.0)
        seen = {"adv_mean": sums["advantage"] / count, "adv_sq": sums["advantage_sq"] / count}
        moved = {k: jnp.where(sums["value_count"] > 0, 0.9 * scalars[k] + 0.1 * v, scalars[k]) for k, v in seen.items()}
        return scalars | moved

    def _mean_kl(self, params, *, buffer, filled):
        """KL(rollout || params) in nats per token: k3 over all action tokens of the filled rows."""
        specs, rows = self.specs["policy"], self.layout.rows

        def body(params, buffer, filled):
            whole = sharding.gather(sharding.localize(params, specs), specs)

            def step(index, carry):
                def measure(length):
                    if self.layout.packed:
                        slots = jax.lax.dynamic_slice_in_dim(filled, index * rows, rows, axis=1)
                        data, live, policy_forward, _ = self._take(buffer, index, slots)
                    else:
                        data, live, policy_forward, _ = self._take(buffer | {"filled": filled}, index, None, length)
                    data["action_mask"] &= live[:, None]
                    logp, _ = policy_forward(params=whole, compute=self.compute)
                    return rollout_kl(data["rollout_logp"], logp, data["action_mask"])

                if self.layout.buckets == 1:
                    kl, count = measure(self.layout.length)
                else:
                    seen = win.take_window({"length": buffer["length"], "filled": filled}, index, rows)
                    longest = jnp.where(seen["filled"], seen["length"], 0).max()
                    shorter = sum((longest <= length).astype(jnp.int32) for length in self.layout.lengths[1:])
                    branches = [functools.partial(measure, length) for length in self.layout.lengths]
                    kl, count = jax.lax.switch(shorter, branches)
                return carry[0] + kl, carry[1] + count

            zero = jax.lax.pcast(jnp.zeros(()), sharding.AXIS, to="varying")
            used = filled.sum()  # rows fill up from the first
            if self.layout.packed:
                used = ((filled[0, :, 0] < buffer["length"].shape[1]) * (1 + jnp.arange(filled.shape[1]))).max()
            used = -(-jax.lax.pmax(used, sharding.AXIS) // rows)
            kl, count = jax.lax.fori_loop(0, used, step, (zero, zero))
            return jax.lax.psum(kl, sharding.AXIS) / jnp.maximum(jax.lax.psum(count, sharding.AXIS), 1.0)

        names = (
            "tokens",
            "action_mask",
            "rollout_logp",
            "temperature",
            *(("length",) if self.layout.packed or self.layout.buckets > 1 else ()),
        )
        used = {k: buffer[k] for k in names}
        return self._on_mesh(body, (specs, P(sharding.AXIS), P(sharding.AXIS)), P())(params, used, filled)
