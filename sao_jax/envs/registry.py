"""Task families by name: `calculator:level=3,noise=0`, `my_package.tasks:Maze`, `tasks.py:Maze:size=5`."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sao_jax.data.protocols import TaskFamily
from sao_jax.envs.arithmetic import Arithmetic
from sao_jax.envs.calculator import Calculator
from sao_jax.envs.contest import Contest
from sao_jax.envs.coq import Coq
from sao_jax.envs.dialogue import Dialogue
from sao_jax.envs.grid import Grid
from sao_jax.envs.long_repair import LongRepair
from sao_jax.envs.mathword import MathWord
from sao_jax.envs.proof import Proof
from sao_jax.envs.repair import Repair

_FAMILIES: dict[str, Callable[..., TaskFamily]] = {}


def register(name: str, constructor: Callable[..., TaskFamily]) -> None:
    """Makes a family known by name. Raises ValueError if the name is taken or cannot be written in a spec."""
    if not name.replace("-", "_").isidentifier():
        raise ValueError(f"task name {name!r}; allowed: letters, digits, - and _")
    if name in _FAMILIES:
        raise ValueError(f"task {name!r} is already registered")
    _FAMILIES[name] = constructor


def names() -> list[str]:
    return sorted(_FAMILIES)


def make_family(spec: str) -> TaskFamily:
    """The family that a spec describes: `NAME[:option=value,...]`, NAME being registered or `module:Class`.

    `module` is a dotted import path or a path to a Python file. Raises ValueError for an unknown name or option, and
    for text where the option's default is a number.
    """
    constructor, options = _resolve(spec)
    allowed = inspect.signature(constructor).parameters
    for option, value in options.items():
        if option not in allowed:
            listed = ", ".join(allowed) or "none"
            raise ValueError(f"task {spec!r} has no option {option!r}; allowed: {listed}")
        for kinds, what in (((bool,), "true or false"), ((int, float), "a number")):  # a bool is no number here
            if type(allowed[option].default) in kinds and type(value) not in kinds:
                raise ValueError(f"task {spec!r}: {option} is {value!r}; it must be {what}")
    return constructor(**options)


def parse_options(text: str) -> dict[str, Any]:
    """`level=2,kind=sort` -> {"level": 2, "kind": "sort"}: Python literals where they are, else text."""
    options = {}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise ValueError(f"{item!r} is not of the form option=value")
        if name in options:
            raise ValueError(f"option {name!r} is given twice")
        options[name] = _literal(value.strip())
    return options


def _literal(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _resolve(spec: str) -> tuple[Callable[..., TaskFamily], dict[str, Any]]:
    head, _, rest = spec.partition(":")
    if head in _FAMILIES:
        return _FAMILIES[head], parse_options(rest)
    attribute, _, options = rest.partition(":")
    if not attribute.isidentifier():
        raise ValueError(f"unknown task {head!r}; allowed: {', '.join(names())}, or module:Class")
    module = _import(head)
    if not callable(getattr(module, attribute, None)):
        raise ValueError(f"{head} has no class {attribute!r}")
    constructor = getattr(module, attribute)
    if (
        not hasattr(constructor, "max_tokens")
        and not inspect.isfunction(constructor)
        and not isinstance(constructor, type)
    ):
        raise ValueError(f"{head}:{attribute} is no task family")
    return constructor, parse_options(options)


def _import(path: str) -> Any:
    """A module by dotted name, or by the path of its file."""
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise ValueError(f"no task file {path!r}")
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # a user's file may fail in any way; that is the user's error, in one line
            raise ValueError(f"task file {path!r} does not load: {type(error).__name__}: {error}") from error
        return module
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ValueError(f"cannot import {path!r} ({error}); allowed: {', '.join(names())}, or module:Class") from error


register("arithmetic", Arithmetic)
register("calculator", Calculator)
register("contest", Contest)
register("coq", Coq)
register("dialogue", Dialogue)
register("grid", Grid)
register("long-repair", LongRepair)
register("mathword", MathWord)
register("proof", Proof)
register("repair", Repair)
