"""Checkpoints: learner state written in the background, each with checksums, restored onto any number of devices.

A step is one folder: the arrays as Orbax writes them (plain nested dicts: an optimizer's named tuples become dicts of
their field names), `meta.json` (what the caller says about the step, and the shapes), and last of all `SHA256SUMS`, in
the form that `sha256sum -c` reads. A step without it was never finished. Reading meta data needs no device and no JAX.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

MANIFEST = "SHA256SUMS"
META = "meta.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that Orbax is writing

_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A save in the background failed, or a step is not complete; the message is one line that names the step."""


class Checkpoints:
    """The steps in `folder`; the newest `keep` complete ones stay. To be used from one thread of one process.

    Opening changes nothing on disk, so that others can read the checkpoints of a live run. Use it in a `with` block, or
    call `close`: the last save does not outlive the program by itself.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is {keep}, but at least one checkpoint has to stay")
        self.folder = pathlib.Path(folder).absolute()
        self._keep = keep
        self._verified: set[int] = set()
        self._broken: set[int] = set()
        self._pending: tuple[int, concurrent.futures.Future] | None = None
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")

    def steps(self) -> list[int]:
        """All steps on disk in order, complete or not."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal() and entry.is_dir())

    def next_step(self) -> int:
        """The lowest number greater than those of all steps on disk, complete or not."""
        running = [self._pending[0]] if self._pending else []
        return max([*self.steps(), *running], default=-1) + 1

    def save(self, step: int, state: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Starts to save; on return `state` and `meta` are copied, so that the caller may donate or change them.

        Waits for the save before, and raises its error if it failed. `step` only orders the checkpoints: with
        `next_step()` one policy version can be saved several times (the version belongs in `meta`).

        Raises:
          ValueError: `step` is not greater than those on disk, or `meta` is not JSON.
          CheckpointError: the save before has failed.
        """
        self.wait()
        if step < self.next_step():
            raise ValueError(f"checkpoint {step} cannot be saved in {self.folder}: next is {self.next_step()}")
        arrays = _to_host(state)
        leaves = {"/".join(path): [array.dtype.name, list(array.shape)] for path, array in arrays.items()}
        text = json.dumps({"step": step, "meta": meta, "leaves": leaves}, indent=1)
        self._pending = (step, self._writer.submit(self._write, step, _nested(arrays), text))

    def wait(self) -> None:
        """Returns when nothing is being saved; raises the error of a save that failed (once)."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        if (error := future.exception()) is not None:
            raise CheckpointError(f"checkpoint {step} in {self.folder} was not saved: {_one_line(error)}") from error

    def newest(self) -> int | None:
        """The newest complete step whose checksums verify, or None. Broken ones are named in a warning and skipped."""
        for step in reversed(self.steps()):
            if self._pending is not None and step == self._pending[0]:
                continue
            if not (problem := self._problem(step)):
                return step
            _log.warning("checkpoint %d in %s is skipped: %s", step, self.folder, problem)
        return None

    def read_meta(self, step: int) -> dict[str, Any]:
        """What was given to `save` as `meta`."""
        return self._record(step)["meta"]

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Returns (state, meta), with the tree structure of `like`.

        Args:
          step: a complete one; its checksums are verified unless `newest` has done so.
          like: a tree with the structure, shapes and dtypes of the saved one. A leaf with a sharding (an array, or a
            jax.ShapeDtypeStruct) is restored with it, on whatever devices it names; one without becomes an array on
            the default device; a NumPy array or a Python number stays on the host.

        Raises:
          CheckpointError: the step is missing or broken.
          ValueError: another structure, shape or dtype was saved; names the first leaf that differs.
        """
        import jax
        from orbax.checkpoint import v1 as ocp

        if self._pending is not None and self._pending[0] == step:
            self.wait()
        if problem := self._problem(step):
            raise CheckpointError(f"checkpoint {step} in {self.folder} cannot be restored: {problem}")
        record = self._record(step)
        wanted = _by_path(like)
        specs = {path: _spec(leaf) for path, leaf in wanted.items()}
        _check_leaves(step, specs, record["leaves"])
        with _alone():
            loaded = ocp.load(self.folder / str(step), _nested(specs))
        leaves = [_finish(_at(loaded, path), leaf) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), record["meta"]

    def close(self) -> None:
        """Waits like `wait`, and ends the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _write(self, step: int, tree: dict, text: str) -> None:
        """In the writer's thread: arrays, meta data, checksums, and only then the removal of old steps."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for torn in self.folder.glob(f"*{TEMPORARY}*"):  # what a kill during a save has left
            shutil.rmtree(torn)
        folder = self.folder / str(step)
        with _quiet_orbax():
            _save_arrays(folder, tree)
        write_durably(folder / META, text)
        sums = [f"{_sha256(folder / name)}  {name}" for name in _files(folder)]
        write_durably(folder / MANIFEST, "\n".join(sums) + "\n")
        for old in self._outdated():
            # First of all the manifest, so that a half removed step is not taken for a damaged one.
            (self.folder / str(old) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.folder / str(old))

    def _outdated(self) -> list[int]:
        """Steps before the `keep` newest complete ones."""
        steps = self.steps()
        complete = [s for s in steps if (self.folder / str(s) / MANIFEST).exists() and s not in self._broken]
        return [step for step in steps if step < complete[-self._keep :][0]]

    def _problem(self, step: int) -> str:
        """What is wrong with a step on disk, "" if nothing is."""
        if step in self._verified:
            return ""
        problem = verify(self.folder / str(step))
        (self._broken if problem else self._verified).add(step)
        return problem

    def _record(self, step: int) -> dict[str, Any]:
        folder = self.folder / str(step)
        if problem := verify(folder, only=META):
            raise CheckpointError(f"checkpoint {step} in {self.folder} cannot be read: {problem}")
        return json.loads((folder / META).read_text())


def verify(folder: pathlib.Path, only: str | None = None) -> str:
    """Compares a step's files (or one of them) with its checksums; returns the first problem, "" if there is none."""
    if not folder.is_dir():
        return "there is no such step"
    try:
        return _first_problem(folder, only)
    except FileNotFoundError:
        return "it was removed while it was read"


def _first_problem(folder: pathlib.Path, only: str | None) -> str:
    if not (folder / MANIFEST).exists():
        return "it was not saved completely"
    lines = (folder / MANIFEST).read_text(errors="replace").splitlines()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    present = _files(folder)
    for name in sorted(expected.keys() ^ set(present)):
        return f"file {name} is {'missing' if name in expected else 'not in ' + MANIFEST}"
    for name in present if only is None else [only]:
        if _sha256(folder / name) != expected[name]:
            return f"file {name} is damaged"
    return ""


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """A failed save is raised as one error; the same traceback from each of Orbax's threads would bury it."""

    def outside_orbax(record: logging.LogRecord) -> bool:
        return "orbax" not in pathlib.PurePath(record.pathname).parts

    logger = logging.getLogger("absl")
    logger.addFilter(outside_orbax)
    try:
        yield
    finally:
        logger.removeFilter(outside_orbax)


def _save_arrays(folder: pathlib.Path, tree: dict) -> None:
    import jax
    from orbax.checkpoint import v1 as ocp

    if jax.process_count() == 1:
        ocp.save(folder, tree)
        return
    # Of several processes this one alone has the folder. v1 would wait for the others all the same: it compares the
    # paths of all processes, by collectives that get between those of the learner.
    import orbax.checkpoint

    options = orbax.checkpoint.options.MultiprocessingOptions(**_only_this_process())
    handler = orbax.checkpoint.PyTreeCheckpointHandler(multiprocessing_options=options)
    with orbax.checkpoint.Checkpointer(handler, multiprocessing_options=options) as orbax_checkpointer:
        orbax_checkpointer.save(folder, args=orbax.checkpoint.args.PyTreeSave(tree))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Orbax reads without waiting for other processes."""
    import jax
    from orbax.checkpoint import v1 as ocp

    if jax.process_count() == 1:
        yield
        return
    context = ocp.Context()
    for name, value in _only_this_process().items():
        setattr(context.multiprocessing, name, value)
    with context:
        yield


def _only_this_process() -> dict[str, Any]:
    import jax

    me = jax.process_index()
    return {"primary_host": me, "active_processes": {me}, "barrier_sync_key_prefix": "sao_jax"}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 300 else f"{text[:100]} ... {text[-150:]}"  # the cause comes last


def _files(folder: pathlib.Path) -> list[str]:
    found = (p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return sorted(p.relative_to(folder).as_posix() for p in found)


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: pathlib.Path, content: str | bytes) -> None:
    """Whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _by_path(tree: Any) -> dict[tuple[str, ...], Any]:
    """Leaves by the names on their path: dict keys, field names and indices."""
    import jax

    leaves = jax.tree.leaves_with_path(tree)
    result = {tuple(jax.tree_util.keystr((key,), simple=True) for key in path): leaf for path, leaf in leaves}
    # Orbax joins names by dots, and would store two leaves under one name.
    if len({".".join(path) for path in result}) != len(leaves):
        raise ValueError("two leaves of the state have the same name: rename a key that has a dot")
    return result


def _to_host(state: Any) -> dict[tuple[str, ...], Any]:
    """Copies of all leaves on the host, typed random keys as their data."""
    import jax
    import numpy as np

    leaves = {path: jax.random.key_data(leaf) if _is_key(leaf) else leaf for path, leaf in _by_path(state).items()}
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    # Copies, not views: on CPU a view would hold the buffer, and a donated one could be overwritten under the writer.
    return {path: np.array(leaf) for path, leaf in leaves.items()}


def _is_key(leaf: Any) -> bool:
    import jax

    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> Any:
    import jax

    found = []  # jax.random.key_impl takes no ShapeDtypeStruct; while tracing it can be asked
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def _spec(leaf: Any) -> Any:
    """What Orbax is asked for in place of a leaf: with a sharding an array on devices, else one on the host."""
    import jax
    import numpy as np

    data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    shape, dtype = np.shape(data), getattr(data, "dtype", None) or np.asarray(data).dtype
    sharding = getattr(leaf, "sharding", None)
    # An array that no one has placed must not come back tied to a device: it could not be used beside a mesh.
    if sharding is None or (isinstance(leaf, jax.Array) and not leaf.committed):
        return np.empty(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _finish(value: Any, leaf: Any) -> Any:
    """A loaded value in the form of the leaf it stands for."""
    import jax
    import numpy as np

    if _is_key(leaf):
        return jax.random.wrap_key_data(value, impl=_key_impl(leaf))
    if isinstance(leaf, bool | int | float):
        return type(leaf)(value)
    if isinstance(leaf, np.ndarray | np.generic) or isinstance(value, jax.Array):
        return value
    return jax.numpy.array(value)


def _check_leaves(step: int, specs: Mapping[tuple[str, ...], Any], stored: Mapping[str, list]) -> None:
    expected = {"/".join(path): [spec.dtype.name, list(spec.shape)] for path, spec in specs.items()}
    for name in dict.fromkeys([*expected, *stored]):
        if expected.get(name) != stored.get(name):
            raise ValueError(
                f"checkpoint {step} does not fit: {name} is {_show(stored.get(name))} in the checkpoint, "
                f"{_show(expected.get(name))} is expected"
            )


def _show(leaf: list | None) -> str:
    return "nothing" if leaf is None else f"{leaf[0]}{leaf[1]}"


def _nested(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        tree = tree[name]
    return tree
